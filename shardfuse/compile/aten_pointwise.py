# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Pointwise ops of aten as ops of shardfuse, which promotes types as torch does."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch.fx import Node

from ..ir.dtype import DataType
from ..ir.tensor_view import TensorView
from ..ops.builder import Operand
from .compile_errors import UntranslatableError
from .translation import Rule, Translation, argument, check_arguments, data_type, literal_number, tensor_of

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims

_UNARY = (
    *("abs", "neg", "relu", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos"),
    *("tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv"),
    *("lgamma", "sigmoid", "silu", "floor", "ceil", "trunc", "round", "frac", "isnan", "isinf"),
    *("isfinite", "isposinf", "isneginf", "logical_not", "bitwise_not", "square", "sign"),
)
_BINARY = (
    *("maximum", "minimum", "fmod", "remainder", "atan2", "hypot", "copysign"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"),
    *("bitwise_and", "bitwise_or", "bitwise_xor"),
)
_EXACT = 2**24
"""Whole numbers below are floats of 32 bits: an exponent is the same as an integer."""
_NOT_OF_BOOL = ("sub", "neg", "abs", "sign", "relu")
"""Arithmetic of truth values that torch refuses, or that is their own."""
COSTLY = (aten.erf.default,)
"""What a kernel of Inductor's is bound by, and not by the bytes that it moves; shardfuse's own is not."""


def pointwise_table() -> dict[object, Rule]:
    table: dict[object, Rule] = {}
    for name in _UNARY:
        table[getattr(aten, name).default] = _plain(name, 1)
    table[aten.reciprocal.default] = _reciprocal
    for name in _BINARY:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            if overload in ("Tensor", "Scalar", "default", "Tensor_Tensor", "Tensor_Scalar"):
                table[getattr(packet, overload)] = _plain(name, 2)
    for overload in ("Tensor", "Scalar"):
        table[getattr(aten.add, overload)] = _scaled("add")
        table[getattr(aten.sub, overload)] = _scaled("sub")
        table[getattr(aten.mul, overload)] = _mul
        table[getattr(aten.rsub, overload)] = _reversed_sub
        table[getattr(aten.div, overload)] = _div
        table[getattr(aten.masked_fill, overload)] = _masked_fill
    for overload in ("Tensor_Scalar", "Tensor_Tensor", "Scalar"):
        table[getattr(aten.pow, overload)] = _pow
    for overload in ("self", "ScalarOther", "ScalarSelf", "Scalar"):
        table[getattr(aten.where, overload)] = _where
    for bound in (aten.clamp.default, aten.clamp.Tensor):
        table[bound] = _clamp
    table[aten.clamp_min.default] = table[aten.clamp_min.Tensor] = _clamp_min
    table[aten.clamp_max.default] = table[aten.clamp_max.Tensor] = _clamp_max
    table[aten.div.Tensor_mode] = table[aten.div.Scalar_mode] = _divided
    table[aten.gelu.default] = _gelu
    table[aten.lerp.Scalar] = table[aten.lerp.Tensor] = _plain("lerp", 3)
    table[aten.addcmul.default] = _addcmul
    table[aten.addcdiv.default] = _addcdiv
    table[aten.threshold.default] = _plain("threshold", 3)
    table[prims.convert_element_type.default] = _converted
    table[aten._to_copy.default] = _copied
    for copy in (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default):
        table[copy] = _same  # the layout of a copy is that of the region's output
    table[aten.sigmoid_backward.default] = _sigmoid_backward
    table[aten.tanh_backward.default] = _tanh_backward
    fma = getattr(prims, "fma", None)  # not in every torch
    if fma is not None:
        table[fma.default] = _fma
    return table


def _plain(name: str, count: int) -> Rule:
    """The op of the same name, of ``count`` operands."""

    def rule(t: Translation, node: Node) -> TensorView:
        check_arguments(node, count)
        operands = [t.operand(a) for a in node.args]
        if name in _NOT_OF_BOOL:
            _no_bool(node)
        return getattr(t.ops, name)(*operands)

    return rule


def _no_bool(node: Node) -> None:
    if tensor_of(node).dtype == torch.bool:
        raise UntranslatableError(f"the result of {node.target}", DataType.Bool, "a number")


def _scaled(name: str) -> Rule:
    """Of a sum or a difference the second operand times ``alpha``, in the type that both are promoted to."""

    def rule(t: Translation, node: Node) -> TensorView:
        check_arguments(node, 3, "alpha")
        a, b = (t.operand(v) for v in node.args[:2])
        alpha = argument(node, 2, "alpha", 1)
        if name == "add" and alpha == 1 and tensor_of(node).dtype == torch.bool:
            return t.ops.logical_or(a, b)
        _no_bool(node)
        if alpha == 1:
            return getattr(t.ops, name)(a, b)
        a, b = _computed_in_type_of(t, node, a, b)
        return _rounded(t, node, getattr(t.ops, name)(a, t.ops.mul(b, t.operand(alpha))))

    return rule


def _computed_in_type_of(t: Translation, node: Node, *operands: Operand) -> list[Operand]:
    """``operands`` in the type in which torch computes the result of ``node``: before the op, not behind a part of
    it, which a narrower type might not hold."""
    dtype = data_type(tensor_of(node).dtype).compute
    return [t.ops.cast(v, dtype) if isinstance(v, TensorView) else v for v in operands]


def _rounded(t: Translation, node: Node, value: TensorView) -> TensorView:
    return t.ops.cast(value, data_type(tensor_of(node).dtype))


def _mul(t: Translation, node: Node) -> TensorView:
    """Of truth values: both of them.  What torch makes of GELU is that op again, whose kernel computes less."""
    check_arguments(node, 2)
    x = _source_of_gelu(t, node)
    if x is not None and isinstance(t.values.get(x), TensorView):
        return t.ops.gelu(t.tensor(x))
    a, b = (t.operand(v) for v in node.args)
    return t.ops.logical_and(a, b) if tensor_of(node).dtype == torch.bool else t.ops.mul(a, b)


def _source_of_gelu(t: Translation, node: Node) -> Node | None:
    """``x`` of ``(x * 0.5) * (erf(x * sqrt(0.5)) + 1)`` in float32; None where the product is another one."""
    if tensor_of(node).dtype != torch.float32:
        return None
    for half, share in (node.args, node.args[::-1]):
        erf = _operand_beside(share, aten.add.Tensor, 1)
        x = _operand_beside(half, aten.mul.Tensor, 0.5)
        if x is None or erf is None or erf.target is not aten.erf.default:
            continue
        is_gelu = _operand_beside(erf.args[0], aten.mul.Tensor, math.sqrt(0.5)) is x
        chain = (cast(Node, n) for n in (half, share, erf, erf.args[0]))
        if is_gelu and tensor_of(x).dtype == torch.float32 and t.is_made(*chain):
            return x
    return None


def _div(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 2)
    return _quotient(t, *node.args)


def _quotient(t: Translation, a: object, b: object) -> TensorView:
    """SiLU, as torch has made it, is a product with a sigmoid."""
    x = _source_of_sigmoid(t, b)
    return t.ops.truediv(t.operand(a), t.operand(b)) if x is None else t.ops.mul(t.operand(a), t.ops.sigmoid(x))


def _reciprocal(t: Translation, node: Node) -> TensorView:
    """Of an exponential and 1 it is a sigmoid, as torch has made it in the gradient of SiLU."""
    check_arguments(node, 1)
    x = _source_of_sigmoid(t, node.args[0])
    return t.ops.reciprocal(t.operand(node.args[0])) if x is None else t.ops.sigmoid(x)


def _source_of_sigmoid(t: Translation, divisor: object) -> TensorView | None:
    """The float32 ``x`` of ``1 + exp(-x)``; None of anything else.

    A sigmoid takes 5 instructions.  An exponential and a quotient that are right in the last place take several
    times as many and a call, for which registers are spilled: a batch norm and SiLU in channels-last, 64 x 96 x 112 x
    112, took 458 us so, its gradient 574.
    """
    exponential = _operand_beside(divisor, aten.add.Tensor, 1)
    negative = _operand_of(exponential, aten.exp.default)
    x = _operand_of(negative, aten.neg.default)
    if exponential is None or negative is None or not t.is_made(cast(Node, divisor), exponential, negative):
        return None
    found = t.values.get(x) if x is not None else None
    return found if isinstance(found, TensorView) and found.dtype is DataType.Float else None


def _operand_of(value: Node | None, op: object) -> Node | None:
    """What ``op`` of one operand is taken of; None where the value is something else."""
    x = value.args[0] if value is not None and value.target is op else None
    return x if isinstance(x, Node) else None


def _operand_beside(value: object, op: object, number: float) -> Node | None:
    """The tensor of ``op(tensor, number)``; None where the value is something else."""
    if not isinstance(value, Node) or value.target is not op or value.kwargs or len(value.args) != 2:
        return None
    x, other = value.args
    is_number = isinstance(other, int | float) and math.isclose(other, number, rel_tol=1e-12)
    return x if isinstance(x, Node) and is_number else None


def _reversed_sub(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 2)
    a, b = (t.operand(v) for v in node.args[:2])
    return t.ops.sub(b, a)


def _pow(t: Translation, node: Node) -> TensorView:
    """Roots, squares and cubes are what torch makes of such exponents, too."""
    check_arguments(node, 2)
    base, exponent = (t.operand(v) for v in node.args)
    if isinstance(base, TensorView) and base.dtype.is_floating and isinstance(exponent, int | float):
        if exponent == 1:
            return base
        if exponent in (0.5, -0.5):
            return t.ops.sqrt(base) if exponent > 0 else t.ops.rsqrt(base)
        if exponent in (2, 3):
            square = t.ops.mul(base, base)
            return square if exponent == 2 else t.ops.mul(square, base)
        if abs(exponent) < _EXACT and exponent == int(exponent):
            exponent = int(exponent)
    return t.ops.pow(base, exponent)


def _where(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 3)
    condition, a, b = node.args
    if t.tensor(condition).dtype is not DataType.Bool:
        raise UntranslatableError("the condition of where", t.tensor(condition).dtype, "Bool")
    return t.ops.where(t.tensor(condition), t.operand(a), t.operand(b))


def _masked_fill(t: Translation, node: Node) -> TensorView:
    """In the type of what is filled, whatever the filling's."""
    check_arguments(node, 3)
    x, mask, value = node.args
    filled, number = t.tensor(x), t.operand(value)
    if isinstance(number, TensorView):
        number = t.ops.cast(number, filled.dtype)
    return t.ops.where(t.tensor(mask), number, filled)


def _clamp(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 3, "min", "max")
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    return _between(t, node, low, high)


def _clamp_min(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 2)
    return _between(t, node, node.args[1], None)


def _clamp_max(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 2)
    return _between(t, node, None, node.args[1])


def _between(t: Translation, node: Node, low: object, high: object) -> TensorView:
    """Bounds that are NaN give NaN, as torch has it."""
    bounds = [None if v is None else t.operand(v) for v in (low, high)]
    return t.ops.clamp(t.tensor(node.args[0]), *bounds)


def _divided(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 2, "rounding_mode")
    mode = node.kwargs.get("rounding_mode")
    if mode is None:
        return _quotient(t, *node.args[:2])
    raise UntranslatableError("rounding_mode", mode, "None: rounded quotients are torch calls")


def _gelu(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 1, "approximate")
    x = t.tensor(node.args[0])
    return t.ops.gelu_tanh(x) if node.kwargs.get("approximate", "none") == "tanh" else t.ops.gelu(x)


def _addcmul(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 3, "value")
    x, a, b = (t.operand(v) for v in node.args)
    return t.ops.addcmul(x, a, b, t.operand(node.kwargs.get("value", 1)))


def _addcdiv(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 3, "value")
    x, a, b = _computed_in_type_of(t, node, *(t.operand(v) for v in node.args))
    value = literal_number(node.kwargs.get("value", 1))
    quotient = t.ops.div(a, b)
    return _rounded(t, node, t.ops.add(x, quotient if value == 1 else t.ops.mul(quotient, value)))


def _fma(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 3)
    a, b, c = (t.operand(v) for v in node.args)
    return t.ops.add(t.ops.mul(a, b), c)


def _converted(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 2)
    return t.ops.cast(t.tensor(node.args[0]), data_type(node.args[1]))


def _copied(t: Translation, node: Node) -> TensorView:
    """A copy in another dtype, on the same device."""
    check_arguments(node, 1, "dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format")
    x = cast(Node, node.args[0])
    if tensor_of(x).device != tensor_of(node).device:
        raise UntranslatableError(str(node.target), "a copy between devices", "one device")
    return t.ops.cast(t.tensor(x), data_type(tensor_of(node).dtype))


def _same(t: Translation, node: Node) -> TensorView:
    return t.tensor(node.args[0])


def _sigmoid_backward(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 2)
    grad, y = (t.tensor(v) for v in node.args)
    return t.ops.mul(grad, t.ops.mul(t.ops.sub(1, y), y))


def _tanh_backward(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 2)
    grad, y = (t.tensor(v) for v in node.args)
    return t.ops.mul(grad, t.ops.sub(1, t.ops.mul(y, y)))
