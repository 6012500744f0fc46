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
from .source import Text
from .tile import Chunk, Tile

Steps = list[tuple[str, str]]
"""Names and texts, the last of them the value."""


def draw(
    expr: Expr, kind: RandomKind, name: str, index: str, numbers: Sequence[str], *, interpret: bool, run: int = 1,
    shape: str = "",
) -> Steps:  # fmt: skip
    """``index``: of the unsharded tensor, 64-bit.  ``numbers``: texts of the op's four operands.

    ``run``: elements side by side that each index is for, of a block of ``shape``.
    """
    dtype = expr.output.dtype
    first, second, seed, offset = numbers

    def rounded(text: str) -> str:
        return narrow.rounded(text, dtype, interpret=interpret) if dtype.is_low_precision else text

    call = f"{function_of(kind, dtype, run)}({seed}, {offset}, {index}"
    if kind == "normal":
        return [(name, rounded(f"{first} + {second} * {call})"))]
    call += ")" if dtype is DataType.Double else f", {BITS[dtype.torch]}{f', {run}' if run > 1 else ''})"
    call = f"tl.reshape({call}, {shape})" if run > 1 else call
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


def run_of(tile: Tile, expr: Expr, chunk: Chunk) -> int:
    """Elements of a row whose numbers are the words of one or two counters; 1 where each draws by itself.

    As many as a thread loads of the narrowest rows, so that what is drawn lies in threads as what was loaded does.
    """
    kind = expr.op.name
    space, schedule = tile.plan.space, tile.plan.schedule
    if kind != "uniform" or expr.output.dtype is DataType.Double or not (tile.r_lanes and space.is_inner):
        return 1
    if schedule.columns or schedule.is_aligned_down or tile.is_apart or chunk.index != "r":
        return 1
    strides, start = tile.index_strides(expr)
    along = tile.r_runs(strides)
    steps = [strides.get(a, 0) for a in space.x]
    if not along or (along[-1].below, along[-1].stride) != (1, 1) or (tile.x_lanes and not any(steps)):
        return 1
    run, block = (8 if space.width >= 8 else 4), chunk.block
    whole = (start, block, chunk.start or 0, along[-1].extent, *steps, *(g.stride for g in along[:-1]))
    return run if all(n % run == 0 for n in whole) else 1


def beside_a_load(index: str, loaded: Sequence[Text], lanes: tuple[bool, bool]) -> tuple[str, str]:
    """``index`` laid out as the first of ``loaded`` that has its ``lanes``, along x and r, and the function for it."""
    found = (v for v in loaded if v.dtype is DataType.Float and (v.has_x, v.has_r) == lanes and not v.of_blocks)
    beside = next(found, None)
    return (index, "") if beside is None else (f"laid_out_as({index}, {beside.text})", "laid_out_as")


def function_of(kind: RandomKind, dtype: DataType, run: int = 1) -> str:
    """The function that draws a number of ``kind``, or the numbers of ``run`` neighbours."""
    if run > 1:
        return f"{kind}_run"
    return f"{kind}_double" if dtype is DataType.Double else kind
