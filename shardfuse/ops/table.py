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
    FLOAT = "integers become float32; computes in that, returns it"
    BOOL = "computes in P, returns Bool"
    LOGICAL = "operands become Bool, returns Bool"
    WHERE = "first operand is Bool; computes in P of the others, returns P"


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

_ROWS = (
    # unary
    PointwiseOp("neg", 1, Rule.PROMOTE, torch.neg, "-{0}", exact=True),
    PointwiseOp("abs", 1, Rule.PROMOTE, torch.abs, "tl.abs({0})", exact=True),
    PointwiseOp("relu", 1, Rule.PROMOTE, torch.relu, "tl.where({0} < 0, 0, {0})", exact=True),
    PointwiseOp("exp", 1, Rule.FLOAT, torch.exp, "tl.exp({0})"),
    PointwiseOp("exp2", 1, Rule.FLOAT, torch.exp2, "tl.exp2({0})"),
    PointwiseOp("log", 1, Rule.FLOAT, torch.log, "tl.log({0})"),
    PointwiseOp("log2", 1, Rule.FLOAT, torch.log2, "tl.log2({0})"),
    PointwiseOp("sqrt", 1, Rule.FLOAT, torch.sqrt, "tl.sqrt({0})"),
    PointwiseOp("rsqrt", 1, Rule.FLOAT, torch.rsqrt, "tl.rsqrt({0})"),
    PointwiseOp("sin", 1, Rule.FLOAT, torch.sin, "tl.sin({0})"),
    PointwiseOp("cos", 1, Rule.FLOAT, torch.cos, "tl.cos({0})"),
    PointwiseOp("tanh", 1, Rule.FLOAT, torch.tanh, _TANH),
    PointwiseOp("erf", 1, Rule.FLOAT, torch.erf, "tl.erf({0})"),
    PointwiseOp("sigmoid", 1, Rule.FLOAT, torch.sigmoid, "tl.sigmoid({0})"),
    PointwiseOp("silu", 1, Rule.FLOAT, torch.nn.functional.silu, "{0} * tl.sigmoid({0})"),
    PointwiseOp("gelu", 1, Rule.FLOAT, torch.nn.functional.gelu, "0.5 * {0} * (1 + tl.erf({0} * 0.7071067811865476))"),
    PointwiseOp("reciprocal", 1, Rule.FLOAT, torch.reciprocal, "1 / {0}"),
    PointwiseOp("floor", 1, Rule.PROMOTE, torch.floor, "tl.floor({0})", exact=True),
    PointwiseOp("ceil", 1, Rule.PROMOTE, torch.ceil, "tl.ceil({0})", exact=True),
    PointwiseOp("isnan", 1, Rule.BOOL, torch.isnan, "{0} != {0}"),
    PointwiseOp("logical_not", 1, Rule.LOGICAL, torch.logical_not, "{0} == 0"),
    PointwiseOp("bitwise_not", 1, Rule.PROMOTE, torch.bitwise_not, "~{0}", exact=True),
    # binary
    PointwiseOp("add", 2, Rule.PROMOTE, torch.add, "{0} + {1}"),
    PointwiseOp("sub", 2, Rule.PROMOTE, torch.sub, "{0} - {1}"),
    PointwiseOp("mul", 2, Rule.PROMOTE, torch.mul, "{0} * {1}"),
    PointwiseOp("div", 2, Rule.FLOAT, torch.true_divide, "{0} / {1}"),
    PointwiseOp("pow", 2, Rule.PROMOTE, torch.pow, None),
    PointwiseOp("atan2", 2, Rule.FLOAT, torch.atan2, None),
    PointwiseOp("fmod", 2, Rule.PROMOTE, torch.fmod, None),
    PointwiseOp("remainder", 2, Rule.PROMOTE, torch.remainder, None),
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
    PointwiseOp("bitwise_and", 2, Rule.PROMOTE, torch.bitwise_and, "{0} & {1}", exact=True),
    PointwiseOp("bitwise_or", 2, Rule.PROMOTE, torch.bitwise_or, "{0} | {1}", exact=True),
    PointwiseOp("bitwise_xor", 2, Rule.PROMOTE, torch.bitwise_xor, "{0} ^ {1}", exact=True),
    # ternary
    PointwiseOp("where", 3, Rule.WHERE, torch.where, "tl.where({0}, {1}, {2})", exact=True),
)

POINTWISE: dict[str, PointwiseOp] = {op.name: op for op in _ROWS}
