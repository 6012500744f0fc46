"""Teams: programs that share a row.  Programs of the interpreter run one after the other, so that none can wait.

A team of one member waits for nobody.  Larger teams run with a bound on waiting, again and again from the same epoch: a
launch leaves its words, and the next one finds those of the exchange before, so that after as many launches as there
are exchanges, and one more, every member has read what the others wrote.  That holds while a team has one row and no
more exchanges than the mailbox has sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted import checked, close, poisoned, values
from segments import Builder, evaluate, layout_of, rms_norm

from shardfuse.codegen import generate
from shardfuse.device import H200, Device
from shardfuse.executor.kernel import load_function
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.ir.op import Broadcast
from shardfuse.schedulers import looped, persistent
from shardfuse.schedulers.schedule import Access, Group, Immediate, Lagged, Loop, Schedule, Tile
from shardfuse.segments.segment import Segment

UNROLLED = Schedule(Tile(1, 64))
WORDS = replace(UNROLLED, group=Group(1, 1, Immediate(counted=False)))
PAIRS = Schedule(Tile(2, 1024))
"""Two rows at a time, all threads along each."""
LOOPED = replace(UNROLLED, residency=Loop())
FOLDED = UNROLLED.accumulating(8)
"""Takes a variance in load by load, as lagged groups do."""


def by(schedule: Schedule, members: int) -> Schedule:
    """``schedule`` by teams of ``members``, which exchange as it says."""
    return schedule.shared_by(members, members)


class Team:
    """``segment`` by teams of ``members``, ``teams`` of them at once."""

    def __init__(
        self,
        segment: Segment,
        inputs: Mapping[BoundTensor, torch.Tensor],
        directory: Path,
        schedule: Schedule,
        teams: int,
    ) -> None:
        scheduler = persistent if schedule.is_held else looped
        if schedule.group:
            schedule = schedule.shared_by(schedule.members, teams * schedule.members)
        (plan,) = scheduler.kernels(segment, schedule, H200)
        self.env = dict(inputs)
        self.expected = evaluate(segment, inputs)
        self.buffers: list[torch.Tensor] = []
        for tensor in segment.outputs:
            self.env[tensor], buffer = poisoned(tensor.domain.local_shape(0), tensor.dtype.torch)
            self.buffers.append(buffer)
        tensors = (*segment.inputs, *segment.outputs)
        layouts = {t: layout_of(t, self.env[t]) for t in tensors}
        self.source = generate(plan, layouts, 0, interpret=True, in_groups=True)
        self.outputs = [self.env[t] for t in segment.outputs]
        self.function = load_function(self.source.text, self.source.name, directory)
        self.mailbox = torch.zeros(self.source.mailbox, dtype=torch.int64)
        self.teams = self.source.grid // max(schedule.members, 1)

    @property
    def epochs(self) -> torch.Tensor:
        counts = 16 * self.teams
        return self.mailbox[-self.source.grid - counts : -counts]

    def launch(self) -> list[torch.Tensor]:
        mailbox = [self.mailbox] if self.source.mailbox else []
        arguments = [*mailbox, *(self.env[t] for t in self.source.tensors), *self.source.integers]
        self.function[(self.source.grid,)](*arguments)
        for buffer in self.buffers:
            ends = torch.cat([buffer[:64], buffer[-64:]]).view(torch.uint8)
            assert (ends == 0x5A).all(), "a store left its tensor"
        return self.outputs

    def settle(self, exchanges: int) -> list[torch.Tensor]:
        for _ in range(exchanges):
            self.launch()
            assert (self.epochs == exchanges).all()
            self.epochs.zero_()
        return checked(self.launch(), self.expected)


def layer_norm(shape: list[int], axes: list[int]) -> tuple[Segment, BoundTensor]:
    b = Builder()
    x = b.input(DataType.Float, *map(b.axis, shape))
    centred = b.op("sub", x, b.mean(x, axes))
    scale = b.op("rsqrt", b.op("add", b.mean(b.op("mul", centred, centred), axes), 1e-5))
    return b.segment(scale, b.op("mul", centred, scale)), x


def layer_norm_of(x: torch.Tensor, axes: list[int]) -> list[torch.Tensor]:
    var, mean = torch.var_mean(x.double(), axes, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + 1e-5)
    return [rstd, (x.double() - mean) * rstd]


@pytest.mark.parametrize("schedule", [UNROLLED, WORDS, PAIRS, LOOPED])
@pytest.mark.parametrize(("rows", "columns", "teams"), [(7, 256, 2), (5, 200, 3), (1, 130, 4), (3, 37, 1)])
def test_a_member_alone(tmp_path: Path, schedule: Schedule, rows: int, columns: int, teams: int) -> None:
    """Rows in turn, launch after launch: epochs go on, each program's own."""
    segment = rms_norm(rows, columns, DataType.BFloat16)
    x, w = values(rows, columns, dtype=DataType.BFloat16), values(columns, dtype=DataType.BFloat16, seed=1)
    inputs = dict(zip(segment.inputs, (x, w), strict=True))
    team = Team(segment, inputs, tmp_path, by(schedule, 1), teams)
    wide = x.double()
    wanted = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * w.double()
    for launch in range(1, 4):
        (out,) = checked(team.launch(), team.expected)
        close(out, wanted)
        assert int(team.epochs.sum()) == launch * -(-rows // schedule.kept)
        out.fill_(float("nan"))


@pytest.mark.parametrize("schedule", [UNROLLED, WORDS, PAIRS, LOOPED, FOLDED])
@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize("columns", [2048, 1000, 777, 64])
def test_members_share_a_row(tmp_path: Path, schedule: Schedule, members: int, columns: int) -> None:
    """Even parts, a shorter last one, and members that have nothing."""
    segment, x = layer_norm([3, columns], [1])
    data = values(3, columns) * 2 + 50
    team = Team(segment, {x: data}, tmp_path, by(schedule, members), 3)
    for found, wanted in zip(team.settle(1), layer_norm_of(data, [1]), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("schedule", [UNROLLED, LOOPED])
@pytest.mark.parametrize("shape", [[4, 3, 8, 16], [3, 2, 5, 13]])
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_statistics_of_a_channel(tmp_path: Path, schedule: Schedule, shape: list[int], is_channels_last: bool) -> None:
    """Reduced elements that are no single run of memory: batch norm over n, h and w."""
    segment, x = layer_norm(shape, [0, 2, 3])
    data = values(*shape) + 3
    if is_channels_last:
        data = data.contiguous(memory_format=torch.channels_last)
    team = Team(segment, {x: data}, tmp_path, by(schedule, 4), shape[1])
    for found, wanted in zip(team.settle(1), layer_norm_of(data, [0, 2, 3]), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize(("channels", "columns"), [(12, 6), (20, 7), (9, 3)])
def test_channels_in_tiles_of_equally_many(tmp_path: Path, channels: int, columns: int, accumulated: int) -> None:
    """Lanes without a column of their own, in each tile, and in the last one more of them."""
    segment, x = layer_norm([3, channels, 5, 8], [0, 2, 3])
    data = (values(3, channels, 5, 8) + 3).contiguous(memory_format=torch.channels_last)
    schedule = by(Schedule(Tile(8, 16, columns), Loop(accumulated)), 4)
    team = Team(segment, {x: data}, tmp_path, schedule, -(-channels // columns))
    for found, wanted in zip(team.settle(1), layer_norm_of(data, [0, 2, 3]), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("schedule", [UNROLLED, LOOPED, FOLDED])
@pytest.mark.parametrize("space", [(8, 32), (6, 6), (5, 7)])
def test_weights_along_channels(tmp_path: Path, schedule: Schedule, space: tuple[int, int]) -> None:
    """Group norm: a weight is a scalar of a chunk that lies in one channel, else one for all of a thread's load."""
    b = Builder()
    x = b.input(DataType.Float, b.axis(2), b.axis(12), *map(b.axis, space))
    grouped = b.unflatten(x, 1, 4)
    centred = b.op("sub", grouped, b.mean(grouped, [2, 3, 4]))
    unit = b.op("mul", centred, b.op("rsqrt", b.op("add", b.mean(b.op("mul", centred, centred), [2, 3, 4]), 1e-5)))
    w = b.input(DataType.Float, x.domain.logical[1])
    weight = b.emit(Broadcast((True, False, True, True)), [w], w.dtype, [(), *w.domain.logical, (), ()])
    segment = b.segment(b.op("mul", b.flatten(unit, 1, 2), weight))
    data, scale = values(2, 12, *space), values(12, seed=1)
    team = Team(segment, {x: data, w: scale}, tmp_path, by(schedule, 4), 6)
    (out,) = team.settle(1)
    close(out, torch.nn.functional.group_norm(data.double(), 3, scale.double(), eps=1e-5))
    assert ("tl.broadcast_to(tl.load(" in team.source.text) == (space == (6, 6))


@pytest.mark.parametrize("schedule", [UNROLLED, WORDS, LOOPED, FOLDED])
@pytest.mark.parametrize("per", [3, 5, 7])
def test_shares_that_end_within_a_channel(tmp_path: Path, schedule: Schedule, per: int) -> None:
    """Channels of 64 elements, of which no member's share is a multiple: a chunk has the weights of two channels."""
    b = Builder()
    x = b.input(DataType.Float, b.axis(2), b.axis(3 * per), b.axis(8), b.axis(8))
    grouped = b.unflatten(x, 1, per)
    centred = b.op("sub", grouped, b.mean(grouped, [2, 3, 4]))
    unit = b.op("mul", centred, b.op("rsqrt", b.op("add", b.mean(b.op("mul", centred, centred), [2, 3, 4]), 1e-5)))
    w = b.input(DataType.Float, x.domain.logical[1])
    weight = b.emit(Broadcast((True, False, True, True)), [w], w.dtype, [(), *w.domain.logical, (), ()])
    segment = b.segment(b.op("mul", b.flatten(unit, 1, 2), weight))
    data, scale = values(2, 3 * per, 8, 8), values(3 * per, seed=1)
    (out,) = Team(segment, {x: data, w: scale}, tmp_path, by(schedule, 4), 6).settle(1)
    close(out, torch.nn.functional.group_norm(data.double(), 3, scale.double(), eps=1e-5))


@pytest.mark.parametrize("schedule", [UNROLLED, LOOPED])
def test_several_reductions_at_once(tmp_path: Path, schedule: Schedule) -> None:
    """A maximum that keeps NaN, a sum and a test of all elements, one exchange."""
    b = Builder()
    x = b.input(DataType.Float, b.axis(2), b.axis(600))
    parts = [b.reduce("max", x, [1]), b.reduce("sum", x, [1])]
    positive = b.reduce("all", b.op("gt", x, -100.0), [1])
    segment = b.segment(positive, b.op("sub", b.op("where", positive, x, 0.0), b.op("add", *parts)))
    data = values(2, 600)
    data[1, 450] = float("nan")
    team = Team(segment, {x: data}, tmp_path, by(schedule, 4), 2)
    found, out = team.settle(1)
    wide = data.double()
    holds = (data > -100).all(1, keepdim=True)
    close(out, torch.where(holds, wide, 0.0) - wide.amax(1, keepdim=True) - wide.sum(1, keepdim=True))
    assert torch.equal(found, holds)


@pytest.mark.parametrize("schedule", [UNROLLED, WORDS, LOOPED])
@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize(("rows", "columns"), [(100, 32), (64, 21), (9, 50)])
def test_columns_of_a_team(tmp_path: Path, schedule: Schedule, members: int, rows: int, columns: int) -> None:
    """A result for each lane: columns side by side, in blocks of 16."""
    segment, x = layer_norm([rows, columns], [0])
    data = values(rows, columns) * 2 + 5
    teams = -(-columns // 16)
    team = Team(segment, {x: data}, tmp_path, by(schedule.sized(kept=16, reduced=8), members), teams)
    for found, wanted in zip(team.settle(1), layer_norm_of(data, [0]), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize(
    ("members", "turns_of_teams", "counted"), [(0, 1, True), (1, 3, False), (4, 1, True), (4, 1, False)]
)
@pytest.mark.parametrize("shape", [[2, 320, 5, 5], [2, 96, 16, 4], [3, 12, 7, 3], [1, 128, 4, 4]])
def test_group_norm_of_channels_last(
    tmp_path: Path, unrolled: bool, members: int, turns_of_teams: int, counted: bool, shape: list[int]
) -> None:
    """Groups are short runs of memory: whole lines are read, groups added up across columns."""
    groups = 32 if shape[1] % 32 == 0 else 3
    group = Group(members, members, Immediate(counted=counted)) if members else None
    check_channels_last(shape, groups, unrolled, group, turns_of_teams, tmp_path)


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize("members", [0, 2])
@pytest.mark.parametrize("shape", [[1, 192, 9, 5], [2, 240, 4, 6], [1, 336, 4, 5]])
def test_a_group_is_all_columns_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unrolled: bool, members: int, shape: list[int]
) -> None:
    """Runs of a line and more, of rows that nobody would hold: here, none of this size would be held."""
    monkeypatch.setattr(Device, "row_bytes", 0)
    known = H200.measured
    looping = replace(H200, measured=replace(known, groups=replace(known.groups, few_members=0)))
    group = Group(members, members) if members else None
    check_channels_last(shape, 3, unrolled, group, 1, tmp_path, looping)


def check_channels_last(
    shape: list[int],
    groups: int,
    unrolled: bool,
    group: Group | None,
    turns_of_teams: int,
    directory: Path,
    device: Device = H200,
) -> None:
    """A group norm whose channels lie side by side; ``group``: its members, and how they wait."""
    n, c = shape[:2]
    b = Builder()
    x = b.input(DataType.Half, *map(b.axis, shape))
    x.domain = replace(x.domain, allocation=tuple(x.domain.logical[k] for k in (0, 2, 3, 1)))
    grouped = b.unflatten(b.cast(x, DataType.Float), 1, c // groups)
    centred = b.op("sub", grouped, b.mean(grouped, [2, 3, 4]))
    rstd = b.op("rsqrt", b.op("add", b.mean(b.op("mul", centred, centred), [2, 3, 4]), 1e-5))
    w = b.input(DataType.Float, x.domain.logical[1])
    weight = b.emit(Broadcast((True, False, True, True)), [w], w.dtype, [(), *w.domain.logical, (), ()])
    scaled = b.op("mul", b.flatten(b.op("mul", centred, rstd), 1, 2), weight)
    segment = b.segment(rstd, scaled)
    data = values(*shape, dtype=DataType.Half).contiguous(memory_format=torch.channels_last)
    scale = values(c, seed=1)
    scheduler = persistent if unrolled else looped
    schedule = replace(scheduler.propose(segment, device), group=group)
    assert schedule.columns, "groups stand side by side"
    blocks = n * c // schedule.columns
    running = Team(segment, {x: data, w: scale}, directory, schedule, max(blocks // turns_of_teams, 1))
    found = running.settle(1) if schedule.members > 1 else checked(running.launch(), running.expected)
    wide = data.double().reshape(n, groups, -1)
    close(found[0], torch.rsqrt(wide.var(2, correction=0) + 1e-5).reshape(found[0].shape))
    close(found[1], torch.nn.functional.group_norm(data.double(), groups, scale.double(), eps=1e-5))


LATE = Schedule(Tile(1, 256), group=Group(1, 1, Lagged()))
TWO_AHEAD = replace(LATE, group=Group(1, 1, Lagged(2)))
ODD = replace(LATE, access=Access.ALIGN_DOWN)
SINGLE = LATE.sized(reduced=128)


def softmax(rows: int, columns: int, dtype: DataType) -> Segment:
    b = Builder()
    x = b.cast(b.input(dtype, b.axis(rows), b.axis(columns)), DataType.Float)
    e = b.op("exp", b.op("sub", x, b.reduce("max", x, [1])))
    return b.segment(b.cast(b.op("div", e, b.reduce("sum", e, [1])), dtype))


@pytest.mark.parametrize(
    ("schedule", "columns", "members"),
    [(LATE, 1003, 2), (TWO_AHEAD, 1290, 5), (ODD, 1291, 3), (replace(TWO_AHEAD, access=Access.ALIGN_DOWN), 517, 2)],
)
def test_late_teams(tmp_path: Path, schedule: Schedule, columns: int, members: int) -> None:
    """A row each, of which the second is not a number anywhere; members in any number."""
    rows, schedule = 3, by(schedule, members)
    data, scale = values(rows, columns, dtype=DataType.BFloat16), values(columns, dtype=DataType.BFloat16, seed=1)
    data[1] = torch.nan
    norm = rms_norm(rows, columns, DataType.BFloat16)
    (out,) = Team(norm, dict(zip(norm.inputs, (data, scale), strict=True)), tmp_path, schedule, rows).settle(2)
    wide = data.double()
    close(out, wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * scale.double())
    segment = softmax(rows, columns, DataType.BFloat16)
    (out,) = Team(segment, {segment.inputs[0]: data}, tmp_path, schedule, rows).settle(2)
    close(out, wide.softmax(1))


@pytest.mark.parametrize("schedule", [LATE, SINGLE, ODD])
def test_late_teams_of_rows_that_are_one_element(tmp_path: Path, schedule: Schedule) -> None:
    columns, b = 1003, Builder()
    i, j = b.axis(3), b.axis(columns)
    dy, y = (b.cast(b.input(DataType.Half, i, j), DataType.Float) for _ in range(2))
    along = b.reduce("sum", b.op("mul", dy, y), [1])
    segment = b.segment(b.op("mul", y, b.op("sub", dy, along)))
    data, grad = values(3, columns, dtype=DataType.Half), values(3, 1, dtype=DataType.Half, seed=1).expand(3, columns)
    inputs = dict(zip(segment.inputs, (grad, data), strict=True))
    (out,) = Team(segment, inputs, tmp_path, by(schedule, 3), 3).settle(2)
    wide, up = data.double(), grad.double()
    close(out, wide * (up - (up * wide).sum(1, keepdim=True)))


@pytest.mark.parametrize(("schedule", "columns"), [(LATE, 1541), (LATE.accumulating(2), 1300), (SINGLE, 999)])
def test_late_variances(tmp_path: Path, schedule: Schedule, columns: int) -> None:
    segment, x = layer_norm([2, columns], [1])
    data = values(2, columns) + 3
    team = Team(segment, {x: data}, tmp_path, by(schedule, 3), 2)
    for found, wanted in zip(team.settle(2), layer_norm_of(data, [1]), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("schedule", [WORDS, LATE])
def test_a_word_is_an_epoch_above_the_bits_of_a_result(tmp_path: Path, schedule: Schedule) -> None:
    """Of a negative result too, whose highest bit does not reach the epoch."""
    b = Builder()
    x = b.input(DataType.Float, b.axis(1), b.axis(512))
    segment, data = b.segment(b.op("sub", x, b.reduce("sum", x, [1]))), -values(1, 512).abs() - 1
    team = Team(segment, {x: data}, tmp_path, by(schedule, 2), 1)
    team.launch()
    words = team.mailbox[2:4]  # the second of the sets, of one result of each of two members
    assert (words >> 32).tolist() == [1, 1]
    parts = (words & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    assert (parts < -256).all()
    close(parts.sum(), data.double().sum())
