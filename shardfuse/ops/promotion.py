"""Types of pointwise ops, as torch promotes them.

Source: torch's rule of three classes. Tensors with dims decide; a zero-dim tensor, and after it a Python number, only
raises the category (bool < integer < float < complex), and then to that class's own type or torch's default.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import PromotionError
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.scalar import Scalar
from ..ir.tensor_view import TensorView
from .table import PointwiseOp, Rule

Operand = TensorView | BoundTensor | Scalar

_NUMBER = {DataType.Double: DataType.Float, DataType.ComplexDouble: DataType.ComplexFloat}
"""A host number has its category's default type, whatever its own width."""


_COMPLEX = {
    DataType.Half: DataType.ComplexFloat,
    DataType.BFloat16: DataType.ComplexFloat,
    DataType.Float: DataType.ComplexFloat,
    DataType.Double: DataType.ComplexDouble,
}
"""The complex type of a float's width; of a half float's it is the next wider one."""


def promote(operands: Sequence[Operand]) -> DataType:
    """The common type of ``operands``."""
    classes: list[DataType | None] = [None, None, None]
    for v in operands:
        which = 2 if isinstance(v, Scalar) else 1 if v.ndim == 0 else 0
        dtype = _NUMBER.get(v.dtype, v.dtype) if isinstance(v, Scalar) else v.dtype
        before = classes[which]
        classes[which] = dtype if before is None else _pair(before, dtype)
    result: DataType | None = None
    for dtype in classes:
        if dtype is not None:
            result = dtype if result is None else _combine(result, dtype)
    assert result is not None, "a pointwise op without operands"
    return result


def _combine(higher: DataType, lower: DataType) -> DataType:
    """The type of a class of operands and of one that counts less: torch's ``combine_categories``."""
    if higher.is_complex or (higher.is_floating and not lower.is_complex):
        return higher
    if higher.is_floating:
        if higher not in _COMPLEX:
            raise PromotionError(higher.name, lower.name)
        return _COMPLEX[higher]
    if lower.is_complex:
        return lower
    return _pair(higher, lower) if higher is DataType.Bool or lower.is_floating else higher


def _pair(a: DataType, b: DataType) -> DataType:
    if a is b:
        return a
    try:
        return DataType.from_torch(torch.promote_types(a.torch, b.torch))
    except RuntimeError as error:  # unsigned integers of 16 bits and more, and 8-bit floats, are not promoted
        raise PromotionError(a.name, b.name) from error


def types(op: PointwiseOp, operands: Sequence[Operand]) -> tuple[DataType, DataType]:
    """``(compute, result)``: the type that operands are converted to before ``op``, and the type of its result.

    Narrow floats are computed in float32 (but where the rule says otherwise) and rounded to the result.  A ``where``'s
    first operand stays Bool.
    """
    match op.rule:
        case Rule.LOGICAL:
            return DataType.Bool, DataType.Bool
        case Rule.WHERE:
            result = promote(operands[1:])
        case Rule.FLOAT:
            common = promote(operands)
            result = DataType.Float if common.is_integral else common
        case Rule.BOOL:
            return promote(operands).compute, DataType.Bool
        case Rule.PROMOTE:
            result = promote(operands)
        case Rule.NARROW:
            result = promote(operands)
            return result, result
        case Rule.INTEGER:
            common = promote(operands)
            result = DataType.Int if common is DataType.Bool else common
        case Rule.REAL:
            common = promote(operands)
            return common.compute, real_type(common)
        case Rule.DRAW:
            common = promote(operands)
            return (DataType.Int if common.is_integral else common), DataType.Float
        case Rule.COMPLEX:
            common = promote(operands)
            wide = common if common is DataType.Double else DataType.Float
            return wide, DataType.ComplexDouble if wide is DataType.Double else DataType.ComplexFloat
    return result.compute, result


def why_no_text(op: PointwiseOp, operands: Sequence[Operand]) -> str | None:
    """Why ``op`` of ``operands`` has no Triton text; ``None`` where it has."""
    if op.triton is None:
        return f"{op.name} has no Triton text"
    if any(v.dtype.is_complex for v in operands):  # a number alone may be, beside real tensors
        return f"{op.name} has no Triton text for complex numbers"
    compute = types(op, operands)[0]
    if op.floats_only and compute not in (DataType.Float, DataType.Double):
        return f"{op.name} has no Triton text for {compute.name}"
    if op.signed_only and compute.name.startswith("UInt"):
        return f"{op.name} has no Triton text for unsigned integers"
    if op.rule is Rule.NARROW and compute.is_low_precision:
        return f"{op.name} has no Triton text for narrow floats"
    return None


def real_type(dtype: DataType) -> DataType:
    """Of a complex type the type of its parts; else ``dtype``."""
    return {DataType.ComplexFloat: DataType.Float, DataType.ComplexDouble: DataType.Double}.get(dtype, dtype)
