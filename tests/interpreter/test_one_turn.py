"""Rows that one program has in one turn: sums both ways, and what rests on them, with and without a promise."""

from __future__ import annotations

import random

import pytest
import torch
from fusion_check import check

from shardfuse import DataType, FusionDefinition
from shardfuse.ir.tensor_view import TensorView

ROWS = (1, 2, 3, 5, 8, 13)
COLUMNS = (5, 9, 17, 33, 64, 65, 100, 129, 257)
"""Some leave a chunk of a single column."""
KINDS = ("sum", "max", "min", "prod", "any", "all", "mean")


def define(seed: int, samples: int, rows: int, columns: int) -> tuple[FusionDefinition, list[torch.Tensor]]:
    """Of [samples, rows, columns] or, of one sample, [rows, columns]: an epilogue of a sum along rows, reductions of
    the rows of each sample, or of all, and what is made of these with a vector."""
    rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice((DataType.Float, DataType.BFloat16, DataType.Half))
    shape, ways = ([samples] if samples > 1 else []) + [rows, columns], [[1], [0, 1]] if samples > 1 else [[0]]
    with FusionDefinition(invariant=rng.choice((None, None, "batch", "ranks"))) as fd:
        o, sizes = fd.ops, [-1] * (len(shape) - 1) + [columns]
        x, y = (fd.define_tensor(sizes, contiguity=True, dtype=dtype) for _ in range(2))
        w = fd.define_tensor([columns], contiguity=True, dtype=rng.choice((dtype, DataType.Float)))
        x, y, w = (o.cast(t, dtype=DataType.Float) for t in (x, y, w))
        mean = o.mean(o.mul(x, y), [-1], keepdim=True)
        normed = o.mul(o.sub(x, mean), o.rsqrt(o.add(o.mean(o.mul(x, x), [-1], keepdim=True), 1e-3)))
        fd.add_output(o.cast(normed, dtype=dtype))
        for _ in range(rng.randint(1, 3)):
            fd.add_output(_down_columns(fd, rng, rng.choice((normed, y, o.mul(normed, w))), w, rng.choice(ways)))
    inputs = [torch.randn(s, generator=made, dtype=torch.float64) for s in (shape, shape, [columns])]
    return fd, [v.to(t.dtype.torch) for v, t in zip(inputs, fd.fec.tensors(), strict=True)]


def _down_columns(
    fd: FusionDefinition, rng: random.Random, of: TensorView, w: TensorView, over: list[int]
) -> TensorView:
    o, kind = fd.ops, rng.choice(KINDS)
    if kind in ("any", "all"):
        return getattr(o, kind)(o.gt(of, rng.choice((-1.5, 0.0, 1.0))), over)
    found = getattr(o, kind)(of, over)
    if rng.random() < 0.4:
        found = o.add(o.mul(found, w), 0.25)
    return o.cast(found, dtype=rng.choice((DataType.Float, DataType.BFloat16)))


@pytest.mark.parametrize("columns", COLUMNS)
def test_like_torch(columns: int) -> None:
    one_turn = 0
    for k, rows in enumerate((*ROWS, *ROWS)):
        fd, given = define(100 * columns + k, 3 if k % 4 == 3 else 1, rows, columns)
        check(fd, given)
        plan = fd.fec.last_plan
        assert plan is not None
        kernels = [kernel for segment in plan.segments for kernel in segment.kernels]
        one_turn += any(kernel.space.walked and kernel.schedule.split is None for kernel in kernels)
    assert one_turn or columns % 8


def test_sums_over_the_rows_of_a_sample_and_over_all() -> None:
    """Each sample has a program; none has all rows of the second sum."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 4, 64], contiguity=True, dtype=DataType.Float)
        o = fd.ops
        normed = o.mul(x, o.rsqrt(o.mean(o.mul(x, x), [-1], keepdim=True)))
        fd.add_output(o.sub(normed, o.mul(x, o.mean(o.mul(normed, x), [-1], keepdim=True))))
        fd.add_output(o.sum(normed, [1]))
        fd.add_output(o.sum(normed, [0, 1]))
    check(fd, [torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))])


def test_a_maximum_beside_a_sum_that_is_cut_into_segments() -> None:
    with FusionDefinition(invariant="ranks") as fd:
        x, g = (fd.define_tensor([32, 64], contiguity=True, dtype=DataType.Float) for _ in range(2))
        o = fd.ops
        normed = o.mul(x, o.rsqrt(o.mean(o.mul(x, x), [-1], keepdim=True)))
        fd.add_output(o.sub(g, o.mul(normed, o.mean(o.mul(g, normed), [-1], keepdim=True))))
        fd.add_output(o.max(o.mul(g, normed), [0]))
        fd.add_output(o.sum(o.mul(g, normed), [0]))
    made = torch.Generator().manual_seed(0)
    check(fd, [torch.randn(32, 64, generator=made) for _ in range(2)])
