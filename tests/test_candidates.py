"""What the tuner tries: neighbours of what is proposed, each another kernel, all by the rules that proposals keep."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardfuse.compiler import Plan, with_schedules
from shardfuse.device import H200
from shardfuse.schedulers import makes_kernels, proposed
from shardfuse.schedulers.candidates import candidates, may_run
from shardfuse.schedulers.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sm90 import sources_of
from benchmarks.workload import Case, Draw
from benchmarks.workloads import SUITES, WORKLOADS

LONG = {
    "softmax": ("4096x151936", "1023x65537"),
    "layer_norm": ("4096x50257:float16", "1023x65537", "2730x24576:float32"),
    "group_norm": ("1x128x384x384:float32",),
}
"""Rows that teams share, of five, nine or seventeen programs among them."""


def planned(name: str, text: str) -> tuple[Plan, list[torch.Tensor]]:
    workload, case = WORKLOADS[name], Case.parse(text)
    inputs = workload.bind(workload.arguments(case, Draw(torch.device("meta"))))
    fd = workload.fusion(case)
    return fd.fec.plan(dict(zip(fd.fec.tensors(), (tuple(t.shape) for t in inputs), strict=True))), inputs


def kernels(plan: Plan, inputs: list[torch.Tensor], k: int, schedule: Schedule) -> list[tuple[object, ...]]:
    """All that tells the kernels of a plan apart from those of another, with ``schedule`` for its segment ``k``."""
    chosen = [schedule if other == k else None for other in range(len(plan.segments))]
    return [
        (s.text, s.grid, s.num_warps, s.num_stages, s.max_registers, s.mailbox)
        for s in sources_of(with_schedules(plan, chosen), inputs)
    ]


def segments(suite: str) -> Iterator[tuple[str, Plan, list[torch.Tensor], int]]:
    """Of the first public case and the smallest of each workload, and of ``LONG``."""
    for workload in SUITES[suite]:
        for text in (workload.cases[0], workload.tiny[0], *LONG.get(workload.name, ())):
            plan, inputs = planned(workload.name, text)
            for k, segment in enumerate(plan.segments):
                if makes_kernels(segment.scheduler):
                    yield f"{workload.name} {text}", plan, inputs, k


@pytest.mark.parametrize("suite", SUITES)
def test_each_candidate_is_another_kernel(suite: str) -> None:
    wrong: list[str] = []
    for name, plan, inputs, k in segments(suite):
        segment, scheduler = plan.segments[k].segment, plan.segments[k].scheduler
        first = proposed(scheduler, segment, H200)
        if not may_run(scheduler, segment, first, H200):
            wrong.append(f"{name}: {first} is proposed and does not fit")
        seen = {repr(kernels(plan, inputs, k, first)): first}
        for schedule in candidates(scheduler, segment, first, H200):
            text = repr(kernels(plan, inputs, k, schedule))
            if text in seen:
                wrong.append(f"{name}: {schedule} is the kernel of {seen[text]}")
            seen[text] = schedule
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, cases in LONG.items() for text in cases])
def test_every_long_row_has_candidates(name: str, text: str) -> None:
    plan, _ = planned(name, text)
    for segment in plan.segments:
        schedule = proposed(segment.scheduler, segment.segment, H200)
        assert candidates(segment.scheduler, segment.segment, schedule, H200), segment.segment
