# pyright: reportPrivateUsage=false
"""Spans of time on a GPU's current stream, which take the host two microseconds each (``clock.c``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, cast

import torch

from ..config import read_cache_directory
from .driver import LIBRARY, Driver, open_driver
from .launch import index_of

Span = Any  # a capsule, or two of torch's events


class Clock(Protocol):
    """Spans of one device."""

    def begin(self) -> Span | None:
        """A span from what the current stream was given so far; ``None`` while it is captured into a graph."""
        ...

    def end(self, span: Span) -> None:
        """To what it was given since."""
        ...

    def milliseconds(self, span: Span) -> float:
        """Its length, once the GPU has come to its end."""
        ...


@cache
def clock_of(device: torch.device) -> Clock:
    driver = open_driver(read_cache_directory())
    if driver is None:
        return _TorchClock(device)
    driver.connect_clock(LIBRARY)
    return DriverClock(driver, device)


class DriverClock:
    def __init__(self, driver: Driver, device: torch.device) -> None:
        self._driver, self._index = driver, index_of(device)
        self._stream = cast("Callable[[int], int]", torch._C._cuda_getCurrentRawStream)
        self.milliseconds = driver.length_of_span

    def begin(self) -> Span | None:
        index = self._index
        return self._driver.begin_span(index, self._stream(index))

    def end(self, span: Span) -> None:
        self._driver.end_span(span, self._stream(self._index))


class _TorchClock:
    """Where there is no C compiler."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> Span | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(torch.cuda.current_stream(self._device))
        return start, end

    def end(self, span: Span) -> None:
        span[1].record(torch.cuda.current_stream(self._device))

    def milliseconds(self, span: Span) -> float:
        start, end = span
        end.synchronize()
        return start.elapsed_time(end)
