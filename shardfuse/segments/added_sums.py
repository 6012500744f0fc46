"""Sums that are only added to one another, as one sum of what they add up.

before, as where two norms in a row share a scale (views between a sum and the addition being the same)::

    T2 = sum(T0); T3 = broadcast(T2); T4 = sum(T1); T5 = broadcast(T4); T6 = add(T3, T5)

after::

    T6_summand = add(T0, T1); T6_sum = sum(T6_summand); T6 = broadcast(T6_sum)

A walk holds one row of partial results less in registers, and stores one less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Pointwise, View, is_reduction
from .segment import Segment, leading_to

_ADD = Pointwise("add")
_WIDE = (DataType.Float, DataType.Double)
"""What is rounded no more where it is added up in another order than what a sum is anyway."""
_Chain = tuple[Expr, ...]


@lru_cache(maxsize=64)
def added_sums(segment: Segment) -> Segment:
    """``segment`` with sums that are only added up as one."""
    exprs = list(segment.exprs)
    if sum(is_reduction(e.op, "sum") for e in exprs) < 2:
        return segment
    found = _next(exprs, segment.outputs)
    if found is None:
        return segment
    while found is not None:
        k, left, right = found
        exprs[k : k + 1] = _joined(exprs[k], left, right)
        exprs = leading_to(exprs, segment.outputs)
        found = _next(exprs, segment.outputs)
    return segment.doing(exprs)


def _next(exprs: Sequence[Expr], outputs: Sequence[BoundTensor]) -> tuple[int, _Chain, _Chain] | None:
    """The first addition of two sums that nothing else reads, and what leads from each sum to it."""
    maker = {t: e for e in exprs for t in e.outputs}
    times, stored = Counter(t for e in exprs for t in e.tensors), frozenset(outputs)
    private = {t for t in maker if t not in stored and times[t] == 1}
    for k, expr in enumerate(exprs):
        if expr.op == _ADD and len(expr.tensors) == 2 and expr.output.dtype in _WIDE:
            left, right = (_chain(t, maker, private) for t in expr.tensors)
            if left and right and _are_alike(left, right, expr):
                return k, left, right
    return None


def _chain(tensor: BoundTensor, maker: dict[BoundTensor, Expr], private: set[BoundTensor]) -> _Chain:
    """The sum behind ``tensor`` and the views after it; nothing where there is no such sum, or others read it."""
    found: list[Expr] = []
    while tensor in private:
        expr = maker[tensor]
        found.insert(0, expr)
        if is_reduction(expr.op, "sum"):
            return tuple(found)
        if not isinstance(expr.op, View):
            break
        tensor = expr.tensors[0]
    return ()


def _are_alike(left: _Chain, right: _Chain, addition: Expr) -> bool:
    """Do the two sum the same axes of tensors that can be added, and show the result alike?"""
    a, b = left[0].tensors[0], right[0].tensors[0]
    if not a.dtype is b.dtype is addition.output.dtype or a.domain.logical != b.domain.logical:
        return False
    return [(e.op, e.partial, e.output.dtype) for e in left] == [(e.op, e.partial, e.output.dtype) for e in right]


def _joined(addition: Expr, left: _Chain, right: _Chain) -> list[Expr]:
    out = addition.output
    a, b = left[0].tensors[0], right[0].tensors[0]
    summand = BoundTensor(f"{out}_summand", a.dtype, replace(a.domain, allocation=None))
    exprs = [Expr(_ADD, (a, b), (summand,))]
    for k, e in enumerate(left):
        last = out if k == len(left) - 1 else BoundTensor(f"{out}_{e.op.name}", e.output.dtype, e.output.domain)
        exprs.append(replace(e, inputs=(exprs[-1].output, *e.inputs[1:]), outputs=(last,)))
    return exprs
