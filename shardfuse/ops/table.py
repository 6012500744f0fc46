"""The table of pointwise ops: name -> how types come out, torch's function, Triton's text.

Adding an op is one line.  In Triton's text ``{0}``, ``{1}``, ... are operands already converted to the type that the op
computes in; ``None`` means that Triton has no good way and the op is one torch call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import torch

from ..ir.dtype import DataType
from ..ir.expr import Value
from ..ir.scalar import Number, Scalar
from .random import philox_uniform


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
    DRAW = "computes in Int, returns Float"


@dataclass(frozen=True)
class PointwiseOp:
    """``exact``: a result of 16-bit operands is a 16-bit number, so that no rounding is needed.

    ``floats_only``: the Triton text is for floats; of integers the op is a torch call.  ``signed_only``: so it is of
    unsigned integers.  ``precise``: the text for float32 results where ``triton`` approximates what torch rounds
    rightly; not taken where the last operand is one number for many elements, which it would cost each of them.
    ``rough``: the text for float32 results, within 1e-6 of them, where no later rounding lets the difference through.
    ``by_number``: the text where the last operand is written down as this number; what torch does then, too.
    ``on_floats``: the text where it computes in floats, where one for integers would lose the sign of a zero.
    """

    name: str
    arity: int
    rule: Rule
    torch: Callable[..., torch.Tensor]
    triton: str | None
    exact: bool = False
    floats_only: bool = False
    signed_only: bool = False
    precise: str | None = None
    rough: str | None = None
    by_number: Mapping[Number, str] = field(default_factory=dict[Number, str])
    on_floats: str | None = None

    def by_its_number(self, operands: Sequence[Value]) -> str | None:
        """The text that the last of ``operands`` calls for, where it is a number written down."""
        last = operands[-1]
        if not isinstance(last, Scalar) or not last.is_literal or last.value is None:
            return None
        return self.by_number.get(last.value)


_POWERS: dict[Number, str] = {2: "{0} * {0}", 3: "{0} * {0} * {0}"}
"""The gradient of GELU by tanh, written with ``pow``, 16384 x 8192 of bfloat16, took 211 us so on an H200, with CUDA's
power 1981."""
_EXP = "power_of_two({0} * 1.4426950408889634)"
_MAX = "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_MIN = "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_SIGN = "tl.where({0} > 0, 1, tl.where({0} < 0, -1, tl.zeros_like({0})))"
_SOFTPLUS = "tl.where({0} > 20, {0}, libdevice.log1p(tl.exp(tl.minimum({0}, 20.0, propagate_nan=tl.PropagateNan.ALL))))"
_LERP = "tl.where(tl.abs({2}) < 0.5, {0} + {2} * ({1} - {0}), {1} - ({1} - {0}) * (1 - {2}))"
_GELU_TANH = "{0} * tl.sigmoid(1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0}))"
_GELU_SLOPE = (
    "libdevice.erfc({0} * -0.7071067811865476) * 0.5 + {0} * (libdevice.exp({0} * {0} * -0.5) * 0.3989422804014327)"
)
_REMAINDER = (
    "tl.where((libdevice.fmod({0}, {1}) != 0) & ((libdevice.fmod({0}, {1}) < 0) != ({1} < 0)), "
    "libdevice.fmod({0}, {1}) + {1}, libdevice.fmod({0}, {1}))"
)


_quantile = cast("Callable[[torch.Tensor], torch.Tensor]", cast(Any, torch.special).ndtri)


def erfcinv(x: torch.Tensor) -> torch.Tensor:
    """The inverse of ``erfc`` by quantiles of the normal distribution: ``erfinv(1 - x)`` loses a small ``x``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float64))  # half of float32's smallest number is 0
    found = 0.0 - _quantile(0.5 * wide) * math.sqrt(0.5)  # of 1 it is +0
    return found.to(x.dtype if x.is_floating_point() else torch.float32)


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


def gelu_slope(x: torch.Tensor) -> torch.Tensor:
    """The derivative of ``gelu``, by ``erfc``, which keeps its digits where x is negative."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    density = torch.exp(wide * wide * -0.5) * (1 / math.sqrt(2 * math.pi))
    found = torch.erfc(wide * -math.sqrt(0.5)) * 0.5 + wide * density
    return found.to(x.dtype if x.is_floating_point() else torch.float32)


_ROWS = (
    # unary
    PointwiseOp("neg", 1, Rule.PROMOTE, torch.neg, "-{0}", exact=True, on_floats="{0} * -1.0"),
    PointwiseOp("abs", 1, Rule.REAL, torch.abs, "tl.abs({0})", exact=True),
    PointwiseOp("sign", 1, Rule.PROMOTE, torch.sgn, _SIGN, exact=True, signed_only=True),
    PointwiseOp("relu", 1, Rule.PROMOTE, torch.relu, "tl.where({0} < 0, 0, {0})", exact=True),
    PointwiseOp("square", 1, Rule.INTEGER, torch.square, "{0} * {0}"),
    PointwiseOp("exp", 1, Rule.FLOAT, torch.exp, "libdevice.exp({0})", rough=_EXP),
    PointwiseOp("exp2", 1, Rule.FLOAT, torch.exp2, "tl.exp2({0})"),
    PointwiseOp("expm1", 1, Rule.FLOAT, torch.expm1, "libdevice.expm1({0})"),
    PointwiseOp("log", 1, Rule.FLOAT, torch.log, "tl.log({0})"),
    PointwiseOp("log2", 1, Rule.FLOAT, torch.log2, "tl.log2({0})"),
    PointwiseOp("log10", 1, Rule.FLOAT, torch.log10, "tl.log2({0}) * 0.3010299956639812"),
    PointwiseOp("log1p", 1, Rule.FLOAT, torch.log1p, "libdevice.log1p({0})"),
    PointwiseOp("sqrt", 1, Rule.FLOAT, torch.sqrt, "tl.sqrt({0})", precise="tl.sqrt_rn({0})"),
    PointwiseOp("rsqrt", 1, Rule.FLOAT, torch.rsqrt, "tl.rsqrt({0})"),
    PointwiseOp("sin", 1, Rule.FLOAT, torch.sin, "tl.sin({0})"),
    PointwiseOp("cos", 1, Rule.FLOAT, torch.cos, "tl.cos({0})"),
    PointwiseOp("tan", 1, Rule.FLOAT, torch.tan, "libdevice.tan({0})"),
    PointwiseOp("sinh", 1, Rule.FLOAT, torch.sinh, "libdevice.sinh({0})"),
    PointwiseOp("cosh", 1, Rule.FLOAT, torch.cosh, "libdevice.cosh({0})"),
    PointwiseOp("tanh", 1, Rule.FLOAT, torch.tanh, "libdevice.tanh({0})"),
    PointwiseOp("asin", 1, Rule.FLOAT, torch.asin, "libdevice.asin({0})"),
    PointwiseOp("acos", 1, Rule.FLOAT, torch.acos, "libdevice.acos({0})"),
    PointwiseOp("atan", 1, Rule.FLOAT, torch.atan, "libdevice.atan({0})"),
    PointwiseOp("asinh", 1, Rule.FLOAT, torch.asinh, "libdevice.asinh({0})"),
    PointwiseOp("acosh", 1, Rule.FLOAT, torch.acosh, "libdevice.acosh({0})"),
    PointwiseOp("atanh", 1, Rule.FLOAT, torch.atanh, "libdevice.atanh({0})"),
    PointwiseOp("erf", 1, Rule.FLOAT, torch.erf, "tl.erf({0})", rough="erf_for_one({0})"),
    PointwiseOp("erfc", 1, Rule.FLOAT, torch.erfc, "libdevice.erfc({0})", rough="rough_erfc({0})"),
    PointwiseOp("erfinv", 1, Rule.FLOAT, torch.erfinv, "libdevice.erfinv({0})"),
    PointwiseOp("erfcinv", 1, Rule.FLOAT, erfcinv, "libdevice.erfcinv({0})"),
    PointwiseOp("lgamma", 1, Rule.FLOAT, torch.lgamma, "libdevice.lgamma({0})"),
    PointwiseOp("digamma", 1, Rule.FLOAT, torch.digamma, None),
    PointwiseOp("sigmoid", 1, Rule.FLOAT, torch.sigmoid, "tl.sigmoid({0})"),
    PointwiseOp("silu", 1, Rule.FLOAT, torch.nn.functional.silu, "{0} * tl.sigmoid({0})"),
    PointwiseOp("gelu", 1, Rule.FLOAT, torch.nn.functional.gelu, "gelu({0})"),
    PointwiseOp("gelu_slope", 1, Rule.FLOAT, gelu_slope, _GELU_SLOPE, rough="rough_gelu_slope({0})"),
    PointwiseOp("gelu_tanh", 1, Rule.FLOAT, _gelu_tanh, _GELU_TANH),
    PointwiseOp("softplus", 1, Rule.FLOAT, torch.nn.functional.softplus, _SOFTPLUS),
    PointwiseOp("reciprocal", 1, Rule.FLOAT, torch.reciprocal, "1 / {0}", precise="tl.div_rn(1.0, {0})"),
    PointwiseOp("floor", 1, Rule.PROMOTE, torch.floor, "tl.floor({0})", exact=True),
    PointwiseOp("ceil", 1, Rule.PROMOTE, torch.ceil, "tl.ceil({0})", exact=True),
    PointwiseOp("trunc", 1, Rule.PROMOTE, torch.trunc, "libdevice.trunc({0})", exact=True, floats_only=True),
    PointwiseOp("round", 1, Rule.PROMOTE, torch.round, "libdevice.nearbyint({0})", exact=True, floats_only=True),
    PointwiseOp("frac", 1, Rule.PROMOTE, torch.frac, "{0} - libdevice.trunc({0})", exact=True, floats_only=True),
    PointwiseOp("real", 1, Rule.REAL, torch.real, "{0}", exact=True),
    PointwiseOp("imag", 1, Rule.REAL, _imag, "tl.zeros_like({0})", exact=True),
    PointwiseOp("conj", 1, Rule.PROMOTE, torch.conj_physical, "{0}", exact=True),
    PointwiseOp("isnan", 1, Rule.BOOL, torch.isnan, "{0} != {0}"),
    PointwiseOp("isinf", 1, Rule.BOOL, torch.isinf, 'tl.abs({0}) == float("inf")', floats_only=True),
    PointwiseOp("isfinite", 1, Rule.BOOL, torch.isfinite, 'tl.abs({0}) < float("inf")', floats_only=True),
    PointwiseOp("isposinf", 1, Rule.BOOL, torch.isposinf, '{0} == float("inf")', floats_only=True),
    PointwiseOp("isneginf", 1, Rule.BOOL, torch.isneginf, '{0} == -float("inf")', floats_only=True),
    PointwiseOp("isreal", 1, Rule.BOOL, torch.isreal, None),
    PointwiseOp("signbit", 1, Rule.BOOL, torch.signbit, None),
    PointwiseOp("logical_not", 1, Rule.LOGICAL, torch.logical_not, "{0} == 0"),
    PointwiseOp("bitwise_not", 1, Rule.PROMOTE, torch.bitwise_not, "~{0}", exact=True, signed_only=True),
    # binary
    PointwiseOp("add", 2, Rule.PROMOTE, torch.add, "{0} + {1}"),
    PointwiseOp("sub", 2, Rule.PROMOTE, torch.sub, "{0} - {1}"),
    PointwiseOp("mul", 2, Rule.PROMOTE, torch.mul, "{0} * {1}"),
    PointwiseOp(
        "div", 2, Rule.FLOAT, torch.true_divide, "{0} / {1}", precise="tl.div_rn({0}, {1})", rough="{0} * (1.0 / {1})"
    ),
    PointwiseOp("trunc_div", 2, Rule.PROMOTE, _trunc_div, None, exact=True),
    PointwiseOp("floor_div", 2, Rule.PROMOTE, _floor_div, None, exact=True),
    PointwiseOp("fmod", 2, Rule.PROMOTE, torch.fmod, "libdevice.fmod({0}, {1})", exact=True, floats_only=True),
    PointwiseOp("remainder", 2, Rule.PROMOTE, torch.remainder, _REMAINDER, floats_only=True),
    PointwiseOp("pow", 2, Rule.PROMOTE, torch.pow, "libdevice.pow({0}, {1})", floats_only=True, by_number=_POWERS),
    PointwiseOp("atan2", 2, Rule.FLOAT, torch.atan2, "libdevice.atan2({0}, {1})"),
    PointwiseOp("hypot", 2, Rule.FLOAT, torch.hypot, "libdevice.hypot({0}, {1})"),
    PointwiseOp("copysign", 2, Rule.FLOAT, torch.copysign, "libdevice.copysign({0}, {1})", exact=True),
    PointwiseOp(
        "nextafter", 2, Rule.NARROW, torch.nextafter, "libdevice.nextafter({0}, {1})", exact=True, floats_only=True
    ),
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
    PointwiseOp("philox_uniform", 2, Rule.DRAW, philox_uniform, "philox_uniform({0}, {1})", exact=True),
    PointwiseOp("complex", 2, Rule.COMPLEX, torch.complex, None),
    # ternary and more
    PointwiseOp("where", 3, Rule.WHERE, torch.where, "tl.where({0}, {1}, {2})", exact=True),
    PointwiseOp("lerp", 3, Rule.PROMOTE, _lerp, _LERP, floats_only=True),
    PointwiseOp("threshold", 3, Rule.PROMOTE, _threshold, "tl.where({0} <= {1}, {2}, {0})", exact=True),
    PointwiseOp("addcmul", 4, Rule.PROMOTE, _addcmul, "{0} + {3} * ({1} * {2})", floats_only=True),
)

POINTWISE: dict[str, PointwiseOp] = {op.name: op for op in _ROWS}


@functools.cache
def computes(name: str, dtype: DataType) -> bool:
    """Does torch have the op in ``dtype``, integers or complex numbers?  Tried on one element."""
    op = POINTWISE[name]
    ones = [torch.ones((), dtype=dtype.torch, device="cpu") for _ in range(op.arity)]
    if op.rule is Rule.WHERE:
        ones[0] = ones[0].bool()
    try:
        op.torch(*ones)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True
