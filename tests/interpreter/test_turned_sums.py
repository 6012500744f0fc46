"""Sums whose tensors are contiguous along different axes: tiles with runs of memory along either side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import close, run, values
from segments import Builder, scheduler_of

from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.schedulers import reduction
from shardfuse.schedulers.features import features
from shardfuse.segments.segment import Segment

BF16, FLOAT, HALF = DataType.BFloat16, DataType.Float, DataType.Half
Turned = tuple[Segment, BoundTensor, BoundTensor | None]


def gradients(n: int, c: int, p: int, dtype: DataType, *, other: DataType | None = None, stored: bool = True) -> Turned:
    """``x`` [n, c, p] is summed over samples and pixels, times ``y`` [n, p, c] where there is one, and stored as rows
    [n, p, c]."""
    b = Builder()
    x = b.input(dtype, *map(b.axis, (n, c, p)))
    rows = b.permute(x, [0, 2, 1])
    wide = b.cast(rows, FLOAT)
    y = None if other is None else b.input(other, *rows.domain.logical)
    product = wide if y is None else b.op("mul", wide, b.cast(y, FLOAT))
    total = b.reduce("sum", product, [0, 1], keepdim=False)
    return b.segment(*([rows] if stored else []), total), x, y


@pytest.mark.parametrize(
    ("sizes", "dtype", "other", "stored"),
    [
        ((3, 40, 70), FLOAT, BF16, True),
        ((3, 40, 70), FLOAT, BF16, False),
        ((5, 96, 49), HALF, None, True),  # rows of 49: no load is aligned
        ((2, 33, 301), BF16, FLOAT, False),
        ((40, 64, 33), BF16, None, True),
    ],
)
def test_sums_are_right_whatever_is_contiguous_along_what(
    tmp_path: Path, sizes: tuple[int, int, int], dtype: DataType, other: DataType | None, stored: bool
) -> None:
    segment, x, y = gradients(*sizes, dtype, other=other, stored=stored)
    assert scheduler_of(segment) is reduction
    schedule = reduction.propose(segment, H200)
    assert (schedule.kept, schedule.reduced) == H200.measured.reductions.turned_tile
    n, c, p = sizes
    data = values(n, c, p, dtype=dtype)
    named = {x: data}
    product = data.double().permute(0, 2, 1)
    if y is not None:
        assert other is not None
        named[y] = values(n, p, c, dtype=other, seed=1)
        product = product * named[y].double()
    for one in (schedule, schedule.split_into(2), schedule.sized(kept=64, reduced=16)):
        found = dict(zip(segment.outputs, run(segment, named, tmp_path, schedule=one), strict=True))
        for t, out in found.items():
            if out.ndim == 3:
                assert torch.equal(out, data.permute(0, 2, 1)), t
            else:
                close(out, product.sum((0, 1)))


def test_a_model_s_gradients_fill_the_machine() -> None:
    """Heads of 384 x 64 x 512 that become rows, and Swin's of 4096 windows; four programs a multiprocessor."""
    for sizes in ((32, 768, 512), (4096, 96, 49)):
        schedule = reduction.propose(gradients(*sizes, BF16)[0], H200)
        assert schedule.parts * -(-sizes[1] // schedule.kept) == 4 * H200.multiprocessors
        assert schedule.is_one_launch


@pytest.mark.parametrize(
    ("c", "p", "is_turned"),
    [(96, 49, True), (16, 49, False), (96, 16, False)],
)
def test_short_runs_are_no_side(c: int, p: int, is_turned: bool) -> None:
    """Of less than a warp's threads, along either axis."""
    assert features(gradients(64, c, p, BF16)[0], H200).is_turned == is_turned


def test_one_order_is_not_turned() -> None:
    for axes in ([0, 1], [0, 2]):
        b = Builder()
        x = b.input(BF16, b.axis(8), b.axis(64), b.axis(96))
        segment = b.segment(b.reduce("sum", b.cast(x, FLOAT), axes, keepdim=False))
        assert not features(segment, H200).is_turned
