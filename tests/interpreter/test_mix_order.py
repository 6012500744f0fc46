"""Sums along rows and down columns in one walk, against torch in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from interpreted import close, run, values
from kernel_cases import layer_norm_backward, rms_norm_backward
from segments import Builder, scheduler_of, shard

from shardfuse.codegen import KernelSource, generate
from shardfuse.device import H200
from shardfuse.ir.digits import root_of
from shardfuse.ir.dtype import DataType
from shardfuse.schedulers import mix_order
from shardfuse.schedulers.schedule import Group, Lagged, RowLoop, Schedule, Split
from shardfuse.segments.segment import Segment

BF16, FLOAT = DataType.BFloat16, DataType.Float
EPS = 1e-5


def rms_gradients(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    unit, scaled = x * rstd, dy * w
    return (scaled - unit * (scaled * unit).mean(-1, keepdim=True)) * rstd, (dy * unit).sum(0)


def layer_gradients(x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
    x = x.double().requires_grad_()
    unit = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + EPS)
    (dx,) = torch.autograd.grad(unit, x, dy.double() * w.double())
    return [dx, (dy.double() * unit.detach()).sum(tuple(rows)), dy.double().sum(tuple(rows))]


def saved_gradients(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> list[torch.Tensor]:
    """Of a layer norm whose statistics are what is given."""
    unit, scaled = (x - mean) * rstd, dy * w
    along, whole = (scaled * unit).mean(-1, keepdim=True), scaled.mean(-1, keepdim=True)
    return [(scaled - unit * along - whole) * rstd, (dy * unit).sum(0), dy.sum(0)]


def given(segment: Segment, *data: torch.Tensor) -> dict[object, torch.Tensor]:
    return dict(zip(segment.inputs, data, strict=True))


def ordered(segment: Segment, named: dict[str, torch.Tensor]) -> dict[object, torch.Tensor]:
    return {t: named[t.name] for t in segment.inputs}


def small(schedule: Schedule, rng: random.Random) -> Schedule:
    """Few programs, so that each walks; blocks that cut the row unevenly."""
    schedule = schedule.sized(kept=1 << rng.randrange(4), reduced=1 << rng.randrange(4, 8))
    schedule = schedule.split_into(rng.choice([1, 2, 3, 7]))
    return schedule.finished_at_once(is_one_launch=rng.random() < 0.5)


SHAPES = [(5, 300), (33, 130), (40, 64), (2, 1000), (130, 17), (7, 384), (1001, 3)]


@pytest.mark.parametrize("dtype", [BF16, DataType.Half, FLOAT, DataType.Double])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rms_norm_backward(tmp_path: Path, rows: int, columns: int, dtype: DataType) -> None:
    segment = rms_norm_backward(rows, columns, dtype)
    assert scheduler_of(segment) is mix_order
    x, dy, w = (
        values(rows, columns, dtype=dtype),
        values(rows, columns, dtype=dtype, seed=1),
        values(columns, dtype=dtype, seed=2),
    )
    rstd = values(rows, 1, dtype=dtype, seed=3).to(dtype.compute.torch)
    data = ordered(segment, {"T0": x, "T1": dy, "T2": w, "T3": rstd})
    wanted = rms_gradients(x.double(), dy.double(), w.double(), rstd.double())
    proposed = mix_order.propose(segment, H200)
    for schedule in (proposed, small(proposed, random.Random(rows * columns))):
        for found, right in zip(run(segment, data, tmp_path, schedule=schedule), wanted, strict=True):
            close(found, right)


@pytest.mark.parametrize("shape", [(9, 200), (3, 5, 72), (2, 3, 2, 130)])
@pytest.mark.parametrize("samples", [False, True])
def test_layer_norm_backward(tmp_path: Path, shape: tuple[int, ...], samples: bool) -> None:
    """Statistics, dx, dw and db; with ``samples`` a weight and sums for each of dim 0."""
    samples = samples and len(shape) > 2
    segment = layer_norm_backward(shape, FLOAT, samples=samples)
    assert scheduler_of(segment) is mix_order
    weight = [shape[0], *(1,) * (len(shape) - 2), shape[-1]] if samples else [shape[-1]]
    x, dy, w = values(*shape), values(*shape, seed=1), values(*weight, seed=2)
    wanted = layer_gradients(x, dy, w, range(1 if samples else 0, len(shape) - 1))
    proposed = mix_order.propose(segment, H200)
    rng = random.Random(str(shape))
    for schedule in (proposed, small(proposed, rng), small(proposed, rng)):
        for found, right in zip(
            run(segment, given(segment, x, dy, w), tmp_path, schedule=schedule), wanted, strict=True
        ):
            close(found, right)


@pytest.mark.parametrize(("block", "stages"), [(128, 1), (64, 2), (512, 1)])
def test_a_mean_and_the_squares_around_it_are_one_reduction(tmp_path: Path, block: int, stages: int) -> None:
    """Of whole chunks of one width, of which each warp has some; right of rows far from 0."""
    segment = layer_norm_backward((9, 512), FLOAT)
    chosen = mix_order.propose(segment, H200)
    schedule = chosen.sized(kept=1, reduced=block).split_into(2).with_warps(2)
    schedule = schedule.finished_at_once(is_one_launch=stages == 1)
    text = "".join(s.text for s in sources(segment, schedule))
    assert text.count("merged_moments)") == 1
    x, dy, w = values(9, 512) + 10, values(9, 512, seed=1), values(512, seed=2)
    found = run(segment, given(segment, x, dy, w), tmp_path, schedule=schedule)
    for mine, right in zip(found, layer_gradients(x, dy, w, [0]), strict=True):
        close(mine, right)
    for other in (schedule.sized(reduced=32), schedule.sized(kept=2)):
        assert "merged_moments" not in "".join(s.text for s in sources(segment, other))
    masked = layer_norm_backward((9, 500), FLOAT)
    assert "merged_moments" not in "".join(s.text for s in sources(masked, schedule))


def sources(segment: Segment, schedule: Schedule) -> list[KernelSource]:
    plans = mix_order.kernels(segment, schedule, H200)
    return [generate(p, {t: t.domain.layout(0) for t in (*p.segment.inputs, *p.segment.outputs)}, 0) for p in plans]


def added_up(kind: str) -> Segment:
    """Sums of columns that are added up, beside a mean of each row; ``kind``: what else there is."""
    b = Builder()
    i, j = b.axis(24), b.axis(96)
    x, dy = b.input(FLOAT, i, j), b.input(FLOAT, i, j)
    out = b.op("sub", x, b.mean(x, [1]))
    first, second = (b.reduce("sum", t, [0]) for t in (b.op("mul", dy, out), dy))
    third = b.reduce("max" if kind == "a maximum" else "sum", b.op("mul", x, x), [0])
    total = b.op("add", b.op("add", first, second), third)
    return b.segment(out, *([second] if kind == "one is an output" else []), total)


@pytest.mark.parametrize(("kind", "sums"), [("sums alone", 1), ("a maximum", 2), ("one is an output", 3)])
def test_sums_that_are_added_up_are_one(tmp_path: Path, kind: str, sums: int) -> None:
    segment = added_up(kind)
    assert scheduler_of(segment) is mix_order
    schedule = mix_order.propose(segment, H200).split_into(3)
    first = mix_order.kernels(segment, schedule.finished_at_once(is_one_launch=False), H200)[0]
    assert sum(t.name.endswith("_partial") for t in first.segment.outputs) == sums
    x, dy = values(24, 96), values(24, 96, seed=1)
    unit = x.double() - x.double().mean(-1, keepdim=True)
    squares = x.double() ** 2
    more = squares.amax(0) if kind == "a maximum" else squares.sum(0)
    out, *second, total = run(segment, given(segment, x, dy), tmp_path, schedule=schedule)
    close(out, unit)
    close(total, ((dy * unit).sum(0) + dy.double().sum(0) + more)[None])
    for found in second:
        close(found, dy.double().sum(0, keepdim=True))


@pytest.mark.parametrize(
    ("rows", "columns", "block", "warps"),
    [
        (131072, 1024, 1024, 2),
        (10000, 1000, 1024, 4),
        (8192, 640, 1024, 4),
        (50000, 640, 128, 2),
        (576000, 384, 128, 2),
        (32768, 4096, 1024, 4),
        (16384, 5000, 1024, 8),
        (16384, 7000, 2048, 8),
    ],
)
def test_how_rows_are_cut(rows: int, columns: int, block: int, warps: int) -> None:
    """Into one chunk where few lanes are idle, or few rows are walked; into few chunks of few widths."""
    segment = layer_norm_backward((rows, columns), BF16, saved=True)
    schedule = mix_order.propose(segment, H200)
    assert (schedule.reduced, schedule.launch.warps) == (block, warps)


def test_rows_are_padded_as_far_as_registers_go() -> None:
    """12544 rows of 384, of which four sums are carried: gradients of a LayerNorm, of the layer scale before it and of
    a bias.  In one chunk of 512 a thread has 304 registers' worth, and spilled 980 bytes."""
    b = Builder()
    row, column = b.axis(12544), b.axis(384)
    dy, y = (b.cast(b.input(BF16, row, column), FLOAT) for _ in range(2))
    unit, rstd = b.input(FLOAT, row, column), b.input(FLOAT, row, ())
    weight, scale = (b.input(FLOAT, column) for _ in range(2))
    scaled = b.op("mul", dy, weight)
    along, mean = b.mean(b.op("mul", scaled, unit), [1]), b.mean(scaled, [1])
    dx = b.op("mul", b.op("sub", b.op("sub", scaled, b.op("mul", unit, along)), mean), rstd)
    out = b.cast(b.op("mul", dx, scale), BF16)
    summed = (b.op("mul", dy, unit), dy, b.op("mul", dx, y), b.cast(out, FLOAT))
    segment = b.segment(dx, out, *(b.reduce("sum", t, [0], keepdim=False) for t in summed))
    schedule = mix_order.propose(segment, H200)
    assert (schedule.kept, schedule.reduced, schedule.launch.warps) == (4, 128, 2)


TEAMS = [(16, 3, 2, False), (64, 4, 1, True), (32, 5, 3, True)]
"""Elements of a chunk, members, rows of a turn, is it one launch."""


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize(("rows", "columns"), [(7, 96), (12, 250), (2, 64)])
def test_teams_walk_wide_rows(tmp_path: Path, rows: int, columns: int, dtype: DataType) -> None:
    """Also where rows do not fill the last turn, and where there are more rows of partial sums than teams."""
    layer, rms = layer_norm_backward((rows, columns), dtype, saved=True), rms_norm_backward(rows, columns, dtype)
    x, dy = (values(rows, columns, dtype=dtype, seed=k) for k in range(2))
    w, mean, rstd = values(columns, dtype=dtype, seed=2), values(rows, 1, seed=3), values(rows, 1, seed=4).abs()
    wide = [t.double() for t in (x, dy, w, rstd)]
    one = ordered(rms, {"T0": x, "T1": dy, "T2": w, "T3": rstd})
    other = ordered(layer, {"T0": x, "T2": dy, "T4": w, "T6": mean, "T7": rstd})
    for block, members, turn, once in TEAMS:
        group, split = Group(members, 3 * members, Lagged()), Split(5 if once else 2, once)
        schedule = Schedule(RowLoop(turn, block), group=group, split=split)
        for found, right in zip(run(rms, one, tmp_path, schedule=schedule), rms_gradients(*wide), strict=True):
            close(found, right)
        wanted = saved_gradients(*wide[:3], mean.double(), wide[3])
        for found, right in zip(run(layer, other, tmp_path, schedule=schedule), wanted, strict=True):
            close(found, right)


def test_sums_over_all_rows_and_over_the_rows_of_a_sample(tmp_path: Path) -> None:
    """Two column sums of different rows: the walk adds up what both take, the finish the rest."""
    b = Builder()
    x = b.input(FLOAT, b.axis(3), b.axis(7), b.axis(50))
    unit = b.op("sub", x, b.mean(x, [2]))
    each, every = (b.reduce("sum", unit, rows, keepdim=False) for rows in ([1], [0, 1]))
    segment = b.segment(unit, b.op("mul", each, 2.0), every)
    schedule = mix_order.propose(segment, H200).split_into(2).finished_at_once(is_one_launch=False)
    assert len(mix_order.kernels(segment, schedule, H200)) == 3
    assert len(mix_order.kernels(segment, schedule.finished_at_once(), H200)) == 1
    data = values(3, 7, 50)
    wanted = data.double() - data.double().mean(-1, keepdim=True)
    right = {segment.outputs[0]: wanted, every: wanted.sum((0, 1)), segment.outputs[-1]: wanted.sum(1) * 2}
    for out, found in zip(segment.outputs, run(segment, {x: data}, tmp_path, schedule=schedule), strict=True):
        close(found, right[out])


@pytest.mark.parametrize("op", ["max", "min", "any", "prod"])
def test_other_reductions_down_columns(tmp_path: Path, op: str) -> None:
    b = Builder()
    kind = DataType.Bool if op == "any" else FLOAT
    x = b.input(kind, b.axis(37), b.axis(70))
    column = b.reduce(op, x, [0], keepdim=False)
    segment = b.segment(column, b.reduce("any" if op == "any" else "max", x, [1], keepdim=False))
    data = values(37, 70, dtype=kind)
    rows = data.any(1) if op == "any" else data.amax(1)
    wanted = {"max": data.amax, "min": data.amin, "any": data.any, "prod": data.double().prod}[op](0)
    schedule = mix_order.propose(segment, H200).split_into(3)
    for found, right in zip(run(segment, {x: data}, tmp_path, schedule=schedule), (wanted, rows), strict=True):
        close(found, right)


@pytest.mark.parametrize("view", ["every other", "expanded", "transposed"])
def test_strided_rows(tmp_path: Path, view: str) -> None:
    segment = layer_norm_backward((21, 48), FLOAT)
    x = {
        "every other": values(42, 96)[::2, ::2],
        "expanded": values(1, 48).expand(21, 48),
        "transposed": values(48, 21).t(),
    }[view]
    dy, w = values(21, 48, seed=1), values(48, seed=2)
    schedule = mix_order.propose(segment, H200).split_into(2)
    for found, right in zip(
        run(segment, given(segment, x, dy, w), tmp_path, schedule=schedule), layer_gradients(x, dy, w, [0]), strict=True
    ):
        close(found, right)


@pytest.mark.parametrize("team", [0, 3])
def test_rows_on_the_last_rank_are_fewer(tmp_path: Path, team: int) -> None:
    """Rows are sharded unevenly: a rank walks its own and stores its own sums."""
    segment = rms_norm_backward(29, 60, FLOAT)
    shard(segment, root_of(segment.inputs[0].domain.logical[0][0]), 4)
    assert scheduler_of(segment) is mix_order
    x, dy, w, rstd = values(29, 60), values(29, 60, seed=1), values(60, seed=2), values(29, 1, seed=3)
    schedule = mix_order.propose(segment, H200).split_into(3)
    if team:
        group, split = Group(team, 5 * team, Lagged()), Split(5, in_one_launch=True)
        schedule = Schedule(RowLoop(2, 16), group=group, split=split)
    total = torch.zeros(60, dtype=torch.float64)
    for rank in range(4):
        rows = slice(8 * rank, 8 * (rank + 1))
        mine = {"T0": x[rows], "T1": dy[rows], "T2": w, "T3": rstd[rows]}
        dx, dw = run(segment, ordered(segment, mine), tmp_path, schedule=schedule, rank=rank)
        close(dx, rms_gradients(x[rows].double(), dy[rows].double(), w.double(), rstd[rows].double())[0])
        total += dw
    terms = (x.double() * rstd.double() * dy.double()).abs().sum(0)  # added up by rank, in another order
    close(total.float(), rms_gradients(x.double(), dy.double(), w.double(), rstd.double())[1], terms=terms)


def rows_again() -> Segment:
    b = Builder()
    x = b.input(FLOAT, b.axis(8), b.axis(9))
    return b.segment(b.op("sub", b.op("sub", x, b.mean(x, [1])), b.reduce("sum", x, [0])))


def two_ways_along_rows() -> Segment:
    b = Builder()
    x = b.input(FLOAT, b.axis(4), b.axis(8), b.axis(9))
    return b.segment(
        b.reduce("sum", x, [2], keepdim=False),
        b.reduce("sum", x, [1, 2], keepdim=False),
        b.reduce("sum", x, [0], keepdim=False),
    )


def too_long() -> Segment:
    return layer_norm_backward((64, 65536), BF16)


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (rows_again, "T7 needs rows again after T6 has been reduced over them"),
        (two_ways_along_rows, "some reductions take i2, others i1, i2"),
        (
            too_long,
            "a row of 65536 elements takes 5 registers each, more than a multiprocessor has; of a group, "
            "3 reductions of a row follow one another",
        ),
    ],
)
def test_why_not_names_the_reason(segment: Callable[[], Segment], said: str) -> None:
    assert mix_order.why_not(segment(), H200) == said
