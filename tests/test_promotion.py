"""Result types against torch: all pairs of types, as tensors with dims, tensors without, and Python numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from pointwise_references import REFERENCES
from torch_answers import assert_beside

from shardfuse import DataType, FusionDefinition
from shardfuse.errors import PromotionError
from shardfuse.ir.scalar import Number, Scalar
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.promotion import promote, types
from shardfuse.ops.table import POINTWISE

NUMBERS: tuple[Number, ...] = (True, 3, 2.5, 1 + 2j)


def number_type(value: Number) -> DataType:
    kinds = {bool: DataType.Bool, int: DataType.Int, float: DataType.Double, complex: DataType.ComplexDouble}
    return kinds[type(value)]


def torch_result(a: torch.Tensor | Number, b: torch.Tensor | Number) -> torch.dtype | None:
    try:
        return torch.result_type(a, b)
    except RuntimeError:
        return None


def expect(a: TensorView | Scalar, b: TensorView | Scalar, wanted: torch.dtype | None) -> None:
    if wanted is None:
        with pytest.raises(PromotionError, match="are not promoted to a common type: cast one of the operands first"):
            promote([a, b])
        return
    assert promote([a, b]).torch == wanted, f"{a!r} and {b!r}"


@pytest.mark.parametrize("dims", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_two_tensors(dims: tuple[int, int]) -> None:
    for a, b in itertools.product(DataType, DataType):
        if a.torch in (torch.complex64, torch.complex128) and b is DataType.Half and dims == (0, 1):
            continue  # torch has a complex type of two halves here, which shardfuse has not
        tensors = [torch.empty((1,) * n, dtype=t.torch) for t, n in zip((a, b), dims, strict=True)]
        wanted = torch_result(*tensors)
        if wanted is torch.complex32:
            continue
        expect(*(TensorView("T", (-1,) * n, t) for t, n in zip((a, b), dims, strict=True)), wanted)


@pytest.mark.parametrize("ndim", [0, 1])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_tensor_and_a_number(ndim: int, number: Number) -> None:
    for t in DataType:
        wanted = torch_result(torch.empty((1,) * ndim, dtype=t.torch), number)
        if wanted is torch.complex32:
            continue
        scalar = Scalar("S", number_type(number), number, is_literal=True)
        expect(TensorView("T", (-1,) * ndim, t), scalar, wanted)
        expect(scalar, TensorView("T", (-1,) * ndim, t), wanted)


OPS = ("add", "div", "maximum", "gt", "pow", "logical_and")
COMMON = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


@pytest.mark.parametrize("name", OPS)
def test_ops_give_torchs_type_and_value(name: str) -> None:
    """Pairs of types, with dims and without, in one fusion for each first type."""
    for first, ndim in itertools.product(COMMON, (0, 1)):
        a = torch.tensor([2, 1, 3][: 1 if ndim == 0 else 3], dtype=first)
        a = a[0] if ndim == 0 else a
        others = [torch.tensor([1, 2, 1]).to(t) for t in COMMON] + [torch.tensor(1).to(t) for t in COMMON]
        others = [b for b in others if answer(name, a, b) is not None]
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1] * ndim, dtype=DataType.from_torch(first))
            for b in others:
                fd.add_output(
                    getattr(fd.ops, name)(x, fd.define_tensor([-1] * b.ndim, dtype=DataType.from_torch(b.dtype)))
                )
        for b, found in zip(others, fd.execute([a, *others]), strict=True):
            wanted = answer(name, a, b)
            assert wanted is not None
            assert found.dtype == wanted.dtype, f"{name} of {a.dtype} {ndim}-d and {b.dtype} {b.ndim}-d"
            assert_beside(found, wanted)


def answer(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    try:
        return REFERENCES[name].call(a, b)
    except RuntimeError:
        return None


@pytest.mark.parametrize("number", NUMBERS[:3])
def test_numbers_give_torchs_type_and_value(number: Number) -> None:
    data = [torch.tensor([2, 1, 3]).to(t) for t in COMMON]
    with FusionDefinition() as fd:
        for x in data:
            tv = fd.define_tensor([-1], dtype=DataType.from_torch(x.dtype))
            fd.add_output(fd.ops.add(tv, number))
            fd.add_output(fd.ops.mul(number, tv))
            fd.add_output(fd.ops.div(tv, number))
            fd.add_output(fd.ops.where(True, tv, number))
    wanted = [
        y
        for x in data
        for y in (
            x + number,
            number * x,
            x / number,
            torch.where(torch.tensor(True), x, torch.tensor(number).to(torch.result_type(x, number))),
        )
    ]
    for found, want in zip(fd.execute(data), wanted, strict=True):
        assert found.dtype == want.dtype
        assert_beside(found, want)


def test_narrow_floats_are_computed_in_float32() -> None:
    for t in (DataType.Half, DataType.BFloat16):
        x = TensorView("T", (-1,), t)
        assert types(POINTWISE["exp"], [x]) == (DataType.Float, t)
        assert types(POINTWISE["nextafter"], [x, x]) == (t, t)
        assert types(POINTWISE["gt"], [x, x]) == (DataType.Float, DataType.Bool)
    assert types(POINTWISE["exp"], [TensorView("T", (-1,), DataType.Int)]) == (DataType.Float, DataType.Float)
    assert types(POINTWISE["square"], [TensorView("T", (-1,), DataType.Bool)])[1] is DataType.Int


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_stay_complex(dtype: torch.dtype) -> None:
    """Ops that make floats of integers, and reductions that make them wider, leave complex numbers what they are."""
    x = torch.randn(6, 2, dtype=dtype)
    expected = [x.exp(), x.sqrt(), x.reciprocal(), x / (x + 2), x.sum(0), x.mean(0), x.prod(0), x.cumsum(0), x.square()]
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        for y in (
            fd.ops.exp(t), fd.ops.sqrt(t), fd.ops.reciprocal(t), fd.ops.div(t, fd.ops.add(t, 2)), fd.ops.sum(t, [0]),
            fd.ops.mean(t, [0]), fd.ops.prod(t, [0]), fd.ops.cumsum(t, 0), fd.ops.square(t),
        ):  # fmt: skip
            fd.add_output(y)
    for found, want in zip(fd.execute([x]), expected, strict=True):
        assert found.dtype == want.dtype == dtype
        assert_beside(found, want)
