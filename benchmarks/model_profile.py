"""Tables of one step's kernels, a file a model and backend: the sum of their times, then each, the longest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

LONGEST = 150
"""Characters of a kernel's name."""


def kernels_of(run: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    """Each launch of one run: its kernel and microseconds."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    events = profiler.events() or []
    return [(e.name, e.time_range.elapsed_us()) for e in events if e.device_type == torch.autograd.DeviceType.CUDA]


def table(launches: Iterable[tuple[str, float]]) -> str:
    """``sum MICROSECONDS launches COUNT``, then microseconds, launches and name of each kernel."""
    taken: dict[str, list[float]] = defaultdict(list)
    for name, us in launches:
        taken[name].append(us)
    sums = {name: sum(times) for name, times in taken.items()}
    head = f"sum {sum(sums.values()):.0f} launches {sum(map(len, taken.values()))}"
    rows = [f"{sums[n]:10.1f} {len(taken[n]):5d} {n[:LONGEST]}" for n in sorted(sums, key=lambda n: -sums[n])]
    return "\n".join([head, *rows]) + "\n"


def write_profiles(folder: Path, case: str, launches: Mapping[str, Iterable[tuple[str, float]]], report: str) -> None:
    """``CASE.BACKEND.txt`` for each of ``launches``, and ``CASE.report.txt``: which regions were taken and why."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in launches.items():
        (folder / f"{case}.{name}.txt").write_text(table(each))
    (folder / f"{case}.report.txt").write_text(report)
