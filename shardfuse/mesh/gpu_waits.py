"""For how long this rank's GPU has been waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_waits: list[Callable[[], float]] = []


def watch_waits(waiting: Callable[[], float]) -> None:
    """Have every watchdog ask for how many seconds a collective that torch does not watch has been waiting."""
    if waiting not in _waits:
        _waits.append(waiting)


def waited_on_gpu() -> float:
    """The longest of these times, of this process; 0 where no such collective waits."""
    return max((waiting() for waiting in _waits), default=0.0)


class StreamProbe:
    """Tells for how long a GPU's default stream has not come to an end of what it was given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._since = 0.0

    def standstill(self) -> float:
        """Seconds since a mark was set that the stream has not reached; 0 where it has reached the last one."""
        if self._device.type != "cuda":
            return 0.0
        if self._event is None or self._event.query():
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.default_stream(self._device))
            self._since = time.monotonic()
            return 0.0
        return time.monotonic() - self._since
