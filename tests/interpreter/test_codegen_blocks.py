"""Any block sizes, splits, axes and strides give the same numbers: cases of a seeded generator, small and odd."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted import close, run, values
from segments import Builder

from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.schedulers import looped, persistent, pointwise, reduction
from shardfuse.schedulers.schedule import Group, Loop, Schedule, Tile
from shardfuse.segments.segment import Segment

CASES = 25


def strided(rng: random.Random, shape: list[int], seed: int) -> torch.Tensor:
    """A tensor of ``shape``: dims permuted in memory, or every other element of a larger one, or expanded."""
    match rng.randrange(4):
        case 0:
            order = rng.sample(range(len(shape)), len(shape))
            back = [order.index(k) for k in range(len(shape))]
            return values(*(shape[k] for k in order), seed=seed).permute(back)
        case 1:
            return values(*(2 * n for n in shape), seed=seed)[tuple(slice(None, None, 2) for _ in shape)]
        case 2:
            gone = rng.randrange(len(shape))
            return values(*(1 if k == gone else n for k, n in enumerate(shape)), seed=seed).expand(shape)
        case _:
            return values(*shape, seed=seed)


def reduced_axes(rng: random.Random, ndim: int) -> list[int]:
    return sorted(rng.sample(range(ndim), rng.randint(1, ndim)))


def blocks(rng: random.Random, schedule: Schedule, *, splits: bool) -> Schedule:
    """Other block sizes than proposed, the number of chunks of an unrolled kernel kept small."""
    kept = schedule.kept if schedule.columns else 1 << rng.randrange(5)  # a block holds all columns of a group
    schedule = replace(schedule, split=None).sized(kept=kept, reduced=max(schedule.reduced >> rng.randrange(3), 1))
    if not splits:
        return schedule
    return replace(schedule, residency=Loop(schedule.accumulated)).split_into(rng.choice([1, 2, 4]))


def normalised(b: Builder, x: BoundTensor, axes: list[int]) -> Segment:
    """Two reductions, one after the other, and the input again."""
    centred = b.op("sub", x, b.mean(x, axes))
    scale = b.op("rsqrt", b.op("add", b.mean(b.op("mul", centred, centred), axes), 1e-2))
    return b.segment(b.op("mul", centred, scale))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 191, 200])
def test_a_flat_walk_of_any_number(tmp_path: Path, count: int) -> None:
    """Programs of 64 elements, of which the last alone has a mask."""
    b = Builder()
    x = b.input(DataType.Half, b.axis(count))
    segment = b.segment(b.op("neg", b.cast(x, DataType.Float)))
    data = values(count, seed=count).half()
    schedule = pointwise.propose(segment, H200).sized(kept=64)
    (out,) = run(segment, {x: data}, tmp_path, schedule=schedule, scheduler=pointwise)
    assert torch.equal(out, -data.float())


@pytest.mark.parametrize("seed", range(CASES))
def test_normalise(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.choice([2, 3, 4, 5, 8, 13]) for _ in range(rng.randint(1, 4))]
    axes = reduced_axes(rng, len(shape))
    b = Builder()
    x = b.input(DataType.Float, *map(b.axis, shape))
    segment = normalised(b, x, axes)
    data = strided(rng, shape, seed)
    wide = data.double()
    centred = wide - wide.mean(axes, keepdim=True)
    wanted = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + 1e-2)
    for scheduler in (persistent, looped):
        if scheduler.why_not(segment, H200) is None:
            schedule = blocks(rng, scheduler.propose(segment, H200), splits=False)
            (out,) = run(segment, {x: data}, tmp_path, scheduler=scheduler, schedule=schedule)
            close(out, wanted)


@pytest.mark.parametrize("seed", range(CASES))
def test_reduce(tmp_path: Path, seed: int) -> None:
    rng = random.Random(1000 + seed)
    shape = [rng.choice([2, 3, 4, 5, 8, 13, 40]) for _ in range(rng.randint(1, 3))]
    axes = reduced_axes(rng, len(shape))
    b = Builder()
    x, y = (b.input(DataType.Float, *axis) for axis in [[b.axis(n) for n in shape]] * 2)
    product = b.op("mul", x, y)
    total = b.reduce("sum", product, axes, keepdim=False)
    top = b.reduce("max", product, axes, keepdim=False)
    segment = b.segment(b.op("add", total, top))
    data, other = strided(rng, shape, seed), strided(rng, shape, seed + 1)
    wanted = data.double() * other.double()
    schedule = blocks(rng, reduction.propose(segment, H200), splits=rng.random() < 0.7)
    (out,) = run(segment, {x: data, y: other}, tmp_path, scheduler=reduction, schedule=schedule)
    close(out, wanted.sum(axes) + wanted.amax(axes))


@pytest.mark.parametrize("seed", range(CASES // 2))
def test_pointwise_of_strided_inputs(tmp_path: Path, seed: int) -> None:
    rng = random.Random(2000 + seed)
    shape = [rng.choice([1, 2, 3, 4, 5, 8, 13]) for _ in range(rng.randint(1, 4))]
    b = Builder()
    axes = [b.axis(n) for n in shape]
    held = [rng.random() < 0.7 for _ in shape]
    x, part = (
        b.input(DataType.Float, *axes),
        b.input(DataType.Float, *(a if h else () for a, h in zip(axes, held, strict=True))),
    )
    segment = b.segment(b.op("sub", x, part))
    data = strided(rng, shape, seed)
    other = values(*(n if h else 1 for n, h in zip(shape, held, strict=True)), seed=seed)
    schedule = pointwise.propose(segment, H200).sized(kept=1 << rng.randrange(7))
    (out,) = run(segment, {x: data, part: other}, tmp_path, schedule=schedule, scheduler=pointwise)
    assert torch.equal(out, data - other)


@pytest.mark.parametrize("members", [0, 1])
@pytest.mark.parametrize("rows", [4, 5])
def test_vectors_beside_pairs_of_rows(tmp_path: Path, rows: int, members: int) -> None:
    """A vector is read once for both rows, and is reduced for both."""
    b = Builder()
    i, j = b.axis(rows), b.axis(1500)
    x, shift, weight = b.input(DataType.Float, i, j), b.input(DataType.Float, j), b.input(DataType.Float, j)
    total = b.op("add", x, shift)
    centred = b.op("mul", b.op("sub", total, b.mean(total, [1])), weight)
    segment = b.segment(b.op("add", centred, b.aligned(b.mean(b.op("square", weight), [0]), 2)))
    values_of = [values(rows, 1500), values(1500, seed=1), values(1500, seed=2)]
    group = Group(members, 2 * members) if members else None
    schedule = Schedule(Tile(2, 1024), group=group)
    inputs = dict(zip((x, shift, weight), values_of, strict=True))
    (out,) = run(segment, inputs, tmp_path, scheduler=persistent, schedule=schedule)
    data, more, scale = (v.double() for v in values_of)
    wide = data + more
    close(out, (wide - wide.mean(1, keepdim=True)) * scale + scale.square().mean())
