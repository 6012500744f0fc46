"""The slow ones among many calls: what 99 of 100 calls do not exceed, on the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import ceil
from time import perf_counter

import torch

from .reshard import slowest
from .timing import synchronize

SAMPLES = (100, 300)
"""Calls of each implementation, at least and at most: of 100 the percentile is the slowest but one."""
SECONDS = 0.15
"""About how long the calls of each take together, where that is enough for the fewest samples."""
BURSTS = 5
"""Between which the implementations take turns."""
FIRST = 3
"""Calls at the beginning of a burst that are not counted, as the GPU had nothing to do before them."""


def tails(runs: Mapping[str, Callable[[], object]], us: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """The 99th percentile of single calls, in microseconds.

    A sample is the time from the end of the call before to the end of a call, of calls that follow one another: by the
    GPU's clock, between two events, and on a CPU by the host's.  Of each call the slowest rank's counts.
    us: how long a call takes, about; the same on all ranks.
    """
    least, most = SAMPLES
    calls = {name: ceil(min(max(SECONDS * 1e6 / us[name], least), most) / BURSTS) for name in runs}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(BURSTS):
        for name, run in runs.items():
            samples[name] += _burst(run, calls[name], device)
    return {name: percentile(slowest(found, device)) for name, found in samples.items()}


def percentile(found: list[float]) -> float:
    """What 99 of 100 do not exceed."""
    return sorted(found)[ceil(0.99 * len(found)) - 1]


def _burst(run: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Microseconds of each of so many calls, which all ranks begin together."""
    if device.type != "cuda":
        return _burst_on_cpu(run, calls, device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    for event in events:  # made by their first record, which takes longer
        event.record()
    slowest([0.0], device)
    for _ in range(FIRST):
        run()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    synchronize(device)
    return [before.elapsed_time(after) * 1e3 for before, after in pairwise(events)]


def _burst_on_cpu(run: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    slowest([0.0], device)
    for _ in range(FIRST):
        run()
    times = [perf_counter()]
    for _ in range(calls):
        run()
        times.append(perf_counter())
    return [(after - before) * 1e6 for before, after in pairwise(times)]
