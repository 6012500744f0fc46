"""Pairs of reductions that are one statistic: the second sums what lies apart from the result of the first.

m = max(x); s = sum(exp(x - m))                         the (max, sum) of a softmax
t = sum(x); q = sum(square(x - t / count))              the (sum, M2) of a variance
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..ir.digits import extent
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Broadcast, Expand, Pointwise, Squeeze, is_reduction
from ..ir.scalar import Scalar
from .sharding import reduced_axes

_EXP, SUB, _DIV = Pointwise("exp"), Pointwise("sub"), Pointwise("div")
_SQUARES = (Pointwise("square"), Pointwise("mul"))


def first_of(second: Expr, maker: Mapping[BoundTensor, Expr]) -> Expr | None:
    """The reduction whose result ``second`` sums the squares, or the exponentials, of the distances to."""
    if not is_reduction(second.op, "sum"):
        return None
    terms = maker.get(second.tensors[0])
    if terms is None or terms.op not in (*_SQUARES, _EXP) or len(dict.fromkeys(terms.inputs)) != 1:
        return None
    apart = maker.get(terms.tensors[0])
    if apart is None or apart.op != SUB or len(apart.tensors) != 2:
        return None
    x, centre = apart.tensors
    count = None if terms.op == _EXP else prod(extent(axis) for axis in reduced_axes(second))
    first = made_by(centre, maker, count)
    wanted = "max" if terms.op == _EXP else "sum"
    if first is None or not is_reduction(first.op, wanted) or first.tensors != (x,):
        return None
    return first if first.op.axes == second.op.axes else None


def made_by(centre: BoundTensor, maker: Mapping[BoundTensor, Expr], count: int | None = None) -> Expr | None:
    """The Expr behind views of its result, and behind one division by ``count`` where there is one."""
    expr = maker.get(centre)
    while expr is not None and (isinstance(expr.op, Broadcast | Expand | Squeeze) or expr.op == _DIV):
        if expr.op == _DIV:
            by = expr.inputs[1]
            if count is None or not isinstance(by, Scalar) or by.value != count:
                return None
            count = None
        expr = maker.get(expr.tensors[0])
    return expr if count is None else None
