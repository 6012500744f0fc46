"""The cost of schedules (``shardfuse/schedulers/schedule_cost.py``) beside what was timed, and beside what is chosen.

    python -m benchmarks.ranking timings        how far costs are from the recorded timings of whole workloads
    python -m benchmarks.ranking alternatives   which of two schedules is cheaper, where both were timed
    python -m benchmarks.ranking choices        by form of kernel: how often what is proposed is the cheapest that fits
    python -m benchmarks.ranking show CASE      the features of a case, and the schedules that fit it, by their cost

CASE is a workload of the benchmarks and its sizes, ``"rms_norm 8192x32768"``.

Needs no GPU.  ``timed_schedules.json`` has a line for each pair of schedules of a workload that were timed on the same
GPU: what is chosen, the alternative, and the microseconds of each.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from pathlib import Path

import torch

from shardfuse.compiler import compile_fusion
from shardfuse.device import H200, Device
from shardfuse.schedulers import kernels_of, makes_kernels, proposed
from shardfuse.schedulers.candidates import candidates
from shardfuse.schedulers.plan import KernelPlan
from shardfuse.schedulers.resources import form_of
from shardfuse.schedulers.schedule import Schedule
from shardfuse.schedulers.schedule_cost import cost_of
from shardfuse.schedulers.schedule_record import schedule_of
from shardfuse.segments.segment import Segment

from .report import Results, Row
from .workload import Case, Draw, Workload
from .workloads import SUITES, WORKLOADS

ROOT = Path(__file__).parent
TIMED = ROOT / "timed_schedules.json"
SLIGHT = 0.02
"""A schedule is as cheap as another whose cost is that much less, relatively: timings differ by as much."""

Scheduled = tuple[str, Segment]
"""A scheduler, and a segment that it took."""


@dataclass(frozen=True)
class Pair:
    """Two schedules of the one segment with kernels of a case, and the microseconds of each.

    decides: the field of the device's record that chooses between them.
    """

    workload: str
    case: str
    decides: str
    chosen: Schedule
    us: float
    other: Schedule
    other_us: float

    def regret(self, taken: Schedule) -> float:
        """How many times the shorter time ``taken`` took."""
        return (self.us if taken == self.chosen else self.other_us) / min(self.us, self.other_us)


def pairs() -> list[Pair]:
    """All that is recorded."""
    found: list[Pair] = []
    for line in json.loads(TIMED.read_text())["lines"]:
        schedules = {name: schedule_of(line.pop(name)) for name in ("chosen", "other")}
        found.append(Pair(**line, **schedules))
    return found


def segments_of(workload: Workload, case: Case, device: Device = H200) -> list[Scheduled]:
    """The segments of ``case`` that run generated kernels."""
    inputs = workload.bind(workload.arguments(case, Draw(torch.device("meta"))))
    fd = workload.fusion(case)
    sizes = dict(zip(fd.fec.tensors(), (tuple(t.shape) for t in inputs), strict=True))
    plan = compile_fusion(fd.fusion, sizes, device=device)
    return [(s.scheduler, s.segment) for s in plan.segments if makes_kernels(s.scheduler)]


def ranked(scheduled: Scheduled, schedules: Iterable[Schedule]) -> list[tuple[float, Schedule]]:
    """``schedules`` with their costs, the cheapest first."""
    scheduler, segment = scheduled
    return sorted(
        ((cost_of(kernels_of(scheduler, segment, H200, s)), s) for s in schedules), key=lambda found: found[0]
    )


def cheaper(pair: Pair) -> Schedule:
    """Which of its schedules costs less."""
    ((_, best), _) = ranked(segment_of(pair), (pair.chosen, pair.other))
    return best


@lru_cache
def segment_of(pair: Pair) -> Scheduled:
    (found,) = segments_of(WORKLOADS[pair.workload], Case.parse(pair.case))
    return found


def regrets(found: Sequence[float]) -> tuple[float, float]:
    """The geometric mean and the largest."""
    return exp(sum(map(log, found)) / len(found)), max(found)


def timings(step: int = 1) -> Iterator[tuple[str, str, float, float]]:
    """Of every ``step``-th recorded timing: its first scheduler, its name, and the microseconds of clock and cost."""
    rows: list[Row] = []
    for path in (ROOT / "results" / f"{suite}.json" for suite in SUITES):
        found = Results.from_json(path.read_text()).rows if path.exists() else ()
        rows += [row for row in found if row.impl == "shardfuse" and row.us and row.workload in WORKLOADS]
    for row in rows[::step]:
        segments = segments_of(WORKLOADS[row.workload], Case.parse(row.case))
        if segments and row.us:
            cost = sum(cost_of(kernels_of(*each, H200)) for each in segments)
            yield segments[0][0], f"{row.workload} {row.case}", row.us, cost


def report_timings() -> None:
    by_scheduler: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for scheduler, name, us, cost in timings():
        by_scheduler[scheduler].append((cost / us - 1, name))
    for scheduler, each in sorted(by_scheduler.items()):
        worst = max(each, key=lambda found: abs(found[0]))
        average = sum(abs(e) for e, _ in each) / len(each)
        print(f"{scheduler}: {len(each)} timings, {average:.0%} off, at worst {worst[0]:+.0%}, {worst[1]}")
    every = [abs(e) for each in by_scheduler.values() for e, _ in each]
    print(f"all: {len(every)} timings, {sum(every) / len(every):.0%} off")


def report_alternatives() -> None:
    found = [(p, p.regret(cheaper(p))) for p in pairs()]
    for pair, regret in found:
        if regret > 1:
            took = f"{pair.us:g} us as chosen, {pair.other_us:g} us as the cost would have it"
            print(f"{pair.decides}: {pair.workload} {pair.case} took {took}")
    mean, worst = regrets([regret for _, regret in found])
    print(f"{len(found)} pairs: by cost {mean:.3f} times the shorter time, at worst {worst:.2f}")
    mean, worst = regrets([p.regret(p.chosen) for p in pairs()])
    print(f"as chosen {mean:.3f} times, at worst {worst:.2f}")


def choice_of(scheduled: Scheduled) -> tuple[KernelPlan, float]:
    """The first kernel as it is proposed, and how many times the cheapest schedule's cost the proposal's is."""
    scheduler, segment = scheduled
    first = proposed(scheduler, segment, H200)
    found = ranked(scheduled, (first, *candidates(scheduler, segment, first, H200)))
    own = next(cost for cost, schedule in found if schedule == first)
    kernel = kernels_of(scheduler, segment, H200, first)[0]
    return kernel.stages[0] if kernel.stages else kernel, own / found[0][0]


def report_choices() -> None:
    from scripts.kernel_snapshot import cases_of

    by_form: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for workload in WORKLOADS.values():
        for text in dict.fromkeys(cases_of(workload)):
            for scheduled in segments_of(workload, Case.parse(text)):
                plan, ratio = choice_of(scheduled)
                by_form[f"{scheduled[0]}, {form_of(plan)}"].append((ratio, f"{workload.name} {text}"))
    print("| scheduler and form | segments | cheapest | within 2 % | mean | worst |")
    print("|---|---|---|---|---|---|")
    for form, each in sorted(by_form.items()):
        best, near = (sum(r <= 1 + slack for r, _ in each) for slack in (0, SLIGHT))
        mean, worst = regrets([r for r, _ in each])
        print(f"| {form} | {len(each)} | {best} | {near} | {mean:.2f} | {worst:.2f}, {max(each)[1]} |")


def show(case: str) -> None:
    """Of each segment of ``case``: its features, and the schedules that fit it, with what makes up their costs."""
    name, text = case.split()
    for scheduler, segment in segments_of(WORKLOADS[name], Case.parse(text)):
        first = proposed(scheduler, segment, H200)
        space = kernels_of(scheduler, segment, H200, first)[0].space
        print(
            f"{scheduler}, {', '.join(map(str, segment.outputs))}: {space.kept} kept x {space.reduced} reduced elements"
        )
        print(
            f"    {space.element_bytes} bytes of each streamed, in loads of {space.width} elements; {space.held} held"
        )
        print(f"    {len(space.beside)} vectors beside, {space.phases} phases")
        for cost, schedule in ranked((scheduler, segment), (first, *candidates(scheduler, segment, first, H200))):
            print(f"  {'*' if schedule == first else ' '} {cost:7.1f} us  {schedule}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reports = {"timings": report_timings, "alternatives": report_alternatives, "choices": report_choices}
    parser.add_argument("what", choices=(*reports, "show"))
    parser.add_argument("case", nargs="?", default="rms_norm 8192x32768")
    given = parser.parse_args()
    if given.what == "show":
        show(given.case)
    else:
        reports[given.what]()


if __name__ == "__main__":
    main()
