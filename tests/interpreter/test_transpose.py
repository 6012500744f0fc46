"""Tiles with two sides: the same numbers whatever is contiguous along what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from interpreted import run, values
from segments import Builder, scheduler_of

from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.schedulers import pointwise, transpose

CASES = [
    ((70, 33), (1, 0)),
    ((64, 128), (1, 0)),
    ((3, 40, 17), (0, 2, 1)),
    ((5, 7, 6), (2, 1, 0)),
    ((4, 3, 10, 9), (0, 2, 3, 1)),
    ((2, 11, 5, 3), (3, 0, 2, 1)),
]


@pytest.mark.parametrize(("shape", "dims"), CASES)
@pytest.mark.parametrize("dtype", [DataType.BFloat16, DataType.Float, DataType.Int])
def test_permuted_operand(tmp_path: Path, shape: Sequence[int], dims: Sequence[int], dtype: DataType) -> None:
    b = Builder()
    x = b.input(dtype, *map(b.axis, shape))
    turned = b.permute(x, dims)
    y, row = b.input(dtype, *turned.domain.logical), b.input(dtype, turned.domain.logical[-1])
    segment = b.segment(b.op("add", b.op("mul", turned, y), row))
    assert scheduler_of(segment) is transpose
    data = values(*shape, dtype=dtype)
    other = values(*(shape[d] for d in dims), dtype=dtype, seed=1)
    along = values(shape[dims[-1]], dtype=dtype, seed=2)
    named = {"T0": data, y.name: other, row.name: along}
    wanted = data.permute(*dims) * other + along
    proposed = transpose.propose(segment, H200)
    for schedule in (proposed, proposed.sized(kept=8, reduced=4), proposed.sized(kept=2, reduced=16)):
        (out,) = run(segment, {t: named[t.name] for t in segment.inputs}, tmp_path, schedule=schedule)
        assert torch.equal(out, wanted)


def test_two_outputs_of_two_orders(tmp_path: Path) -> None:
    """Strided and expanded inputs; what is stored along the other axis is turned on its way out."""
    b = Builder()
    i, j = b.axis(50), b.axis(36)
    x, y = b.input(DataType.Float, i, j), b.input(DataType.Float, i, j)
    total = b.op("add", x, y)
    segment = b.segment(total, b.permute(b.op("neg", total), [1, 0]))
    assert scheduler_of(segment) is transpose
    data, other = values(100, 72)[::2, ::2], values(50, 1, seed=1).expand(50, 36)
    found = dict(zip(segment.outputs, run(segment, {x: data, y: other}, tmp_path), strict=True))
    assert torch.equal(found[total], data + other)
    assert torch.equal(found[segment.outputs[1]], -(data + other).t())


def test_one_fastest_axis_is_no_transpose() -> None:
    b = Builder()
    x = b.input(DataType.Float, b.axis(5), b.axis(6), b.axis(7))
    segment = b.segment(b.op("neg", b.permute(x, [1, 0, 2])))
    assert transpose.why_not(segment, H200) == "i2 is fastest in every tensor"
    assert scheduler_of(segment) is pointwise
