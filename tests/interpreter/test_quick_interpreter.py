"""What the tests change of Triton's interpreter gives what Triton's own gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from shardfuse.kernel_functions.gpu_functions import maximum, merged_moments

OWN = interpreter.ReduceOps.generic_reduce
"""Triton's: the fixture of this folder comes after the import."""


@interpreter.InterpretedFunction
def first(a, b):
    return a


@interpreter.InterpretedFunction
def last(a, b):
    return b


@interpreter.InterpretedFunction
def both(a, index, b, other_index):
    """The larger one's number, of equal ones the later one's."""
    is_later = b >= a
    return tl.where(is_later, b, a), tl.where(is_later, other_index, index)


@interpreter.InterpretedFunction
def store(out, x, number: tl.constexpr):
    tl.store(out + tl.arange(0, number), tl.reshape(x, [number]))


@interpreter.InterpretedFunction
def reduced(x, out, apart, counts, axis: tl.constexpr, number: tl.constexpr):
    """Of a block of 8 rows of 16, along one axis of it, or of all (axis 2)."""
    at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    block = tl.load(x + at)
    along: tl.constexpr = None if axis == 2 else axis
    tl.store(apart + at, block - tl.reduce(block, along, maximum, keep_dims=True))
    store(out, tl.reduce(block, along, maximum, keep_dims=True), number)
    store(out + number, tl.reduce(block, along, first, keep_dims=True), number)
    store(out + 2 * number, tl.reduce(block, along, last, keep_dims=True), number)
    if axis < 2:
        largest, where = tl.reduce((block, at), axis, both)
        store(out + 3 * number, largest, number)
        store(out + 4 * number, where.to(tl.float32), number)
        count, mean, squares = tl.reduce((tl.load(counts + at), block, tl.abs(block)), axis, merged_moments)
        store(out + 5 * number, count, number)
        store(out + 6 * number, mean, number)
        store(out + 7 * number, squares, number)


@pytest.mark.parametrize(("axis", "number"), [(0, 16), (1, 8), (2, 1)])
@pytest.mark.parametrize("has_nan", [False, True])
def test_reductions(axis: int, number: int, has_nan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the elements; those of which one is chosen are the same bits, also NaN."""
    x, counts = torch.randn(8, 16).mul(4).round().div(4), torch.randint(1, 9, (8, 16)).float()
    if has_nan:
        x[3, 7] = float("nan")
    made, apart = ([torch.full((8, n), -1.0) for _ in range(2)] for n in (number, 16))
    assert interpreter.ReduceOps.generic_reduce is not OWN
    reduced[(1,)](x, made[0], apart[0], counts, axis, number)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", OWN)
    reduced[(1,)](x, made[1], apart[1], counts, axis, number)
    quick, own = made
    assert torch.equal(quick[:6].view(torch.int32), own[:6].view(torch.int32))
    assert torch.equal(apart[0].view(torch.int32), apart[1].view(torch.int32))
    torch.testing.assert_close(quick[6:], own[6:], equal_nan=True, rtol=1e-5, atol=1e-5)
    assert own[0].isnan().any() == has_nan


@pytest.mark.parametrize("dtype", [tl.int1, tl.uint8, tl.bfloat16, tl.float64, tl.pointer_type(tl.float32)])
@pytest.mark.parametrize("shape", [(), (4, 2)])
def test_tensors(dtype: Any, shape: tuple[int, ...]) -> None:
    """Types of NumPy, and what a tensor says of itself."""
    kind = tl.block_type(dtype, list(shape)) if shape else dtype
    scalar = interpreter.TensorHandle(np.zeros(shape or (1,), dtype=interpreter._get_np_dtype(kind)), dtype)
    found = tl.tensor(scalar, kind)
    assert (found.handle, found.type, found.dtype) == (scalar, kind, dtype)
    assert ([n.value for n in found.shape], found.numel.value) == (list(shape), 8 if shape else 1)
    wide = 8 if dtype.is_ptr() else max(dtype.primitive_bitwidth // 8, 1)
    assert scalar.data.itemsize == wide
