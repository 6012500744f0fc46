"""Pairs of reductions that are one statistic: the second sums what lies apart from the result of the first.

m = max(x); s = sum(exp(x - m))                         the (max, sum) of a softmax
t = sum(x); q = sum(square(x - t / count))              the (sum, M2) of a variance

With s may go the sum that an entropy is made of, e = exp(x - m):
w = sum(where(e == 0, 0, e * (x - m)))                  0 for a class of no weight, whose distance may be infinite

A rank's part of a softmax has a guard, for rows of which it has nothing but -inf, or no element:
m = max(x); s = sum(exp(x - where(m == -inf, 0, m)))    0 instead of NaN for such a row
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, prod

from ..ir.digits import extent
from ..ir.expr import BoundTensor, Expr, Value
from ..ir.op import Broadcast, Expand, Pointwise, Squeeze, is_pointwise, is_reduction
from ..ir.scalar import Scalar
from .sharding import reduced_axes

SUB = Pointwise("sub")
_WHERE, _EQ, _MUL = Pointwise("where"), Pointwise("eq"), Pointwise("mul")
_SQUARES = (Pointwise("square"), Pointwise("mul"))


def first_of(second: Expr, maker: Mapping[BoundTensor, Expr]) -> Expr | None:
    """The reduction whose result ``second`` sums the squares, or the exponentials, of the distances to."""
    found = _distances(second, maker)
    return None if found is None else _checked(made_by(found[1], maker, found[2]), second, found)


def guarded_first_of(second: Expr, maker: Mapping[BoundTensor, Expr]) -> Expr | None:
    """The maximum that ``second`` sums the exponentials of the distances to; of a row of nothing but -inf it is 0."""
    found = _distances(second, maker)
    guard = None if found is None or found[2] is not None else made_by(found[1], maker)
    if found is None or guard is None or guard.op != _WHERE or len(guard.tensors) != 2 or not _is(guard.inputs[1], 0):
        return None
    condition, largest = guard.tensors
    test = maker.get(condition)
    if test is None or test.op != _EQ or test.tensors != (largest,) or not _is(test.inputs[1], -inf):
        return None
    return _checked(made_by(largest, maker), second, found)


def sums_weighted(third: Expr, second: Expr, maker: Mapping[BoundTensor, Expr]) -> bool:
    """Does ``third`` sum the distances of which ``second`` sums the exponentials, each times its exponential?"""
    if not (is_reduction(third.op, "sum") and is_reduction(second.op, "sum")) or third.op.axes != second.op.axes:
        return False
    (weight,), chosen = second.tensors, maker.get(third.tensors[0])
    made = maker.get(weight)
    if (
        made is None
        or not is_pointwise(made.op, "exp")
        or chosen is None
        or chosen.op != _WHERE
        or len(chosen.tensors) != 2
    ):
        return False
    test, product = (maker.get(t) for t in chosen.tensors)
    is_none = test is not None and test.op == _EQ and test.tensors == (weight,) and _is(test.inputs[1], 0)
    factors = (weight, made.tensors[0])
    is_product = product is not None and product.op == _MUL and product.inputs in (factors, factors[::-1])
    return is_none and is_product and _is(chosen.inputs[1], 0) and third.output.dtype is second.output.dtype


_Distances = tuple[BoundTensor, BoundTensor, int | None]
"""x, the centre, and what the centre is divided by: nothing where exponentials of the distances are summed."""


def _distances(second: Expr, maker: Mapping[BoundTensor, Expr]) -> _Distances | None:
    if not is_reduction(second.op, "sum"):
        return None
    terms = maker.get(second.tensors[0])
    if (
        terms is None
        or not (terms.op in _SQUARES or is_pointwise(terms.op, "exp"))
        or len(dict.fromkeys(terms.inputs)) != 1
    ):
        return None
    apart = maker.get(terms.tensors[0])
    if apart is None or apart.op != SUB or len(apart.tensors) != 2:
        return None
    x, centre = apart.tensors
    return x, centre, None if is_pointwise(terms.op, "exp") else prod(extent(axis) for axis in reduced_axes(second))


def _checked(first: Expr | None, second: Expr, found: _Distances) -> Expr | None:
    """``first`` where it reduces the same elements along the same axes, by what the distances ask for."""
    wanted = "max" if found[2] is None else "sum"
    if first is None or not is_reduction(first.op, wanted) or first.tensors != (found[0],):
        return None
    return first if is_reduction(second.op, "sum") and first.op.axes == second.op.axes else None


def _is(value: Value, number: float) -> bool:
    return isinstance(value, Scalar) and value.is_literal and value.value == number


def made_by(centre: BoundTensor, maker: Mapping[BoundTensor, Expr], count: int | None = None) -> Expr | None:
    """The Expr behind views of its result, and behind one division by ``count`` where there is one."""
    expr = maker.get(centre)
    while expr is not None and (isinstance(expr.op, Broadcast | Expand | Squeeze) or is_pointwise(expr.op, "div")):
        if is_pointwise(expr.op, "div"):
            by = expr.inputs[1]
            if count is None or not isinstance(by, Scalar) or by.value != count:
                return None
            count = None
        expr = maker.get(expr.tensors[0])
    return expr if count is None else None
