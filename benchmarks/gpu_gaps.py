#!/usr/bin/env python3
"""Reads a chrome trace of torch.profiler: how long the GPU was busy, and whom it waited for in between.

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    profiled.export_chrome_trace("step.json.gz")

    python benchmarks/gpu_gaps.py step.json.gz --gaps 12

A *gap* is a time in which no kernel, copy or memset runs on any stream of a GPU, between its first one and its last.
The gap is the host's where the launch of what ends it began after the gap did; else the GPU had the launch and
waited for an event, for another rank or for the launch itself.  Of a gap of the host's the functions are told that
the launching thread was in meanwhile, by the time within themselves: ops, autograd nodes, annotations, and Python
functions where the profile is made with ``with_stack=True``.  Python that no event covers has the name of the event
that follows.  Profiling slows the host down: gaps are longer than in a run without, and in the same order.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
HOST = ("cpu_op", "user_annotation", "python_function", *LAUNCHES)
WAITING = "the GPU itself"
"""Whose a gap is that began after the launch of what ends it."""

Thread = tuple[object, object]
"""Process and thread."""


@dataclass(frozen=True)
class Span:
    """Microseconds of the trace's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Gap:
    """host: for each function that the launching thread was in, its own microseconds of it; none of the GPU's own."""

    start: float
    end: float
    after: str
    before: str
    host: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def culprit(self) -> str:
        """The function with most of it."""
        return max(self.host, key=lambda name: self.host[name]) if self.host else WAITING


@dataclass(frozen=True)
class Timeline:
    """One GPU's part of a trace, from its first event to its last."""

    device: object
    work: int
    start: float
    end: float
    gaps: tuple[Gap, ...]

    @property
    def span(self) -> float:
        return self.end - self.start

    @property
    def busy(self) -> float:
        return self.span - sum(gap.length for gap in self.gaps)

    @cached_property
    def by_function(self) -> Counter[str]:
        """Microseconds of all gaps by the function that the host was in."""
        found: Counter[str] = Counter()
        for gap in self.gaps:
            if not gap.host:
                found[WAITING] += gap.length  # pyright: ignore[reportArgumentType]
            told = sum(gap.host.values())
            for name, length in gap.host.items():  # a launch takes a while to reach the GPU
                found[name] += length * gap.length / told  # pyright: ignore[reportArgumentType]
        return found


def timelines(events: Iterable[Mapping[str, Any]]) -> list[Timeline]:
    """Of each GPU in the trace's events."""
    complete = [e for e in events if e.get("ph") == "X" and "dur" in e]
    launches = {
        e["args"]["correlation"]: e for e in complete if e.get("cat") in LAUNCHES and "correlation" in e["args"]
    }
    by_thread: dict[Thread, list[Span]] = defaultdict(list)
    for e in complete:
        if e.get("cat") in HOST:
            by_thread[e["pid"], e["tid"]].append(Span(e["name"], e["ts"], e["ts"] + e["dur"]))
    inside = {thread: innermost(spans) for thread, spans in by_thread.items()}
    on_gpu: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for e in complete:
        if e.get("cat") in ON_GPU:
            on_gpu[e.get("args", {}).get("device", e["pid"])].append(e)
    return [_timeline(device, on_gpu[device], launches, inside) for device in sorted(on_gpu, key=str)]


def _timeline(
    device: object,
    work: Sequence[Mapping[str, Any]],
    launches: Mapping[object, Mapping[str, Any]],
    inside: Mapping[Thread, Sequence[Span]],
) -> Timeline:
    ordered = sorted(work, key=lambda e: e["ts"])
    gaps: list[Gap] = []
    last, end = ordered[0], ordered[0]["ts"] + ordered[0]["dur"]
    for e in ordered[1:]:
        if e["ts"] > end:
            launch = launches.get(e.get("args", {}).get("correlation"))
            host = {} if launch is None else _within(inside[launch["pid"], launch["tid"]], end, launch)
            gaps.append(Gap(end, e["ts"], last["name"], e["name"], host))
        if e["ts"] + e["dur"] > end:
            last, end = e, e["ts"] + e["dur"]
    return Timeline(device, len(ordered), ordered[0]["ts"], end, tuple(gaps))


def _within(inside: Sequence[Span], start: float, launch: Mapping[str, Any]) -> dict[str, float]:
    """Which function had how much of the time from ``start`` to the end of the launch; none where that began before."""
    if launch["ts"] <= start:
        return {}
    found: Counter[str] = Counter()
    stop = launch["ts"] + launch["dur"]
    for span in inside[bisect_left(inside, start, key=lambda s: s.end) :]:
        if span.start >= stop:
            break
        found[span.name] += min(span.end, stop) - max(span.start, start)  # pyright: ignore[reportArgumentType]
    return {name: length for name, length in found.items() if length > 0}


def innermost(spans: Iterable[Span]) -> list[Span]:
    """One thread's nested spans as pieces in order, each with the name of the innermost one; in between, Python."""
    cuts: list[Span] = []
    open_: list[Span] = []
    at = 0.0

    def upto(time: float) -> None:
        nonlocal at
        if open_ and time > at:
            cuts.append(Span(open_[-1].name, at, time))
        at = max(at, time)

    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        while open_ and open_[-1].end <= span.start:
            upto(open_[-1].end)
            open_.pop()
        upto(span.start)
        open_.append(span)
    while open_:
        upto(open_[-1].end)
        open_.pop()
    between = [Span(f"Python before {b.name}", a.end, b.start) for a, b in pairwise(cuts) if b.start > a.end]
    return sorted([*cuts, *between], key=lambda s: s.start)


def as_text(timeline: Timeline, gaps: int) -> str:
    """What there is to say of one GPU, with the largest ``gaps`` and as many functions."""
    host = [gap for gap in timeline.gaps if gap.host]
    late = sum(gap.length for gap in host)
    own = sum(gap.length for gap in timeline.gaps) - late
    lines = [
        f"GPU {timeline.device}: busy {timeline.busy / 1e3:.2f} of {timeline.span / 1e3:.2f} ms "
        f"({timeline.busy / timeline.span:.0%}), {timeline.work} kernels and copies",
        f"waited for the host {late / 1e3:.2f} ms in {len(host)} gaps, and otherwise {own / 1e3:.2f} ms in "
        f"{len(timeline.gaps) - len(host)}",
        "",
        "   ms  in all gaps, the host was in",
        *(f"{length / 1e3:5.2f}  {name[:100]}" for name, length in timeline.by_function.most_common(gaps)),
        "",
        "   us  largest gaps: the host was in; between",
    ]
    largest = sorted(timeline.gaps, key=lambda gap: -gap.length)[:gaps]
    lines += [f"{g.length:5.0f}  {g.culprit[:60]}; {g.after[:40]} and {g.before[:40]}" for g in largest]
    return "\n".join(lines)


def read(path: Path) -> list[Timeline]:
    """Of a file that ``export_chrome_trace`` wrote."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    return timelines(json.loads(text)["traceEvents"])


def profiled(run: Callable[[], object], times: int, *, with_host: bool) -> list[Timeline]:
    """Of so many runs one behind the other, on a GPU.  with_host: who made the gaps, which makes them longer."""
    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if with_host else [])]
    torch.cuda.synchronize()
    with profile(activities=activities) as taken:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        taken.export_chrome_trace(str(path))
        return read(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="what export_chrome_trace wrote, .json or .json.gz")
    parser.add_argument("--gaps", type=int, default=10, help="how many gaps and functions to print")
    options = parser.parse_args(arguments)
    found = read(options.trace)
    if not found:
        print(f"{options.trace}: nothing ran on a GPU; profile with ProfilerActivity.CUDA", file=sys.stderr)
        return 2
    print("\n\n".join(as_text(timeline, options.gaps) for timeline in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
