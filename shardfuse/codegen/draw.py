"""Random numbers as Triton text: the words of ``ops.random``, hence the same numbers.

A uniform number is bit for bit torch's.  A normal one is as near to it as logarithms and cosines are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from ..ir.dtype import DataType
from ..ir.expr import Expr
from ..ir.op import RandomKind
from ..ir.scalar import Scalar
from ..ops.random import BITS, below
from . import narrow
from .arithmetic import literal

Steps = list[tuple[str, str]]
"""Names and texts, the last of them the value."""


def draw(expr: Expr, kind: RandomKind, name: str, index: str, numbers: Sequence[str], *, interpret: bool) -> Steps:
    """``index``: of the unsharded tensor, 64-bit.  ``numbers``: texts of the op's four operands."""
    dtype = expr.output.dtype
    first, second, seed, offset = numbers

    def rounded(text: str) -> str:
        return narrow.rounded(text, dtype, interpret=interpret) if dtype.is_low_precision else text

    call = f"{function_of(kind, dtype)}({seed}, {offset}, {index}"
    if kind == "normal":
        return [(name, rounded(f"{first} + {second} * {call})"))]
    call += ")" if dtype is DataType.Double else f", {BITS[dtype.torch]})"
    low, high = (float(cast(float, cast(Scalar, v).value)) for v in expr.inputs[:2])
    if (low, high) == (0.0, 1.0):
        return [(name, call)]
    # the product is rounded before the sum, as torch has it: no contraction
    text = f"{literal(low, dtype.compute)} + libdevice.mul_rn({name}_unit, {literal(high - low, dtype.compute)})"
    if high <= low:
        return [(f"{name}_unit", call), (name, rounded(text))]
    end = torch.tensor(high, dtype=dtype.torch, device="cpu")
    ends = [literal(t.double().item(), dtype.compute) for t in (end, below(end, low))]
    last = f"tl.where({name}_wide >= {ends[0]}, {ends[1]}, {name}_wide)"
    return [(f"{name}_unit", call), (f"{name}_wide", rounded(text)), (name, last)]


def function_of(kind: RandomKind, dtype: DataType) -> str:
    """The function that draws a number of ``kind``."""
    return f"{kind}_double" if dtype is DataType.Double else kind
