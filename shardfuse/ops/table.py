"""The table of pointwise ops: name -> how types come out, torch's function, Triton's text.

Adding an op is one line.  In Triton's text ``{0}``, ``{1}``, ... are operands already converted to the type that the op
computes in; ``None`` means that Triton has no good way and the op is one torch call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch


class Rule(Enum):
    """How an op computes and what it returns, given the promoted type P of its operands."""

    PROMOTE = "computes in P, returns P"
    INTEGER = "Bool becomes Int; computes in P, returns P"
    NARROW = "computes in P, also where that is a narrow float, returns P"
    FLOAT = "integers become float32; computes in that, returns it"
    BOOL = "computes in P, returns Bool"
    LOGICAL = "operands become Bool, returns Bool"
    WHERE = "first operand is Bool; computes in P of the others, returns P"
    COMPLEX = "computes in P, a float, returns the complex type of its width"
    REAL = "computes in P, returns P, and of a complex P its real type"


@dataclass(frozen=True)
class PointwiseOp:
    """``exact``: a result of 16-bit operands is a 16-bit number, so that no rounding is needed."""

    name: str
    arity: int
    rule: Rule
    torch: Callable[..., torch.Tensor]
    triton: str | None
    exact: bool = False


_MAX = "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_MIN = "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_TANH_SMALL = "{0} * (1 + {0} * {0} * (-1 / 3 + {0} * {0} * (2 / 15 + {0} * {0} * (-17 / 315 + {0} * {0} * 62 / 2835))))"
_TANH = f"tl.where(tl.abs({{0}}) < 0.25, {_TANH_SMALL}, 2 * tl.sigmoid(2 * {{0}}) - 1)"


def _erfcinv(x: torch.Tensor) -> torch.Tensor:
    return torch.erfinv(1 - x)


def _logical_right_shift(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Zeros come in from the left, as if ``x`` were unsigned."""
    bits = 8 * x.element_size()
    ones = torch.ones_like(x)
    kept = torch.bitwise_left_shift(ones, (bits - n).clamp(0, bits - 1)) - 1
    shifted = torch.bitwise_right_shift(x, n.clamp(0, bits - 1))
    return torch.where(n <= 0, torch.where(n == 0, x, 0), torch.where(n >= bits, 0, shifted & kept))


def _trunc_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _floor_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.where(weight.abs() < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


def _threshold(x: torch.Tensor, bound: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.where(x <= bound, value, x)


def _addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return x + value * (a * b)


def _imag(x: torch.Tensor) -> torch.Tensor:
    return torch.imag(x) if x.is_complex() else torch.zeros_like(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


_ROWS = (
    # unary
    PointwiseOp("neg", 1, Rule.PROMOTE, torch.neg, "-{0}", exact=True),
    PointwiseOp("abs", 1, Rule.REAL, torch.abs, "tl.abs({0})", exact=True),
    PointwiseOp("sign", 1, Rule.PROMOTE, torch.sgn, "tl.where({0} > 0, 1, tl.where({0} < 0, -1, {0}))", exact=True),
    PointwiseOp("relu", 1, Rule.PROMOTE, torch.relu, "tl.where({0} < 0, 0, {0})", exact=True),
    PointwiseOp("square", 1, Rule.INTEGER, torch.square, "{0} * {0}"),
    PointwiseOp("exp", 1, Rule.FLOAT, torch.exp, "tl.exp({0})"),
    PointwiseOp("exp2", 1, Rule.FLOAT, torch.exp2, "tl.exp2({0})"),
    PointwiseOp("expm1", 1, Rule.FLOAT, torch.expm1, None),
    PointwiseOp("log", 1, Rule.FLOAT, torch.log, "tl.log({0})"),
    PointwiseOp("log2", 1, Rule.FLOAT, torch.log2, "tl.log2({0})"),
    PointwiseOp("log10", 1, Rule.FLOAT, torch.log10, "tl.log2({0}) * 0.3010299956639812"),
    PointwiseOp("log1p", 1, Rule.FLOAT, torch.log1p, None),
    PointwiseOp("sqrt", 1, Rule.FLOAT, torch.sqrt, "tl.sqrt({0})"),
    PointwiseOp("rsqrt", 1, Rule.FLOAT, torch.rsqrt, "tl.rsqrt({0})"),
    PointwiseOp("sin", 1, Rule.FLOAT, torch.sin, "tl.sin({0})"),
    PointwiseOp("cos", 1, Rule.FLOAT, torch.cos, "tl.cos({0})"),
    PointwiseOp("tan", 1, Rule.FLOAT, torch.tan, "tl.sin({0}) / tl.cos({0})"),
    PointwiseOp("sinh", 1, Rule.FLOAT, torch.sinh, None),
    PointwiseOp("cosh", 1, Rule.FLOAT, torch.cosh, "0.5 * tl.exp(tl.abs({0})) + 0.5 * tl.exp(-tl.abs({0}))"),
    PointwiseOp("tanh", 1, Rule.FLOAT, torch.tanh, _TANH),
    PointwiseOp("asin", 1, Rule.FLOAT, torch.asin, None),
    PointwiseOp("acos", 1, Rule.FLOAT, torch.acos, None),
    PointwiseOp("atan", 1, Rule.FLOAT, torch.atan, None),
    PointwiseOp("asinh", 1, Rule.FLOAT, torch.asinh, None),
    PointwiseOp("acosh", 1, Rule.FLOAT, torch.acosh, None),
    PointwiseOp("atanh", 1, Rule.FLOAT, torch.atanh, None),
    PointwiseOp("erf", 1, Rule.FLOAT, torch.erf, "tl.erf({0})"),
    PointwiseOp("erfc", 1, Rule.FLOAT, torch.erfc, None),
    PointwiseOp("erfinv", 1, Rule.FLOAT, torch.erfinv, None),
    PointwiseOp("erfcinv", 1, Rule.FLOAT, _erfcinv, None),
    PointwiseOp("lgamma", 1, Rule.FLOAT, torch.lgamma, None),
    PointwiseOp("digamma", 1, Rule.FLOAT, torch.digamma, None),
    PointwiseOp("sigmoid", 1, Rule.FLOAT, torch.sigmoid, "tl.sigmoid({0})"),
    PointwiseOp("silu", 1, Rule.FLOAT, torch.nn.functional.silu, "{0} * tl.sigmoid({0})"),
    PointwiseOp("gelu", 1, Rule.FLOAT, torch.nn.functional.gelu, "0.5 * {0} * (1 + tl.erf({0} * 0.7071067811865476))"),
    PointwiseOp("gelu_tanh", 1, Rule.FLOAT, _gelu_tanh, "{0} * tl.sigmoid(1.5957691216057308 * {0} * (1 + 0.044715 * {0} * {0}))"),
    PointwiseOp("softplus", 1, Rule.FLOAT, torch.nn.functional.softplus, None),
    PointwiseOp("reciprocal", 1, Rule.FLOAT, torch.reciprocal, "1 / {0}"),
    PointwiseOp("floor", 1, Rule.PROMOTE, torch.floor, "tl.floor({0})", exact=True),
    PointwiseOp("ceil", 1, Rule.PROMOTE, torch.ceil, "tl.ceil({0})", exact=True),
    PointwiseOp("trunc", 1, Rule.PROMOTE, torch.trunc, None, exact=True),
    PointwiseOp("round", 1, Rule.PROMOTE, torch.round, None, exact=True),
    PointwiseOp("frac", 1, Rule.PROMOTE, torch.frac, None, exact=True),
    PointwiseOp("real", 1, Rule.REAL, torch.real, "{0}", exact=True),
    PointwiseOp("imag", 1, Rule.REAL, _imag, "{0} * 0", exact=True),
    PointwiseOp("conj", 1, Rule.PROMOTE, torch.conj_physical, "{0}", exact=True),
    PointwiseOp("isnan", 1, Rule.BOOL, torch.isnan, "{0} != {0}"),
    PointwiseOp("isinf", 1, Rule.BOOL, torch.isinf, None),
    PointwiseOp("isfinite", 1, Rule.BOOL, torch.isfinite, None),
    PointwiseOp("isposinf", 1, Rule.BOOL, torch.isposinf, None),
    PointwiseOp("isneginf", 1, Rule.BOOL, torch.isneginf, None),
    PointwiseOp("isreal", 1, Rule.BOOL, torch.isreal, None),
    PointwiseOp("signbit", 1, Rule.BOOL, torch.signbit, None),
    PointwiseOp("logical_not", 1, Rule.LOGICAL, torch.logical_not, "{0} == 0"),
    PointwiseOp("bitwise_not", 1, Rule.PROMOTE, torch.bitwise_not, "~{0}", exact=True),
    # binary
    PointwiseOp("add", 2, Rule.PROMOTE, torch.add, "{0} + {1}"),
    PointwiseOp("sub", 2, Rule.PROMOTE, torch.sub, "{0} - {1}"),
    PointwiseOp("mul", 2, Rule.PROMOTE, torch.mul, "{0} * {1}"),
    PointwiseOp("div", 2, Rule.FLOAT, torch.true_divide, "{0} / {1}"),
    PointwiseOp("trunc_div", 2, Rule.PROMOTE, _trunc_div, None, exact=True),
    PointwiseOp("floor_div", 2, Rule.PROMOTE, _floor_div, None, exact=True),
    PointwiseOp("mod", 2, Rule.PROMOTE, torch.fmod, None, exact=True),
    PointwiseOp("fmod", 2, Rule.PROMOTE, torch.fmod, None, exact=True),
    PointwiseOp("remainder", 2, Rule.PROMOTE, torch.remainder, None),
    PointwiseOp("pow", 2, Rule.PROMOTE, torch.pow, None),
    PointwiseOp("atan2", 2, Rule.FLOAT, torch.atan2, None),
    PointwiseOp("hypot", 2, Rule.FLOAT, torch.hypot, None),
    PointwiseOp("copysign", 2, Rule.FLOAT, torch.copysign, None, exact=True),
    PointwiseOp("nextafter", 2, Rule.NARROW, torch.nextafter, None, exact=True),
    PointwiseOp("gcd", 2, Rule.PROMOTE, torch.gcd, None),
    PointwiseOp("maximum", 2, Rule.PROMOTE, torch.maximum, _MAX, exact=True),
    PointwiseOp("minimum", 2, Rule.PROMOTE, torch.minimum, _MIN, exact=True),
    PointwiseOp("eq", 2, Rule.BOOL, torch.eq, "{0} == {1}"),
    PointwiseOp("ne", 2, Rule.BOOL, torch.ne, "{0} != {1}"),
    PointwiseOp("lt", 2, Rule.BOOL, torch.lt, "{0} < {1}"),
    PointwiseOp("le", 2, Rule.BOOL, torch.le, "{0} <= {1}"),
    PointwiseOp("gt", 2, Rule.BOOL, torch.gt, "{0} > {1}"),
    PointwiseOp("ge", 2, Rule.BOOL, torch.ge, "{0} >= {1}"),
    PointwiseOp("logical_and", 2, Rule.LOGICAL, torch.logical_and, "{0} & {1}"),
    PointwiseOp("logical_or", 2, Rule.LOGICAL, torch.logical_or, "{0} | {1}"),
    PointwiseOp("logical_xor", 2, Rule.LOGICAL, torch.logical_xor, "{0} ^ {1}"),
    PointwiseOp("bitwise_and", 2, Rule.PROMOTE, torch.bitwise_and, "{0} & {1}", exact=True),
    PointwiseOp("bitwise_or", 2, Rule.PROMOTE, torch.bitwise_or, "{0} | {1}", exact=True),
    PointwiseOp("bitwise_xor", 2, Rule.PROMOTE, torch.bitwise_xor, "{0} ^ {1}", exact=True),
    PointwiseOp("bitwise_left_shift", 2, Rule.PROMOTE, torch.bitwise_left_shift, None),
    PointwiseOp("bitwise_right_shift", 2, Rule.PROMOTE, torch.bitwise_right_shift, None),
    PointwiseOp("logical_right_shift", 2, Rule.PROMOTE, _logical_right_shift, None),
    PointwiseOp("complex", 2, Rule.COMPLEX, torch.complex, None),
    # ternary and more
    PointwiseOp("where", 3, Rule.WHERE, torch.where, "tl.where({0}, {1}, {2})", exact=True),
    PointwiseOp("lerp", 3, Rule.PROMOTE, _lerp, None),
    PointwiseOp("threshold", 3, Rule.PROMOTE, _threshold, "tl.where({0} <= {1}, {2}, {0})", exact=True),
    PointwiseOp("addcmul", 4, Rule.PROMOTE, _addcmul, "{0} + {3} * ({1} * {2})"),
)

POINTWISE: dict[str, PointwiseOp] = {op.name: op for op in _ROWS}
