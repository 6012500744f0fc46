"""What the tuner tries: neighbours of what is proposed, each another kernel, all by the rules that proposals keep."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardfuse import FusionDefinition, TensorView
from shardfuse.compiler import Plan, with_schedules
from shardfuse.device import H200
from shardfuse.ir.op import is_reduction
from shardfuse.schedulers import makes_kernels, proposed
from shardfuse.schedulers.candidates import _space_of, candidates, may_run
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


def test_candidates_are_measured_on_what_kernels_are_made_of() -> None:
    """The backward of two norms in a row that share a scale: its two column sums are one in the kernel."""
    with FusionDefinition() as fd:
        gradient, scale = fd.define_tensor([-1, 1024]), fd.define_tensor([1024])
        sums: list[TensorView] = []
        for _ in range(2):
            unit, rstd = fd.define_tensor([-1, 1024]), fd.define_tensor([-1, 1])
            sums.append(fd.ops.sum(fd.ops.mul(gradient, unit), [0]))
            scaled = fd.ops.mul(gradient, scale)
            along = fd.ops.mean(fd.ops.mul(scaled, unit), [-1], keepdim=True)
            gradient = fd.ops.mul(fd.ops.sub(scaled, fd.ops.mul(unit, along)), rstd)
        fd.add_output(gradient)
        fd.add_output(fd.ops.add(*sums))
    rows = (4096, 1024), (4096, 1)
    plan = fd.fec.plan(dict(zip(fd.fec.tensors(), (rows[0], (1024,), *rows, *rows), strict=True)))
    (planned,) = plan.segments
    assert planned.scheduler == "mix_order"
    space = _space_of("mix_order", planned.segment, H200)
    assert space is not None
    made, given = ([e.op for e in s.exprs if is_reduction(e.op, "sum")] for s in (space.segment, planned.segment))
    assert len(made) == len(given) - 1
    assert candidates("mix_order", planned.segment, proposed("mix_order", planned.segment, H200), H200)
