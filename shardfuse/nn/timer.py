"""The time that the fusions of modules take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from time import perf_counter
from typing import ClassVar, Self, TypeVar
from weakref import WeakValueDictionary

import torch

from ..executor.gpu_clock import Clock, Span, clock_of
from .settings import Setting, unset

R = TypeVar("R")

_SPANS = 4096
"""Spans that are kept unread: of so many the older half has ended long ago."""


class FusionTimer:
    """Seconds spent in the fusions, with their collectives, of the modules that it watches.

    On a CPU by the clock; on a GPU by events on the current stream, read (and waited for) by ``seconds()``.  What is
    captured into a CUDA graph is not timed.
    """

    numbered: ClassVar[WeakValueDictionary[int, FusionTimer]] = WeakValueDictionary()
    """By the number under which a compiled graph knows them."""
    _count: ClassVar[count[int]] = count()

    def __init__(self) -> None:
        self._clocked = 0.0
        self._spans: deque[tuple[Clock, Span]] = deque()
        self._enter()

    def _enter(self) -> None:
        self.number = next(self._count)
        self.numbered[self.number] = self

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_clocked": self.seconds(), "_spans": deque[object]()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._enter()  # a copy is another timer

    def watch(self, module: torch.nn.Module) -> Self:
        """Time every fused module in ``module`` from now on."""
        for part in module.modules():
            if isinstance(part, TimedModule):
                part.timer = self
        return self

    def seconds(self) -> float:
        """Seconds since the last ``reset()``."""
        self._read(0)
        return self._clocked

    def reset(self) -> None:
        """Start again from zero."""
        self._clocked = 0.0
        self._spans.clear()

    def _read(self, left: int) -> None:
        """Add the oldest spans up, but for so many."""
        while len(self._spans) > left:
            clock, span = self._spans.popleft()
            self._clocked += clock.milliseconds(span) / 1e3

    def run(self, call: Callable[[Sequence[torch.Tensor]], R], arguments: Sequence[torch.Tensor]) -> R:
        """``call(arguments)``, timed."""
        if arguments[0].is_cuda:
            clock = clock_of(arguments[0].device)
            span = clock.begin()
            outputs = call(arguments)
            if span is not None:
                clock.end(span)
                self._spans.append((clock, span))
                if len(self._spans) > _SPANS:
                    self._read(_SPANS // 2)
        else:
            began = perf_counter()
            outputs = call(arguments)
            self._clocked += perf_counter() - began
        return outputs


class TimedModule(torch.nn.Module):
    """A module of fusions.  ``timer``: where their time is counted, if anywhere."""

    timer: Setting[FusionTimer | None] = Setting(FusionTimer)

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(unset(type(self)))
