"""Running statistics in one walk: a maximum with the sum of exponentials, a mean with the squares around it.

``looped`` with small blocks, alone and in teams (see test_codegen_team), over rows and over columns.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import close, run, values
from segments import Builder, kernels_of
from test_codegen_team import Team, by

from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.ir.op import Statistic
from shardfuse.schedulers import looped, persistent
from shardfuse.schedulers.schedule import Access, Loop, Schedule, Tile
from shardfuse.segments.online_reductions import online
from shardfuse.segments.segment import Segment

ROW = Schedule(Tile(1, 32), Loop(4))
ROWS = Schedule(Tile(4, 16), Loop(8))
HELD = Schedule(Tile(1, 16))
FLOAT, INF, NAN = DataType.Float, float("inf"), float("nan")


def softmax(shape: list[int], axis: int, dtype: DataType, *, scale: float = 1.0) -> tuple[Segment, BoundTensor]:
    """softmax and log softmax of the scaled input, the largest and the sum."""
    b = Builder()
    x = b.input(dtype, *map(b.axis, shape))
    wide = b.op("mul", b.cast(x, dtype.compute), scale) if scale != 1.0 else b.cast(x, dtype.compute)
    top = b.reduce("max", wide, [axis])
    apart = b.op("sub", wide, top)
    powers = b.op("exp", apart)
    total = b.reduce("sum", powers, [axis])
    out = b.cast(b.op("div", powers, total), dtype)
    return b.segment(top, total, out, b.op("sub", apart, b.op("log", total))), x


def softmax_of(x: torch.Tensor, axis: int) -> list[torch.Tensor]:
    wide = x.double()
    top = wide.amax(axis, keepdim=True)
    powers = torch.exp(wide - top)
    return [top, powers.sum(axis, keepdim=True), torch.softmax(wide, axis), torch.log_softmax(wide, axis)]


def moments(shape: list[int], axes: list[int], dtype: DataType) -> tuple[Segment, BoundTensor]:
    """Mean, variance and the normalised input."""
    b = Builder()
    x = b.input(dtype, *map(b.axis, shape))
    wide = b.cast(x, dtype.compute)
    mean = b.mean(wide, axes)
    centred = b.op("sub", wide, mean)
    var = b.mean(b.op("mul", centred, centred), axes)
    out = b.op("mul", centred, b.op("rsqrt", b.op("add", var, 1e-5)))
    return b.segment(mean, var, b.cast(out, dtype)), x


def moments_of(x: torch.Tensor, axes: list[int]) -> list[torch.Tensor]:
    var, mean = torch.var_mean(x.double(), axes, correction=0, keepdim=True)
    return [mean, var, (x.double() - mean) * torch.rsqrt(var + 1e-5)]


def agree(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", [DataType.Half, DataType.BFloat16, FLOAT, DataType.Double])
@pytest.mark.parametrize(("schedule", "columns"), [(ROW, 96), (ROW, 75), (ROWS, 48), (ROWS, 37)])
def test_rows(tmp_path: Path, schedule: Schedule, columns: int, dtype: DataType) -> None:
    """Whole blocks, and a last one that is masked."""
    segment, x = softmax([5, columns], 1, dtype)
    data = values(5, columns, dtype=dtype) * 3
    agree(run(segment, {x: data}, tmp_path, scheduler=looped, schedule=schedule), softmax_of(data, 1))
    segment, x = moments([5, columns], [1], dtype)
    agree(run(segment, {x: data + 2}, tmp_path, scheduler=looped, schedule=schedule), moments_of(data + 2, [1]))


@pytest.mark.parametrize(("fold", "rows"), [(1, 64), (4, 64), (2, 75), (8, 3)])
def test_columns(tmp_path: Path, fold: int, rows: int) -> None:
    schedule = Schedule(Tile(16, 8), Loop(fold))
    data = values(rows, 21) * 3
    segment, x = softmax([rows, 21], 0, FLOAT)
    agree(run(segment, {x: data}, tmp_path, scheduler=looped, schedule=schedule), softmax_of(data, 0))
    segment, x = moments([rows, 21], [0], FLOAT)
    agree(run(segment, {x: data}, tmp_path, scheduler=looped, schedule=schedule), moments_of(data, [0]))


def special_rows(columns: int) -> torch.Tensor:
    """NaN, infinities and numbers at the ends of the range, at the ends of rows and in every lane."""
    x = values(12, columns)
    lowest = torch.finfo(torch.float32).min
    x[0] = -INF
    x[1, columns // 2] = NAN
    x[2, -1] = INF
    x[3, 0] = -INF
    x[4, : columns - 1] = -INF
    x[5, 1:] = -INF
    x[6, ::3] = -INF
    x[7, 0], x[7, 1] = INF, -INF
    x[8, 0], x[8, -1] = NAN, INF
    x[9] = lowest
    x[10] = -lowest
    x[11, ::2] = 1e4
    return x


@pytest.mark.parametrize(("schedule", "members"), [(ROW, 0), (ROW, 4), (HELD, 4)])
@pytest.mark.parametrize("columns", [128, 77])
def test_infinities_and_nan(tmp_path: Path, schedule: Schedule, members: int, columns: int) -> None:
    """As torch has them, to the position: of the maximum, the sum, and both kinds of softmax."""
    data = special_rows(columns)
    wanted = softmax_of(data, 1)
    segment, x = softmax([12, columns], 1, FLOAT)
    if not members:
        agree(run(segment, {x: data}, tmp_path, scheduler=looped, schedule=schedule), wanted)
        return
    team = Team(segment, {x: data}, tmp_path, by(schedule, members), 12)
    agree(team.settle(1), wanted)


@pytest.mark.parametrize("schedule", [ROW, HELD])
@pytest.mark.parametrize("columns", [128, 77])
def test_moments_of_infinities_and_nan(tmp_path: Path, schedule: Schedule, columns: int) -> None:
    """As two walks in float32 have them."""
    data = values(4, columns)
    data[0, 3], data[1, -1], data[2, 0] = NAN, INF, -INF
    segment, x = moments([4, columns], [1], FLOAT)
    mean = data.mean(1, keepdim=True)
    var = (data - mean).square().mean(1, keepdim=True)
    wanted = [mean, var, (data - mean) * torch.rsqrt(var + 1e-5)]
    agree(Team(segment, {x: data}, tmp_path, by(schedule, 4), 4).settle(1), wanted)
    if not schedule.is_held:
        agree(run(segment, {x: data}, tmp_path, scheduler=looped, schedule=schedule), wanted)


@pytest.mark.parametrize("schedule", [ROW, HELD])
@pytest.mark.parametrize(("members", "columns"), [(2, 128), (2, 100), (8, 100), (8, 33)])
def test_members_exchange_once(tmp_path: Path, schedule: Schedule, members: int, columns: int) -> None:
    """Even shares, a shorter last one, and members that have nothing."""
    data = values(3, columns) * 4
    segment, x = softmax([3, columns], 1, FLOAT)
    agree(Team(segment, {x: data}, tmp_path, by(schedule, members), 3).settle(1), softmax_of(data, 1))
    segment, x = moments([3, columns], [1], FLOAT)
    team = Team(segment, {x: data + 9}, tmp_path, by(schedule, members), 3)
    assert team.source.text.count("epoch += 1") == 1
    agree(team.settle(1), moments_of(data + 9, [1]))


@pytest.mark.parametrize("rows", [96, 50])
def test_columns_of_a_team(tmp_path: Path, rows: int) -> None:
    schedule = by(Schedule(Tile(16, 8), Loop(2)), 4)
    data = values(rows, 21) * 3
    for segment, x, wanted in (
        (*softmax([rows, 21], 0, FLOAT), softmax_of(data, 0)),
        (*moments([rows, 21], [0], FLOAT), moments_of(data, [0])),
    ):
        agree(Team(segment, {x: data}, tmp_path, schedule, 2).settle(1), wanted)


def cross_entropy(
    rows: int,
    classes: int,
    index: DataType,
    *,
    kept: bool,
    smoothing: float = 0.0,
    logits: DataType = DataType.BFloat16,
) -> Segment:
    """The loss of each row, of scaled logits; 0 where the target is -100.  ``kept``: with the gradient's softmax."""
    b = Builder()
    i, j = b.axis(rows), b.axis(classes)
    x, target = b.op("mul", b.cast(b.input(logits, i, j), FLOAT), 0.5), b.input(index, i, ())
    apart = b.op("sub", x, b.reduce("max", x, [1]))
    powers = b.op("exp", apart)
    total = b.reduce("sum", powers, [1])
    chosen = b.reduce("sum", b.op("where", b.op("eq", b.iota(j), target), apart, 0.0), [1])
    log_sum = b.op("log", total)
    loss = b.op("sub", log_sum, chosen)
    if smoothing:
        even = b.op("sub", log_sum, b.mean(apart, [1]))
        loss = b.op("add", b.op("mul", loss, 1.0 - smoothing), b.op("mul", even, smoothing))
    loss = b.op("where", b.op("ne", target, -100), loss, 0.0)
    return b.segment(loss, *([b.op("div", powers, total)] if kept else []))


@pytest.mark.parametrize("index", [DataType.Int, DataType.Int32])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("schedule", [ROW, ROWS, by(ROW, 4), by(HELD, 2)])
def test_cross_entropy(tmp_path: Path, schedule: Schedule, kept: bool, index: DataType) -> None:
    """The target's element is read by itself: no walk looks for it."""
    rows, classes = 7, 83
    segment = cross_entropy(rows, classes, index, kept=kept)
    data = values(rows, classes, dtype=DataType.BFloat16)
    target = torch.tensor([0, 82, -100, 40, 83, -1, 7], dtype=index.torch)[:, None]
    data[3, 40], data[6, 7] = -INF, NAN
    inputs = dict(zip(segment.inputs, (data, target), strict=True))
    scheduler = persistent if schedule.is_held else looped
    if schedule.members:
        team = Team(segment, inputs, tmp_path, schedule, rows)
        assert team.source.text.count("epoch += 1") == 1
        loss, *rest = team.settle(1)
    else:
        loss, *rest = run(segment, inputs, tmp_path, scheduler=scheduler, schedule=schedule)
    wide = data.double() * 0.5
    inside = (target[:, 0] >= 0) & (target[:, 0] < classes)
    wanted = torch.nn.functional.cross_entropy(wide, torch.where(inside, target[:, 0], 0).long(), reduction="none")
    none = torch.logsumexp(wide, 1) - wide.amax(1)  # the sum over an index that is in no row is 0
    wanted = torch.where(inside, wanted, torch.where(target[:, 0] == -100, 0.0, none))
    agree([*rest, loss], [*([torch.softmax(wide, 1)] if kept else []), wanted[:, None]])


@pytest.mark.parametrize("schedule", [ROW, ROWS, by(ROW, 4), by(HELD, 2)])
@pytest.mark.parametrize("classes", [96, 83])
def test_smoothed_cross_entropy(tmp_path: Path, schedule: Schedule, classes: int) -> None:
    """The mean of the log probabilities too, far from 0, comes from the same walk."""
    rows = 6
    segment = cross_entropy(rows, classes, DataType.Int, kept=False, smoothing=0.1)
    data = (values(rows, classes) * 4 + torch.tensor([0.0, 500.0, -500.0, 0.0, 0.0, 0.0])[:, None]).bfloat16()
    data[3], data[4, 5], data[5, 2] = -INF, NAN, INF
    target = torch.tensor([0, 40, 82, 3, 4, -100])[:, None]
    inputs = dict(zip(segment.inputs, (data, target), strict=True))
    if schedule.members:
        (loss,) = Team(segment, inputs, tmp_path, schedule, rows).settle(1)
    else:
        (loss,) = run(segment, inputs, tmp_path, scheduler=looped, schedule=schedule)
    wide = data.double() * 0.5
    wanted = torch.nn.functional.cross_entropy(wide, target[:, 0], reduction="none", label_smoothing=0.1)
    close(loss, wanted[:, None])


@pytest.mark.parametrize(("classes", "dtype"), [(83, DataType.BFloat16), (9001, DataType.BFloat16), (81, FLOAT)])
def test_rows_of_odd_length(tmp_path: Path, classes: int, dtype: DataType) -> None:
    """Loads begin with the word of a row's first element: what it holds of the row before is not taken in."""
    segment = cross_entropy(9, classes, DataType.Int, kept=False, logits=dtype)
    schedule = looped.propose(segment, H200)
    assert schedule.is_aligned_down == (classes > 8192)
    if not schedule.is_aligned_down:
        schedule = Schedule(Tile(1, 32), Loop(16 // dtype.itemsize), access=Access.ALIGN_DOWN)
    data = values(9, classes, dtype=dtype)
    data[2], data[5, -1], data[7, -2:] = -INF, NAN, INF
    target = torch.tensor([0, classes - 1, 3, -100, 7, 5, 5, 80, 1])[:, None]
    inputs = dict(zip(segment.inputs, (data, target), strict=True))
    (loss,) = run(segment, inputs, tmp_path, scheduler=looped, schedule=schedule)
    wanted = torch.nn.functional.cross_entropy(data.double() * 0.5, target[:, 0], reduction="none")
    close(loss, wanted[:, None])


@pytest.mark.parametrize(("rows", "strides"), [(5, (1, 5)), (5, (0, 1)), (5, (1, 0)), (1, (83, 1))])
def test_odd_rows_that_begin_no_word(tmp_path: Path, rows: int, strides: tuple[int, int]) -> None:
    """Columns one after the other, one row for all, one element for all of a row, a single row: read at their index."""
    segment = cross_entropy(rows, 83, DataType.Int, kept=False, logits=DataType.Half)
    data = values(rows * 83, dtype=DataType.Half).as_strided((rows, 83), strides)
    target = torch.arange(0, 83, 17)[:rows, None]
    schedule = Schedule(Tile(1, 32), Loop(8), access=Access.ALIGN_DOWN)
    (loss,) = run(
        segment, dict(zip(segment.inputs, (data, target), strict=True)), tmp_path, schedule=schedule, scheduler=looped
    )
    close(loss, torch.nn.functional.cross_entropy(data.double() * 0.5, target[:, 0], reduction="none")[:, None])


def entropy(rows: int, classes: int, logits: DataType = FLOAT) -> Segment:
    """Of each row's softmax; a logit of -inf adds nothing to it."""
    b = Builder()
    x = b.cast(b.input(logits, b.axis(rows), b.axis(classes)), FLOAT)
    apart = b.op("sub", x, b.reduce("max", x, [1]))
    powers = b.op("exp", apart)
    total = b.reduce("sum", powers, [1])
    weighted = b.op("where", b.op("eq", powers, 0.0), 0.0, b.op("mul", powers, apart))
    return b.segment(b.op("sub", b.op("log", total), b.op("div", b.reduce("sum", weighted, [1]), total)))


def entropy_of(x: torch.Tensor) -> torch.Tensor:
    logs = torch.log_softmax(x.double(), 1)
    return torch.where(logs == -INF, 0.0, -logs.exp() * logs).sum(1, keepdim=True) + 0.0


@pytest.mark.parametrize("schedule", [ROW, ROWS, by(ROW, 4), by(HELD, 2)])
@pytest.mark.parametrize("classes", [96, 83])
def test_entropy(tmp_path: Path, schedule: Schedule, classes: int) -> None:
    """The walk that takes the maximum and the sum takes what an entropy needs too, wherever the largest comes."""
    segment = entropy(16, classes)
    data = torch.cat([special_rows(classes), values(4, classes) * 4])
    data[12] = torch.linspace(-40, 40, classes)
    data[13] = torch.linspace(40, -40, classes)
    inputs = {segment.inputs[0]: data}
    if schedule.members:
        team = Team(segment, inputs, tmp_path, schedule, 16)
        assert team.source.text.count("epoch += 1") == 1
        (found,) = team.settle(1)
    else:
        (found,) = run(segment, inputs, tmp_path, scheduler=looped, schedule=schedule)
    wanted = entropy_of(data)
    assert wanted.isnan().flatten().tolist() == [k in (0, 1, 2, 7, 8) for k in range(16)]
    close(found, wanted)


def test_entropy_of_rows_of_odd_length(tmp_path: Path) -> None:
    segment = entropy(9, 9001, DataType.BFloat16)
    schedule = looped.propose(segment, H200)
    assert schedule.is_aligned_down
    data = values(9, 9001, dtype=DataType.BFloat16)
    data[2, :9000], data[5, -1], data[7, 1:] = -INF, NAN, -INF
    (found,) = run(segment, {segment.inputs[0]: data}, tmp_path, scheduler=looped, schedule=schedule)
    close(found, entropy_of(data))


def part_of_softmax(shape: list[int], dtype: DataType) -> tuple[Segment, BoundTensor]:
    """What a rank has of a softmax over a sharded axis: of a row of nothing but -inf the sum is 0."""
    b = Builder()
    x = b.input(dtype, *map(b.axis, shape))
    wide = b.cast(x, dtype.compute)
    top = b.reduce("max", wide, [1])
    centre = b.op("where", b.op("eq", top, -INF), 0.0, top)
    return b.segment(top, b.reduce("sum", b.op("exp", b.op("sub", wide, centre)), [1])), x


@pytest.mark.parametrize("columns", [64, 75])
@pytest.mark.parametrize(("schedule", "members"), [(ROW, 0), (ROWS, 0), (HELD, 8), (ROW, 2)])
def test_a_part_of_a_softmax(tmp_path: Path, schedule: Schedule, members: int, columns: int) -> None:
    segment, x = part_of_softmax([12, columns], FLOAT)
    data = special_rows(columns)
    if members:
        top, total = Team(segment, {x: data}, tmp_path, by(schedule, members), 12).settle(1)
    else:
        top, total = run(segment, {x: data}, tmp_path, schedule=schedule, scheduler=looped)
    wide = data.double()
    largest = wide.amax(1, keepdim=True)
    close(top, largest)
    close(total, torch.exp(wide - torch.where(largest == -INF, 0.0, largest)).sum(1, keepdim=True))
    assert total[0] == 0


def loops(segment: Segment) -> int:
    (source,) = kernels_of(segment)
    return source.text.count(" in tl.range(") - source.text.count("for row in")


def test_walks() -> None:
    """A softmax or a norm of columns is read twice, a loss of long rows once; what a team holds is exchanged once."""
    assert loops(softmax([4096, 256], 0, DataType.BFloat16)[0]) == 2
    assert loops(moments([4096, 256], [0], DataType.BFloat16)[0]) == 2
    assert loops(cross_entropy(4096, 32000, DataType.Int, kept=False)) == 1
    assert loops(cross_entropy(4096, 32000, DataType.Int, kept=False, smoothing=0.1)) == 1
    assert loops(entropy(4096, 32000)) == 1
    assert loops(cross_entropy(4096, 128256, DataType.Int, kept=True)) == 2
    assert loops(part_of_softmax([4096, 128256], DataType.BFloat16)[0]) == 1
    (source,) = kernels_of(moments([64, 65536], [1], DataType.BFloat16)[0])
    assert source.text.count("meet(count_ptr") == 1


def test_what_is_no_statistic() -> None:
    """Narrow floats are rounded between the two reductions; another axis or another tensor is no pair."""
    b = Builder()
    x, y = (b.input(dtype, b.axis(4), b.axis(64)) for dtype in (DataType.BFloat16, FLOAT))
    narrow = b.reduce("sum", b.op("exp", b.op("sub", x, b.reduce("max", x, [1]))), [1])
    assert online(b.segment(narrow)).exprs == b.segment(narrow).exprs
    doubled = b.op("mul", y, 2.0)
    other = b.reduce("sum", b.op("exp", b.op("sub", y, b.reduce("max", doubled, [1]))), [1])
    assert not any(isinstance(e.op, Statistic) for e in online(Segment.of(b.exprs[-6:], [other])).exprs)
    least = b.reduce("sum", b.op("exp", b.op("sub", y, b.reduce("min", y, [1]))), [1])
    assert not any(isinstance(e.op, Statistic) for e in online(Segment.of(b.exprs[-5:], [least])).exprs)


@pytest.mark.parametrize("schedule", [ROW.sized(reduced=64).accumulating(8), by(HELD.sized(reduced=64), 8)])
def test_a_large_mean(tmp_path: Path, schedule: Schedule) -> None:
    """Mean 1e4, deviation 1: no further from float64 than twice torch's own layer norm."""
    rows, columns = 4, 2000
    data = values(rows, columns) + 1e4
    segment, x = moments([rows, columns], [1], FLOAT)
    if schedule.members:
        found = Team(segment, {x: data}, tmp_path, schedule, rows).settle(1)
    else:
        found = run(segment, {x: data}, tmp_path, scheduler=looped, schedule=schedule)
    wanted = moments_of(data, [1])
    eager = torch.nn.functional.layer_norm(data, (columns,), eps=1e-5)
    apart = [float((out.double() - wanted[2]).square().mean().sqrt()) for out in (found[2], eager)]
    assert apart[0] <= 2 * apart[1], apart
    close(found[1], wanted[1])


def test_scaled_softmax_of_masked_scores(tmp_path: Path) -> None:
    """What stands before the maximum is computed as it is walked; masked scores are -inf, in one row all of them."""
    b = Builder()
    i, j = b.axis(6), b.axis(90)
    x, seen = b.input(DataType.Half, i, j), b.input(DataType.Bool, i, j)
    scores = b.op("where", seen, b.op("mul", b.cast(x, FLOAT), 0.125), -INF)
    powers = b.op("exp", b.op("sub", scores, b.reduce("max", scores, [1])))
    segment = b.segment(b.op("div", powers, b.reduce("sum", powers, [1])))
    data, mask = values(6, 90, dtype=DataType.Half) * 8, values(6, 90, dtype=DataType.Bool)
    mask[2] = False
    wanted = torch.softmax(torch.where(mask, data.double() * 0.125, -INF), 1)
    (out,) = run(segment, {x: data, seen: mask}, tmp_path, scheduler=looped, schedule=ROW)
    close(out, wanted)
