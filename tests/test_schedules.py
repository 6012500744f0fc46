"""Schedules: what no kernel can follow is refused when it is made, and what is proposed comes back from its record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from segments import rms_norm

from shardfuse import DataType, FusionDefinition
from shardfuse.compiler import compile_fusion
from shardfuse.device import H200
from shardfuse.schedulers import kernels_of, makes_kernels, persistent, proposed
from shardfuse.schedulers.plan import KernelPlan, one_launch
from shardfuse.schedulers.schedule import (
    Access,
    Group,
    Immediate,
    Lagged,
    Launch,
    Loop,
    Registers,
    RowLoop,
    Schedule,
    ScheduleError,
    Sides,
    Split,
    Tile,
)
from shardfuse.schedulers.schedule_record import record_of, schedule_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.workload import Case, Draw
from benchmarks.workloads import WORKLOADS

ROW = Tile(1, 256)
PACKED, EAGER = Registers(packed=True), Registers(eager=True)
GROUP, AHEAD = Group(4, 8), Group(5, 10, Lagged())
ROWS, SPLIT = RowLoop(4, 256), Split(8)

REFUSED: dict[str, Callable[[], object]] = {
    "48 elements is no power of two": lambda: Tile(48),
    "0 elements is no power of two": lambda: Tile(1, 0),
    "80 columns in 64 lanes": lambda: Tile(64, 8, columns=80),
    "a side of 24": lambda: Sides(32, 24),
    "a side of 100": lambda: RowLoop(1, 100),
    "0 rows in a turn": lambda: RowLoop(0, 256),
    "packed rows are all loaded first anyway": lambda: Registers(packed=True, eager=True),
    "0 elements are accumulated": lambda: Loop(0),
    "-1 elements are accumulated": lambda: Registers(accumulated=-1),
    "3 rows are read ahead": lambda: Lagged(3),
    "256 programs share a row, at most 128 can": lambda: Group(256, 512),
    "512 programs share a row, at most 256 can": lambda: Group(512, 512, Lagged()),
    "5 programs wait for each other, which is no power of two": lambda: Group(5, 10),
    "4 programs wait for each other, 3 run at once": lambda: Group(4, 3),
    "split into 2048, at most 1024": lambda: Split(2048),
    "0 rows side by side": lambda: Split(2, side_by_side=0),
    "12 warps": lambda: Launch(12),
    "64 warps": lambda: Launch(64),
    "0 pipeline stages": lambda: Launch(stages=0),
    "256 registers": lambda: Launch(registers=256),
    "misaligned rows are read one by one": lambda: Schedule(Tile(2, 256), Loop(), access=Access.ALIGN_DOWN),
    "misaligned rows are read one by one, and whole": lambda: Schedule(
        ROW, Loop(), split=SPLIT, access=Access.ALIGN_DOWN
    ),
    "misaligned rows are packed": lambda: Schedule(ROW, access=Access.ALIGN_DOWN),
    "misaligned rows are packed, looped over or read ahead": lambda: Schedule(
        ROW, Loop(), GROUP, access=Access.ALIGN_DOWN
    ),
    "a tile with two sides reduces nothing": lambda: Schedule(Sides(32, 32), Loop()),
    "a row loop holds its rows in registers, as they come": lambda: Schedule(ROWS, PACKED, split=SPLIT),
    "a row loop of a group splits its column sums": lambda: Schedule(ROWS, group=Group(4, 8, Lagged())),
    "rows side by side are lanes": lambda: Schedule(RowLoop(3, 256), split=SPLIT),
    "a row loop of a group reads ahead": lambda: Schedule(ROWS, group=GROUP, split=SPLIT),
    "a row loop reads one turn ahead": lambda: Schedule(ROWS, group=Group(4, 8, Lagged(2)), split=SPLIT),
    "a row loop has its own rows": lambda: Schedule(ROWS, split=Split(8, side_by_side=2)),
    "a packed row is one program's": lambda: Schedule(ROW, PACKED, GROUP),
    "a packed row is one program's, which has no other": lambda: Schedule(Tile(2, 256), PACKED),
    "a group has its own order of loads": lambda: Schedule(ROW, EAGER, GROUP),
    "a loop reads its row again": lambda: Schedule(ROW, Loop(), Group(4, 8, Immediate(prefetches=True))),
    "who reads ahead holds one row at a time": lambda: Schedule(ROW, Loop(), AHEAD),
    "who reads ahead holds one row": lambda: Schedule(Tile(2, 256), group=AHEAD),
    "a reduction of one part is not split": lambda: Schedule(ROW, Loop(), split=Split(1)),
    "a split reduction is a loop": lambda: Schedule(ROW, split=SPLIT),
    "a split reduction is a loop of programs that do not wait": lambda: Schedule(ROW, Loop(), GROUP, SPLIT),
    "nothing is left to be finished": lambda: Schedule(ROW).finished_at_once(),
    "a group has no rows side by side": lambda: Schedule(ROWS, group=AHEAD, split=SPLIT).sized(kept=2),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_no_kernel_can_follow_is_refused(sentence: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        REFUSED[sentence]()
    assert sentence in str(raised.value)


def test_a_row_loop_of_a_group_takes_any_number_of_rows() -> None:
    schedule = Schedule(RowLoop(3, 256), group=AHEAD, split=Split(2))
    assert (schedule.turn, schedule.kept, schedule.reduced) == (3, 1, 256)
    assert schedule.sized(reduced=128).order == RowLoop(3, 128)
    assert Schedule(ROWS, split=SPLIT).sized(kept=2).order == RowLoop(2, 256)


def test_a_plan_refuses_a_schedule_of_another_form_and_more_registers_than_there_are() -> None:
    segment = rms_norm(64, 4096, DataType.BFloat16)
    (plan,) = persistent.kernels(segment, persistent.propose(segment, H200), H200)
    for order, what in ((Sides(32, 32), "two sides"), (RowLoop(2, 512), "walks rows")):
        split = SPLIT if isinstance(order, RowLoop) else None
        with pytest.raises(ScheduleError, match=what):
            replace(plan, schedule=Schedule(order, split=split))
    with pytest.raises(ScheduleError, match="131072 registers of a program, 65536 there are"):
        replace(plan, schedule=Schedule(ROW, launch=Launch(32, registers=128)))


def planned(name: str, text: str) -> list[KernelPlan]:
    workload, case = WORKLOADS[name], Case.parse(text)
    inputs = workload.bind(workload.arguments(case, Draw(torch.device("meta"))))
    fd = workload.fusion(case)
    plan = fd.fec.plan(dict(zip(fd.fec.tensors(), (tuple(t.shape) for t in inputs), strict=True)))
    return [kernel for segment in plan.segments for kernel in segment.kernels]


def test_every_proposal_comes_back_from_its_record() -> None:
    seen: set[tuple[str, ...]] = set()
    for workload in WORKLOADS.values():
        for text in (*workload.cases[:2], *workload.tiny):
            for kernel in planned(workload.name, text):
                for each in kernel.stages or (kernel,):
                    seen.add(each.schedule.form)
                    assert schedule_of(json.loads(json.dumps(record_of(each.schedule)))) == each.schedule
    assert len(seen) >= 8, seen


def test_records_that_are_none() -> None:
    whole = record_of(Schedule(ROW, group=AHEAD))
    assert isinstance(whole, dict)
    wrong: list[object] = [None, [], 3, {}, {"kind": "Tile", "kept": 1, "reduced": 1, "columns": 0}]
    wrong += [{**whole, "order": 5}, {**whole, "more": 1}, {k: v for k, v in whole.items() if k != "launch"}]
    wrong += [{**whole, "group": {**whole["group"], "programs": programs}} for programs in (2, 10.0, True, "10")]
    wrong += [{**whole, "order": {**whole["order"], "kept": 3}}, {**whole, "access": {"kind": "access", "value": "no"}}]
    assert schedule_of(whole) is not None
    assert [record for record in wrong if schedule_of(record) is not None] == []


def test_rows_that_a_small_gpu_cannot_hold_are_looped_over() -> None:
    """Of a team that does not fit nothing is proposed: a slice of a GPU plans another kernel."""
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, -1], contiguity=True, dtype=DataType.Float)
        top = fd.ops.sub(x, fd.ops.max(x, [-1], keepdim=True))
        fd.add_output(fd.ops.div(top, fd.ops.sum(fd.ops.abs(x), [-1], keepdim=True)))
    sizes = {fd.fec.tensors()[0]: (512, 500_000)}
    for multiprocessors in (132, 16, 4, 1):
        device = replace(H200, name="slice", multiprocessors=multiprocessors)
        for segment in compile_fusion(fd.fusion, sizes, device=device).segments:
            for kernel in segment.kernels:
                assert kernel.schedule.members <= kernel.schedule.programs


def test_stages_behind_the_first_take_no_scalars() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, -1], contiguity=True, dtype=DataType.Float)
        scale = fd.define_scalar(dtype=DataType.Double)
        fd.add_output(fd.ops.mul(fd.ops.sum(x, [0]), scale))
    (planned,) = compile_fusion(fd.fusion, {fd.fec.tensors()[0]: (1 << 20, 16)}, device=H200).segments
    assert makes_kernels(planned.scheduler)
    schedule = proposed(planned.scheduler, planned.segment, H200)
    assert not schedule.is_one_launch
    kernels = kernels_of(planned.scheduler, planned.segment, H200)
    with pytest.raises(ScheduleError, match="need scalars"):
        one_launch(planned.scheduler, planned.segment, kernels)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Schedule(Tile(128)), "Tile(kept=128), 4 warps"),
        (Schedule(Sides(64, 32), launch=Launch(8)), "Sides(along=64, across=32), 8 warps"),
        (Schedule(Tile(4, 256)), "Tile(kept=4, reduced=256), Registers, 4 warps"),
        (
            Schedule(Tile(8, 1, 6), Loop(), launch=Launch(1, 1)),
            "Tile(kept=8, columns=6), Loop, 1 warp, 1 stage",
        ),
        (
            Schedule(Tile(1, 512), Registers(), Group(16, 264, Lagged(2)), launch=Launch(4, 2, 128)),
            "Tile(kept=1, reduced=512), Registers, Group(members=16, programs=264, Lagged(rows=2)), 4 warps, 2 stages, "
            "at most 128 registers",
        ),
        (
            Schedule(Tile(1, 512), Registers(packed=True), access=Access.ALIGN_DOWN),
            "Tile(kept=1, reduced=512), Registers(packed), ALIGN_DOWN, 4 warps",
        ),
        (
            Schedule(RowLoop(2, 256), split=Split(132, in_one_launch=True)),
            "RowLoop(rows=2, chunk=256, keeps), Split(parts=132, in_one_launch), 4 warps, 3 stages",
        ),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)
def test_a_schedule_in_words(schedule: Schedule, text: str) -> None:
    assert str(schedule) == text


@pytest.mark.parametrize(
    ("columns", "lanes"),
    [(4096, 1024), (3072, 1024), (3000, 1024), (1536, 128), (1280, 128), (768, 128), (384, 128), (192, 64), (128, 128)],
)
def test_lanes_that_compute_costly_functions_are_full(columns: int, lanes: int) -> None:
    """The gradients of a GELU and its bias: in tiles of 512, 384 columns took 166 us on an H200, of 128 127."""
    kernels = planned("bias_gelu_backward", f"16384x{columns}")
    assert (kernels[0].stages or kernels)[0].schedule.kept == lanes
