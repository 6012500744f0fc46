"""Pairs of reductions that are one statistic: the second sums what lies apart from the result of the first.

m = max(x); s = sum(exp(x - m))                         the (max, sum) of a softmax
t = sum(x); q = sum(square(x - t / count))              the (sum, M2) of a variance
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..ir.digits import extent
from ..ir.expr import BoundTensor, Expr, Scalar
from .sharding import reduced_axes


def first_of(second: Expr, maker: Mapping[BoundTensor, Expr]) -> Expr | None:
    """The reduction whose result ``second`` sums the squares, or the exponentials, of the distances to."""
    terms = maker.get(second.tensors[0]) if second.op == "sum" else None
    if terms is None or terms.op not in ("square", "mul", "exp") or len(dict.fromkeys(terms.inputs)) != 1:
        return None
    apart = maker.get(terms.tensors[0])
    if apart is None or apart.op != "sub" or len(apart.tensors) != 2:
        return None
    x, centre = apart.tensors
    axes = second.attributes["axes"]
    count = None if terms.op == "exp" else prod(extent(axis) for axis in reduced_axes(second))
    first = made_by(centre, maker, count)
    wanted = "max" if terms.op == "exp" else "sum"
    if first is None or first.op != wanted or first.tensors != (x,) or first.attributes["axes"] != axes:
        return None
    return first


def made_by(centre: BoundTensor, maker: Mapping[BoundTensor, Expr], count: int | None = None) -> Expr | None:
    """The Expr behind views of its result, and behind one division by ``count`` where there is one."""
    expr = maker.get(centre)
    while expr is not None and (expr.op in ("broadcast", "expand", "squeeze") or expr.op == "div"):
        if expr.op == "div":
            by = expr.inputs[1]
            if count is None or not isinstance(by, Scalar) or by.value != count:
                return None
            count = None
        expr = maker.get(expr.tensors[0])
    return expr if count is None else None
