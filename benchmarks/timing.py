"""Interleaved timing: round after round, each implementation once behind an L2 flush, between two events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

FLUSH_BYTES = 256 << 20
"""More than five times the L2 of an H200; a flush of that size takes about 75 us, behind which a launch hides."""
HIDDEN = 60e-6
"""Seconds on the host that one flush hides."""
WARM_UP = 3
ROUNDS = (7, 200)


@dataclass(frozen=True)
class Timed:
    """Microseconds: the median, and the 20th and 80th of a hundred; ``rounds``: how many were taken."""

    us: float
    low: float
    high: float
    rounds: int


def measure(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, Timed]:
    """Time all of ``runs``, which are compiled, in about ``seconds``."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    flushes = {name: 1 + int(_host_seconds(run) / HIDDEN) for name, run in runs.items()}
    first = [_round(runs, flush, flushes) for _ in range(2)]
    torch.cuda.synchronize()
    began = perf_counter()
    last = _round(runs, flush, flushes)
    torch.cuda.synchronize()
    least, most = ROUNDS
    count = min(max(int(seconds / (perf_counter() - began)), least), most)
    rounds = [*first, last, *(_round(runs, flush, flushes) for _ in range(count))][len(first) :]
    torch.cuda.synchronize()
    return {name: _summary([start.elapsed_time(end) * 1e3 for start, end in (r[name] for r in rounds)]) for name in runs}


def _round(
    runs: dict[str, Callable[[], object]], flush: torch.Tensor, flushes: dict[str, int]
) -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
    found: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
    for name, run in runs.items():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(flushes[name]):
            flush.zero_()
        start.record()
        run()
        end.record()
        found[name] = start, end
    return found


def _host_seconds(run: Callable[[], object]) -> float:
    """Of one call, after the warm-up."""
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    began = perf_counter()
    run()
    spent = perf_counter() - began
    torch.cuda.synchronize()
    return spent


def _summary(us: list[float]) -> Timed:
    ordered = sorted(us)
    return Timed(median(us), ordered[len(us) // 5], ordered[len(us) * 4 // 5], len(us))


def count_kernels(run: Callable[[], object]) -> int | None:
    """Kernels, copies and fills that one call puts on the GPU; ``None`` where the profiler sees no GPU work."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len(events) or None
