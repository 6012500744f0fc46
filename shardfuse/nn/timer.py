"""The time that the fusions of modules take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from time import perf_counter
from typing import ClassVar, Self
from weakref import WeakValueDictionary

import torch

from ..frontend import FusionDefinition
from ..ir import TensorView
from .settings import Setting


class FusionTimer:
    """Seconds spent in the fusions, with their collectives, of the modules that it watches.

    On a CPU by the clock; on a GPU by events on the current stream, read (and waited for) by ``seconds()``.
    """

    numbered: ClassVar[WeakValueDictionary[int, FusionTimer]] = WeakValueDictionary()
    """By the number under which a compiled graph knows them."""
    _count: ClassVar[count[int]] = count()

    def __init__(self) -> None:
        self._clocked = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._enter()

    def _enter(self) -> None:
        self.number = next(self._count)
        self.numbered[self.number] = self

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
        if self._events:
            self._events[-1][1].synchronize()
        self._clocked += sum(start.elapsed_time(end) for start, end in self._events) / 1e3
        self._events.clear()
        return self._clocked

    def reset(self) -> None:
        """Start again from zero."""
        self._clocked = 0.0
        self._events.clear()

    def run(
        self, fusion: FusionDefinition, arguments: list[torch.Tensor], sizes: Mapping[TensorView, Sequence[int]] | None
    ) -> list[torch.Tensor]:
        """``fusion.execute(arguments, sizes=sizes)``, timed."""
        if arguments[0].is_cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            outputs = fusion.execute(arguments, sizes=sizes)
            end.record()
            self._events.append((start, end))
        else:
            began = perf_counter()
            outputs = fusion.execute(arguments, sizes=sizes)
            self._clocked += perf_counter() - began
        return outputs


class TimedModule(torch.nn.Module):
    """A module of fusions.  ``timer``: where their time is counted, if anywhere."""

    timer: Setting[FusionTimer | None] = Setting()
