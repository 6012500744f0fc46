"""Times of kernels on a GPU: between two events, behind a flush of the L2 cache that also hides the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

FLUSH_BYTES = 256 << 20
"""More than five times the L2 of an H200; a flush of that size takes about 75 us, behind which a launch hides."""
_WARM_UP = 2
_ROUNDS = 15

Timer = Callable[[Sequence[Callable[[], object]]], Sequence[float]]
"""Microseconds of each of several runs, which take turns."""


def behind_flush(run: Callable[[], object], flush: torch.Tensor, times: int = 1) -> Callable[[], float]:
    """Run once behind ``times`` flushes; gives how to read the microseconds once all is done."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(times):
        flush.zero_()
    start.record()
    run()
    end.record()
    return lambda: start.elapsed_time(end) * 1e3


def flush_buffer(device: torch.device) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)


def gpu_timer(device: torch.device, rounds: int = _ROUNDS) -> Timer:
    """Medians over ``rounds``, in each of which every run has its turn."""
    flush = flush_buffer(device)

    def timed(runs: Sequence[Callable[[], object]]) -> list[float]:
        for run in runs:
            for _ in range(_WARM_UP):
                run()
        torch.cuda.synchronize(device)
        taken = [[behind_flush(run, flush) for run in runs] for _ in range(rounds)]
        torch.cuda.synchronize(device)
        return [median(read() for read in column) for column in zip(*taken, strict=True)]

    return timed
