"""Interleaved timing: round after round, each implementation once behind an L2 flush, between two events."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from shardfuse.executor.timing import behind_flush, flush_buffer

HIDDEN = 50e-6
"""Seconds on the host that one flush of some 75 us hides; two more hide what a busy machine adds."""
POISON = 0xFF
"""In each byte: NaN in every floating-point type, -1 in integers."""
BLOCKS = 2
"""Poisoned for each output: one may be taken by what a run keeps in between."""
WARM_UP = 3
SAMPLES = 7
"""Of each call's time on the host.  One alone hid too little: 15 us of kernels of a backward pass, which autograd has
a thread of its own for, came out as 193, for which the GPU had waited."""
ROUNDS = (7, 200)


@dataclass(frozen=True)
class Timed:
    """Microseconds: the median, and the 20th and 80th of a hundred; ``rounds``: how many were taken."""

    us: float
    low: float
    high: float
    rounds: int


def measure(runs: dict[str, Callable[[], object]], seconds: float, device: torch.device) -> dict[str, Timed]:
    """Time all of ``runs``, which are compiled, in about ``seconds``.

    On a CPU, where tests run it, there is nothing to flush and the clock is the host's.
    """
    one_round = rounds_on(runs, device)
    one_round()
    synchronize(device)
    began = perf_counter()
    one_round()
    synchronize(device)
    least, most = ROUNDS
    count = min(max(int(seconds / (perf_counter() - began)), least), most)
    taken = [one_round() for _ in range(count)]
    synchronize(device)
    return {name: _summary([read() for read in (t[name] for t in taken)]) for name in runs}


def poison(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], device: torch.device) -> None:
    """Fill ``outputs`` of an earlier run, and memory that the next run's are likely to get, with NaN (integers: -1).

    An element that the next run leaves out shows then: in outputs that every run writes, as those of a CUDA graph, and
    in fresh ones, which an allocator makes of what was given back last.
    """
    synchronize(device)
    kept = {t.untyped_storage().data_ptr() for t in inputs}
    for t in outputs:
        if t.untyped_storage().data_ptr() not in kept:
            t.fill_(math.nan if t.is_floating_point() else -1)
    sizes = [t.numel() * t.itemsize for t in outputs]
    taken = [torch.full((n,), POISON, dtype=torch.uint8, device=device) for n in sizes * BLOCKS]
    synchronize(device)
    del taken


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Round = Callable[[], dict[str, Callable[[], float]]]
"""Runs everything once; for each name, how to read the microseconds once all is done."""


def rounds_on(runs: dict[str, Callable[[], object]], device: torch.device) -> Round:
    """A round of ``runs``, after they have been warmed up."""
    return _rounds_on_gpu(runs, device) if device.type == "cuda" else _rounds_on_cpu(runs)


def _rounds_on_gpu(runs: dict[str, Callable[[], object]], device: torch.device) -> Round:
    flush = flush_buffer(device)
    flushes = {name: 2 + int(spent / HIDDEN) for name, spent in host_seconds(runs, device).items()}
    return lambda: {name: behind_flush(run, flush, flushes[name]) for name, run in runs.items()}


def _rounds_on_cpu(runs: dict[str, Callable[[], object]]) -> Round:
    def timed(run: Callable[[], object]) -> Callable[[], float]:
        began = perf_counter()
        run()
        spent = perf_counter() - began
        return lambda: spent * 1e6

    return lambda: {name: timed(run) for name, run in runs.items()}


def host_seconds(runs: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """The most that a call of each took of the host, after a warm-up.

    They take turns, as they do where they are timed: a call alone over and over finds all of the host's caches full of
    its own, and takes less.
    """
    most = dict.fromkeys(runs, 0.0)
    for turn in range(WARM_UP + SAMPLES):
        for name, run in runs.items():
            synchronize(device)
            began = perf_counter()
            run()
            spent = perf_counter() - began
            if turn >= WARM_UP:
                most[name] = max(most[name], spent)
    synchronize(device)
    return most


def _summary(us: list[float]) -> Timed:
    ordered = sorted(us)
    return Timed(median(us), ordered[len(us) // 5], ordered[len(us) * 4 // 5], len(us))


def count_kernels(run: Callable[[], object]) -> int | None:
    """Kernels, copies and fills that one call puts on the GPU; ``None`` where the profiler sees no GPU work."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len(events) or None
