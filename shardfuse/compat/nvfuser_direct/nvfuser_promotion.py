"""nvFuser's types of pointwise ops: torch's classes, but narrow floats become Float and wide numbers are not narrowed.

Tensors with dims, tensors without and numbers are three classes; a class takes the type of the next only where that has
a higher category, and then whole: an Int tensor and a Double number are Double.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfuse.ir.dtype import DataType
from shardfuse.ir.scalar import Scalar
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.builder import Operand

KEPT = ("ceil", "floor", "frac", "relu", "round", "silu", "trunc", "where", "clamp", "threshold", "bitwise_not", "sign")
"""Ops that leave a narrow float narrow."""
FLOAT = (
    *(
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "cos",
        "cosh",
        "exp",
        "exp2",
        "expm1",
        "erf",
        "erfc",
        "erfinv",
    ),
    *(
        "erfcinv",
        "lgamma",
        "log",
        "log10",
        "log1p",
        "log2",
        "reciprocal",
        "rsqrt",
        "sigmoid",
        "sin",
        "sinh",
        "sqrt",
        "tan",
    ),
    *("tanh", "truediv", "atan2", "gelu", "gelu_tanh", "softplus"),
)
"""Ops that compute integers in Float."""


def common_type(name: str, operands: Sequence[Operand]) -> DataType:
    """The type that every operand of ``name`` is converted to."""
    types = [_type_of(v) for v in operands]
    common = types[0] if len(dict.fromkeys(types)) == 1 else _combined(operands)
    if name in FLOAT and common.is_integral:
        common = DataType.Float
    return DataType.Float if common.is_low_precision and name not in KEPT else common


def _combined(operands: Sequence[Operand]) -> DataType:
    classes: list[DataType | None] = [None, None, None]
    for v in operands:
        which = 2 if not isinstance(v, TensorView) else 1 if v.ndim == 0 else 0
        dtype = _type_of(v)
        if which == 2 and dtype.is_low_precision:
            dtype = DataType.Float
        before = classes[which]
        classes[which] = dtype if before is None else _pair(before, dtype)
    result = _raised(classes[0], _raised(classes[1], classes[2]))
    assert result is not None, "an op without operands"
    return result


def _raised(higher: DataType | None, lower: DataType | None) -> DataType | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if lower.is_complex:
        if not higher.is_floating:
            return lower
        return DataType.ComplexDouble if higher is DataType.Double else DataType.ComplexFloat
    if higher.is_floating:
        return higher
    return _pair(higher, lower) if higher is DataType.Bool or lower.is_floating else higher


def _pair(a: DataType, b: DataType) -> DataType:
    return a if a is b else DataType.from_torch(torch.promote_types(a.torch, b.torch))


def _type_of(value: Operand) -> DataType:
    match value:
        case TensorView() | Scalar():
            return value.dtype
        case bool():
            return DataType.Bool
        case int():
            return DataType.Int
        case float():
            return DataType.Double
        case _:
            return DataType.ComplexDouble
