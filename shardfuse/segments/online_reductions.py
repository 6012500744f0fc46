"""Two reductions, the second of which needs the result of the first, as one that takes one walk over the elements.

before::

    T1 = max(T0); T2 = sub(T0, T1); T3 = exp(T2); T4 = sum(T3)
    T5 = where(T6, T2, 0.0); T7 = sum(T5)                           T6: the index of an element is T8

after (Milakov & Gimelshein 2018; a variance goes alike, by Chan, Golub & LeVeque 1979)::

    T1, T4 = online_softmax(T0)                 with sum(T2) or sum(T2 * T3), where that is wanted, as a third
    T2 = sub(T0, T1); T7_x, T7_hit = pick(T2, T8); T7 = where(T7_hit, T7_x, 0.0)

It is for what does not stand in the registers of one program: a loop reads its input once less, and the programs of a
team exchange their parts at once.  And for rows of which a softmax's statistics alone are wanted.  A rank's part of a
softmax over a sharded axis goes alike; of a row of nothing but -inf its sum is 0 (``analysis/paired_reductions.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import cast

from ..analysis.paired_reductions import SUB, first_of, guarded_first_of, made_by, sums_weighted
from ..analysis.sharding import reduced_axes
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Iota, Pick, Pointwise, Reduce, Statistic, is_reduction, is_statistic
from ..ir.scalar import Scalar
from .segment import Segment, leading_to
from .space import Space, analyse, analysed

_WHERE, _EQ = Pointwise("where"), Pointwise("eq")
_WIDE = (DataType.Float, DataType.Double)
_INDEX = (DataType.Int, DataType.Int32)


@lru_cache(maxsize=64)
def online(segment: Segment) -> Segment:
    """``segment`` with the pairs of reductions that are one statistic as one Expr each."""
    space = analyse(segment)
    if isinstance(space, str):
        return segment
    found = _Rewrite(segment, space)
    exprs = found.rewritten()
    if not found.statistics:
        return segment
    return segment.doing(leading_to(exprs, segment.outputs))


def walks(space: Space) -> dict[int, list[BoundTensor]]:
    """What is wanted of each walk over the reduced elements: inputs of reductions, and outputs; by their phase."""
    wanted = [
        e.tensors[0] for e in space.segment.exprs if isinstance(e.op, Reduce | Statistic) and not space.has_r(e.output)
    ]
    found: dict[int, list[BoundTensor]] = {}
    for tensor in dict.fromkeys((*wanted, *space.segment.outputs)):
        if space.has_r(tensor):
            found.setdefault(space.phase[tensor], []).append(tensor)
    return found


def takes_one_walk(segment: Segment) -> bool:
    """Is no element needed again, of a segment that has a space?"""
    return len(walks(analysed(online(segment)))) <= 1


def counts_lanes(expr: Expr) -> bool:
    """Does a loop over the elements of the statistic ``expr`` carry how many each lane has?"""
    is_of_distances = is_statistic(expr.op, "online_softmax") and len(expr.outputs) == 3 and not expr.op.is_weighted
    return is_of_distances or is_statistic(expr.op, "welford")


@dataclass
class _Rewrite:
    segment: Segment
    space: Space
    statistics: dict[Expr, Expr] = field(default_factory=dict[Expr, Expr])
    """By the first of its reductions: what stands for both."""

    @property
    def maker(self) -> Mapping[BoundTensor, Expr]:
        return self.segment.maker

    def rewritten(self) -> list[Expr]:
        instead: dict[Expr, list[Expr]] = {}
        for second in self.segment.exprs:
            first = first_of(second, self.maker)
            guarded = guarded_first_of(second, self.maker) if first is None else None
            found = first or guarded
            if found is not None and found not in self.statistics and self.is_one_walk(found, second):
                sums = [second, *self.third(found, second)]
                totals = [e.output if guarded is None else _renamed(e.output, "unguarded") for e in sums]
                self.join(found, totals, is_weighted=len(sums) > 1 and sums_weighted(sums[1], second, self.maker))
                for e, total in zip(sums, totals, strict=True):
                    instead[e] = [] if guarded is None else _guarded(found.output, total, e)
        exprs: list[Expr] = []
        for expr in self.segment.exprs:
            if expr in self.statistics:
                exprs.append(self.statistics[expr])
            elif expr in instead:
                exprs += instead[expr]
            else:
                exprs += self.picked(expr) or [expr]
        return exprs

    def join(self, first: Expr, sums: Sequence[BoundTensor], *, is_weighted: bool) -> None:
        """Note the statistic of ``first`` and of the ``sums``; of a third, whether it ``is_weighted``."""
        assert isinstance(first.op, Reduce), "a statistic is of reductions"
        op = Statistic("online_softmax" if first.op.kind == "max" else "welford", first.op.axes, is_weighted)
        self.statistics[first] = Expr(op, first.inputs, (first.output, *sums))

    def third(self, first: Expr, second: Expr) -> list[Expr]:
        """Up to one sum more that is part of their statistic."""
        return [e for e in self.segment.exprs if self.is_distance(e, first) or sums_weighted(e, second, self.maker)][:1]

    def is_distance(self, expr: Expr, top: Expr) -> bool:
        """Does ``expr`` sum the distances to the maximum ``top``?"""
        if not is_reduction(expr.op, "sum") or not is_reduction(top.op, "max"):
            return False
        apart = self.maker.get(expr.tensors[0])
        if apart is None or apart.op != SUB or len(apart.tensors) != 2:
            return False
        x, centre = apart.tensors
        is_same = expr.op.axes == top.op.axes and expr.output.dtype is x.dtype
        return is_same and top.tensors == (x,) and made_by(centre, self.maker) is top

    def is_one_walk(self, first: Expr, second: Expr) -> bool:
        """Is it reduced here, element by element, and in a type that is not rounded?"""
        x = first.tensors[0]
        if x in self.space.of_blocks:
            return False
        is_wide = x.dtype in _WIDE and x.dtype is first.output.dtype is second.output.dtype
        return is_wide and self.space.has_r(x) and not self.space.has_r(first.output)

    def picked(self, second: Expr) -> list[Expr] | None:
        """What ``second`` sums is one element of a row, told by its index: then no walk looks for it."""
        terms = self.maker.get(second.tensors[0]) if is_reduction(second.op, "sum") else None
        if terms is None or terms.op != _WHERE or not _is_zero(terms.inputs[2]) or len(terms.tensors) != 2:
            return None
        condition, x = terms.tensors
        is_same = x.domain.logical == terms.output.domain.logical and x.dtype is second.output.dtype
        found = self.picks(condition, second) if is_same else None
        return None if found is None else _picked(second, found, x, cast(Scalar, terms.inputs[2]))

    def picks(self, condition: BoundTensor, second: Expr) -> list[BoundTensor] | None:
        """What the index along the row is compared with, which does not change along it; of a shard the index too."""
        equal, (axis, *more) = self.maker.get(condition), reduced_axes(second)
        is_alone = not more and condition.domain.logical == second.tensors[0].domain.logical
        if equal is None or equal.op != _EQ or not is_alone or len(equal.tensors) != 2:
            return None
        for index, wanted in (equal.tensors, equal.tensors[::-1]):
            made = made_by(index, self.maker)
            if made is None or not isinstance(made.op, Iota) or made.output.domain.logical != (axis,):
                continue
            along = tuple(atom for d in made.output.domain.local_axes()[0] for atom in self.space.pieces[d])
            counts = made.op.counting == (0, 1) and along == self.space.r
            types = made.output.dtype in _INDEX and wanted.dtype in _INDEX
            if not counts or not types or self.space.has_r(wanted):
                return None
            return [wanted, made.output] if made.output.domain.mesh_digits else [wanted]
        return None


def _is_zero(value: object) -> bool:
    return isinstance(value, Scalar) and value.is_literal and value.value == 0


def _renamed(tensor: BoundTensor, what: str) -> BoundTensor:
    return BoundTensor(f"{tensor}_{what}", tensor.dtype, replace(tensor.domain, allocation=None))


def _guarded(largest: BoundTensor, total: BoundTensor, second: Expr) -> list[Expr]:
    """``second`` from the ``total``, which is NaN where ``largest`` is -inf: 0 there."""
    name, dtype = f"{second.output}", total.dtype
    lowest, zero = (Scalar(f"{name}_{k}", dtype, v, is_literal=True) for k, v in (("lowest", -inf), ("none", 0.0)))
    is_lowest = BoundTensor(f"{name}_is_lowest", DataType.Bool, replace(total.domain, allocation=None))
    return [Expr(_EQ, (largest, lowest), (is_lowest,)), Expr(_WHERE, (is_lowest, zero, total), (second.output,))]


def _picked(second: Expr, found: list[BoundTensor], x: BoundTensor, zero: Scalar) -> list[Expr]:
    out = second.output
    domain = replace(out.domain, allocation=None)
    value, hit = BoundTensor(f"{out}_x", x.dtype, domain), BoundTensor(f"{out}_hit", DataType.Bool, domain)
    return [Expr(Pick(), (x, *found), (value, hit)), Expr(_WHERE, (hit, value, zero), (out,))]
