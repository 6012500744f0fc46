"""Pointwise walks in rows: what a row has one of is loaded once, whatever the rows' length and order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from interpreted import close, run, values
from segments import Builder, kernels_of, scheduler_of

from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.schedulers import pointwise
from shardfuse.segments.rounding import ends_narrow
from shardfuse.segments.segment import Segment

FLOAT, BF16 = DataType.Float, DataType.BFloat16


def cross_entropy_gradient(rows: int, classes: int, dtype: DataType = BF16) -> Segment:
    """(exp(x - log_sum) - is_target) * d_loss."""
    b = Builder()
    i, j = b.axis(rows), b.axis(classes)
    x, log_sum, d_loss = b.cast(b.input(dtype, i, j), FLOAT), b.input(FLOAT, i, ()), b.input(FLOAT, i, ())
    is_target = b.op("eq", b.iota(j), b.input(DataType.Int, i, ()))
    p = b.op("sub", b.op("exp", b.op("sub", x, log_sum)), b.cast(is_target, FLOAT))
    return b.segment(b.cast(b.op("where", b.op("lt", log_sum, 1e3), b.op("mul", p, d_loss), 0.0), dtype))


def number_of(tensor: BoundTensor) -> int:
    return int(tensor.name[1:])


@pytest.mark.parametrize(("classes", "block"), [(1003, 256), (1003, 1024), (1000, 256), (64, 1024), (513, 64)])
def test_cross_entropy_gradient(tmp_path: Path, classes: int, block: int) -> None:
    segment = cross_entropy_gradient(5, classes)
    schedule = pointwise.propose(segment, H200).sized(kept=block)
    x, log_sum, d_loss = values(5, classes, dtype=BF16), values(5, 1, seed=1) + 8, values(5, 1, seed=2)
    target = torch.tensor([[0], [classes - 1], [7], [-100], [classes]])
    log_sum[2] = 2e3
    data = x, log_sum, d_loss, target
    (out,) = run(
        segment, dict(zip(sorted(segment.inputs, key=number_of), data, strict=True)), tmp_path, schedule=schedule
    )
    hot = torch.arange(classes) == target
    close(out, torch.where(log_sum < 1e3, ((x.double() - log_sum).exp() - hot.double()) * d_loss, 0.0))


@pytest.mark.parametrize(("shape", "of_rows"), [((3, 4, 60), (0,)), ((3, 4, 60), (1,)), ((3, 2, 2, 60), (0, 2))])
def test_rows_of_several_dims(tmp_path: Path, shape: Sequence[int], of_rows: Sequence[int]) -> None:
    """Rows are what follows the last dim that a value of each row has; strides may be anything."""
    b = Builder()
    axes = [b.axis(n) for n in shape]
    x, scale = b.input(FLOAT, *axes), b.input(FLOAT, *(a if k in of_rows else () for k, a in enumerate(axes)))
    segment = b.segment(b.op("mul", x, scale))
    data = values(*shape[:-1], 2 * shape[-1])[..., ::2]
    factor = values(*(n if k in of_rows else 1 for k, n in enumerate(shape)), seed=1)
    for block in (16, 64, 256):
        schedule = pointwise.propose(segment, H200).sized(kept=block)
        (out,) = run(segment, {x: data, scale: factor}, tmp_path, schedule=schedule)
        assert torch.equal(out, data * factor)


def text_of(segment: Segment) -> str:
    (source,) = kernels_of(segment)
    return source.text


def test_which_walks_are_in_rows() -> None:
    """Long rows with several values each, or aligned; a flat walk where every program would be partly idle."""
    in_rows = "b = tl.program_id(0) //"
    assert in_rows in text_of(cross_entropy_gradient(4096, 50257))
    assert in_rows in text_of(cross_entropy_gradient(4096, 32000))
    assert in_rows in text_of(cross_entropy_gradient(4096, 5139))
    assert in_rows not in text_of(cross_entropy_gradient(4096, 5136))
    assert in_rows not in text_of(cross_entropy_gradient(4096, 2100))


def test_exponentials_less_one_are_cheap() -> None:
    """The gradient of a cross entropy is stored in 16 bits; less anything else, digits are cancelled."""
    assert "libdevice.exp(" not in text_of(cross_entropy_gradient(4096, 32000))
    assert "libdevice.exp(" in text_of(cross_entropy_gradient(4096, 32000, FLOAT))
    b = Builder()
    i, j = b.axis(8), b.axis(64)
    x, y = (b.cast(b.input(BF16, i, j), FLOAT) for _ in range(2))
    e = b.op("exp", x)
    segment = b.segment(b.cast(b.op("sub", e, y), BF16))
    assert scheduler_of(segment) is pointwise
    assert e not in ends_narrow(segment)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("weight", ["one", "smoothed", "of the row", "of the element", "sum", "number"])
def test_exponentials_beside_a_target_s_weight_are_cheap(weight: str, is_first: bool) -> None:
    """A truth value times a number, or one of its row, plus a number; on either side of the difference."""
    b = Builder()
    i, j = b.axis(8), b.axis(64)
    x, y = (b.cast(b.input(BF16, i, j), FLOAT) for _ in range(2))
    row, e = b.input(FLOAT, i, ()), b.op("exp", x)
    one = b.cast(b.op("eq", b.iota(j), b.input(DataType.Int, i, ())), FLOAT)
    other = {
        "one": lambda: one,
        "smoothed": lambda: b.op("add", b.op("mul", one, 0.9), 1e-5),
        "of the row": lambda: b.op("mul", one, row),
        "of the element": lambda: b.op("mul", one, y),
        "sum": lambda: b.op("add", one, row),
        "number": lambda: b.op("mul", row, 0.5),
    }[weight]()
    segment = b.segment(b.cast(b.op("sub", *((other, e) if is_first else (e, other))), BF16))
    assert (e in ends_narrow(segment)) == (weight in ("one", "smoothed", "of the row"))
