"""What the tests change of Triton's interpreter gives what Triton's own gives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from quick_interpreter import OWN_BLOCK_TYPE
from triton.runtime import interpreter

from shardfuse.kernel_functions.gpu_functions import maximum, merged_moments

OWN = interpreter.ReduceOps.generic_reduce
"""Triton's: the fixture of this folder comes after the import."""
SEMANTIC = tl.semantic.TritonSemantic
OWN_BROADCAST, OWN_TYPE = SEMANTIC.broadcast_impl_value, SEMANTIC.computation_type_impl
OWN_UNWRAP = tl.core._unwrap_if_constexpr
POINTER = tl.pointer_type(tl.float32)
SCALARS = [tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64]
SCALARS += [tl.float8e5, tl.float8e4nv, tl.float16, tl.bfloat16, tl.float32, tl.float64]


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


@pytest.mark.parametrize("dtype", [tl.int1, tl.bfloat16, POINTER])
@pytest.mark.parametrize("shape", [[4], [1, 8], [tl.constexpr(2), 1, 16]])
def test_types_of_blocks(dtype: Any, shape: list[Any]) -> None:
    """Their sides, number of elements and name, from numbers, from constants and from another type's sides."""
    own = tl.block_type.__new__(tl.block_type)
    OWN_BLOCK_TYPE(own, dtype, shape)
    for quick in (tl.block_type(dtype, shape), tl.block_type(dtype, own.shape), own.with_element_ty(dtype)):
        assert (quick.name, quick.numel, quick.element_ty) == (own.name, own.numel, dtype)
        assert (type(quick.shape), quick.shape.values) == (tl.tuple, own.shape.values)
        assert quick == own
        assert own == quick
    assert tl.block_type(dtype, shape).shape is tl.block_type(tl.int32, shape).shape
    assert tl.block_type(tl.int32, shape) != own
    assert tl.block_type(dtype, [*shape, 2]) != own


@pytest.mark.parametrize("shape", [[], [3], [2.0]])
def test_what_is_no_shape_of_a_block_is_refused(shape: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=r"0d block_type|power of 2|must have type"):
            tl.block_type(tl.int32, shape)


def test_types_and_tuples_are_equal_to_themselves_and_to_what_is_alike() -> None:
    for a in (*SCALARS, POINTER):
        assert [b for b in (*SCALARS, POINTER, tl.block_type(a, [2]), 1, None) if a == b] == [a]
    assert tl.pointer_type(tl.float32) == POINTER != tl.pointer_type(tl.int32)
    pair = tl.tuple([1, 2])
    for other, expected in ((pair, True), (tl.tuple([1, 2]), True), ([1, tl.constexpr(2)], True), ([1, 3], False)):
        found = pair == other
        assert isinstance(found, tl.constexpr)
        assert found.value is expected
        assert (pair != other) is not expected


def test_constants_are_unwrapped() -> None:
    assert tl.core._unwrap_if_constexpr is not OWN_UNWRAP
    values = (3, True, 2.5, None, tl.float32, "text", tl.constexpr(7), tl.constexpr(None), [tl.constexpr(1), 2])
    for value in (*values, (tl.constexpr(1), [2]), tl.tuple([tl.constexpr(1), tl.constexpr(2)])):
        found, own = tl.core._unwrap_if_constexpr(value), OWN_UNWRAP(value)
        assert type(found) is type(own)
        assert found == own


def _outcome(function: Callable[..., object], *arguments: object) -> object:
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        return str(error)


def test_operands_are_converted_to_the_types_that_triton_says() -> None:
    semantic = SEMANTIC(interpreter.interpreter_builder)
    assert SEMANTIC.computation_type_impl is not OWN_TYPE
    for a, b in product(SCALARS, SCALARS):
        for of_scalars in product((False, True), (False, True), (False, True)):
            case = a, of_scalars[0], b, of_scalars[1], of_scalars[2]
            own = _outcome(OWN_TYPE, semantic, *case)
            assert [_outcome(semantic.computation_type_impl, *case) for _ in range(2)] == [own, own], case


def test_operands_are_broadcast_as_triton_does() -> None:
    semantic = SEMANTIC(interpreter.interpreter_builder)
    assert SEMANTIC.broadcast_impl_value is not OWN_BROADCAST
    operands = [
        tl.tensor(
            interpreter.TensorHandle(np.arange(np.prod(sides or [1])).reshape(sides or [1]).astype(np.int32), tl.int32),
            tl.block_type(tl.int32, sides) if sides else tl.int32,
        )
        for sides in ([], [1], [4], [8, 1], [1, 4], [8, 4], [8, 4])
    ]
    for pair in product(operands, operands):
        quick, own = (_outcome(f, semantic, *pair) for f in (SEMANTIC.broadcast_impl_value, OWN_BROADCAST))
        if isinstance(own, str):
            assert quick == own
            continue
        for found, expected in zip(quick, own, strict=True):
            assert found.type == expected.type
            assert np.array_equal(found.handle.data, expected.handle.data)
            assert found.handle.data.shape == expected.handle.data.shape
