"""The cost of schedules beside recorded timings, and what is chosen beside alternatives that were timed."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardfuse.device import H200
from shardfuse.schedulers import kernels_of, proposed
from shardfuse.schedulers.candidates import candidates
from shardfuse.schedulers.plan import KernelPlan
from shardfuse.schedulers.schedule_cost import cost_of, terms_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ranking import Pair, cheaper, pairs, regrets, segment_of, segments_of, timings
from benchmarks.workload import Case
from benchmarks.workloads import WORKLOADS

MEAN, WORST = 1.03, 1.10
"""Times the shorter time of two schedules that what is taken may take: in the geometric mean, and at worst."""
MISJUDGED = {
    "layer_norm 333x777:float16",
    "layer_norm 8192x24576:float16",
    "softmax 1024x262144:bfloat16",
    "layer_norm_backward 16384x5140:bfloat16",
    "sum_outer 128x16384:bfloat16",
}
"""Pairs of which the cost takes the one that is more than ``WORST`` times the other; ``docs/schedules.md`` has why."""


def name(pair: Pair) -> str:
    return f"{pair.workload} {pair.case}"


@pytest.fixture(scope="module")
def timed() -> list[Pair]:
    return pairs()


def test_what_is_chosen_is_what_was_faster(timed: list[Pair]) -> None:
    """A schedule that is no longer proposed has no evidence left: its line is to be timed again."""
    others = {name(p): p.decides for p in timed if proposed(*segment_of(p), H200) != p.chosen}
    assert others == {}
    mean, worst = regrets([p.regret(p.chosen) for p in timed])
    assert mean <= MEAN
    assert worst <= WORST


def test_what_the_cost_would_choose_was_hardly_slower(timed: list[Pair]) -> None:
    found = {name(p): p.regret(cheaper(p)) for p in timed}
    mean, _ = regrets(list(found.values()))
    assert mean <= MEAN
    assert {pair for pair, regret in found.items() if regret > WORST} == MISJUDGED


def test_costs_are_near_recorded_timings() -> None:
    """Of every eighth; all of them are 6 % off on average."""
    off = [abs(cost / us - 1) for _, _, us, cost in timings(8)]
    assert len(off) > 15
    assert sum(off) / len(off) < 0.10
    assert max(off) < 0.55


def test_the_table_of_examples_is_what_is_planned() -> None:
    text = (Path(__file__).parents[1] / "docs" / "schedules.md").read_text()
    rows = re.findall(r"^\| `([a-z_]+) ([^`]+)` \| `([^`]+)` \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) > 10
    for workload, case, order, warps in rows:
        ((scheduler, segment),) = segments_of(WORKLOADS[workload], Case.parse(case))
        schedule = proposed(scheduler, segment, H200)
        assert str(schedule.order).startswith(order.removesuffix(")")), case
        assert schedule.launch.warps == int(warps), case


def kernels(case: str) -> tuple[KernelPlan, ...]:
    workload, text = case.split()
    (found,) = segments_of(WORKLOADS[workload], Case.parse(text))
    return kernels_of(*found, H200)


def test_terms_follow_from_the_rates_of_the_device() -> None:
    (kernel,) = kernels("rms_norm 16384x16384")
    terms = terms_of(kernel)
    assert terms.memory == pytest.approx((2 * 16384 * 16384 + 16384) * 2 / H200.rates.memory)
    assert terms.us == pytest.approx(terms.memory + terms.waits / terms.turns + terms.launches)
    slow = replace(H200, rates=replace(H200.rates, memory=H200.rates.memory / 2))
    assert terms_of(replace(kernel, space=replace(kernel.space, device=slow))).memory == 2 * terms.memory


def test_stages_of_one_launch_are_launched_once() -> None:
    (kernel,) = kernels("layer_norm_backward 32768x4096:bfloat16")
    first, second = (terms_of(stage, k) for k, stage in enumerate(kernel.stages))
    assert (first.launches, second.launches) == (H200.rates.launched, H200.rates.reached)
    assert cost_of((kernel,)) == first.us + second.us


@pytest.mark.parametrize("case", ["softmax 8192x32768", "sum_inner 300x70000", "transpose 4097x8190"])
def test_the_tuner_tries_the_cheapest_first(case: str) -> None:
    workload, text = case.split()
    ((scheduler, segment),) = segments_of(WORKLOADS[workload], Case.parse(text))
    near = candidates(scheduler, segment, proposed(scheduler, segment, H200), H200)
    costs = [cost_of(kernels_of(scheduler, segment, H200, schedule)) for schedule in near]
    assert costs == sorted(costs)
    assert len(near) > 1
