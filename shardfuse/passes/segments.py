"""Sums in parts that do not depend on how many ranks there are, for fusions that promise the same bits on any number.

An axis is cut into 8 segments, whether it is sharded or not; what a rank has of it is some of them, whole.  Each
segment is added up by itself, in the order that its own length says, and what segments come to is added up in one
order, by whoever needs the sum.  So ranks hand each other the sums of segments and never add for one another.

before (T0 has 4096 columns, sharded over ranks or not)::

    T1[i0]:Float = sum(T0[i0, i1], axes=(1,))

after::

    T1v[i0, i1/512, i1%512] = reshape(T0)
    T1g[i0, i1/512] = sum(T1v, axes=(2,))                    of a rank its own segments
    T1[i0] = ((T1g[:, 0] + T1g[:, 1]) + (T1g[:, 2] + T1g[:, 3])) + ...    read by all ranks: an all-gather

Of an axis whose length 8 does not divide there are as many segments as its largest such power of two; an odd one is
added up whole.  Integers, maxima and truth values are the same in any order, and are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from ..errors import PromiseError
from ..ir.call import Select
from ..ir.digits import Axis, CutError, extent, split
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundFusion, BoundTensor, Expr
from ..ir.op import Cast, Op, Pointwise, Reduce, Reshape
from ..ir.promises import SEGMENTS
from ..ir.scalar import Scalar
from .promise_checks import has_order

_COMBINED = {"sum": Pointwise("add"), "prod": Pointwise("mul")}


def sum_in_segments(fusion: BoundFusion) -> None:
    """Cut the sums of floats of a fusion that promises the same bits on any number of ranks.

    Raises PromiseError for an axis of which ranks may have parts, and which its digits do not let be cut so.
    """
    if not fusion.promises.ranks:
        return
    exprs: list[Expr] = []
    is_whole = all(not isinstance(t, BoundTensor) or t.domain.mesh is None for t in fusion.inputs)
    for expr in fusion.exprs:
        if isinstance(expr.op, Reduce) and has_order(expr):
            exprs += _in_segments(expr, expr.op, str(fusion.promises), is_whole=is_whole)
        else:
            exprs.append(expr)
    fusion.exprs = exprs


def _cut(axis: Axis, count: int, *, is_whole: bool) -> tuple[Axis, Axis]:
    """``axis`` as segments, ``count`` of them, or as many fewer as its digits allow where a rank has all of it."""
    while True:
        try:
            return split(axis, extent(axis) // count)
        except CutError:
            if not is_whole or count == 1:
                raise
            count //= 2


def _in_segments(expr: Expr, op: Reduce, promise: str, *, is_whole: bool) -> list[Expr]:
    """``is_whole``: have all ranks all of it, so that another number of ranks is another definition?"""
    (x,), out = expr.tensors, expr.output
    at = min(op.axes)
    axis = x.domain.logical[at]
    try:
        outer, inner = _cut(axis, gcd(extent(axis), SEGMENTS), is_whole=is_whole) if extent(axis) else ((), axis)
    except CutError as error:
        found = f"{extent(axis)} elements along axis {at} of {x}, which {out} = {op.name} reduces, come from axes "
        found += f"or shards that {SEGMENTS} segments do not keep whole"
        raise PromiseError(promise, found, f"pad it to a multiple of {SEGMENTS} elements for each rank") from error
    count = extent(outer)
    if count == 1:
        return [expr]
    build = _Builder(out, DataType.Float if out.dtype.is_low_precision else out.dtype)
    logical = (*x.domain.logical[:at], outer, inner, *x.domain.logical[at + 1 :])
    shape = tuple(extent(a) for a in logical)
    cut = build.make(Reshape(shape, count), (x,), "v", logical, x.dtype)
    inside = tuple(a + 1 for a in op.axes)
    kept = tuple(a for k, a in enumerate(logical) if k not in inside)
    parts = build.make(Reduce(op.kind, inside, segments=count), (cut,), "g", kept)
    build.combine(_COMBINED[op.kind], parts, at, count)
    return build.exprs


class _Builder:
    """Exprs on the way to ``out``; what is added up is of type ``accumulator``."""

    def __init__(self, out: BoundTensor, accumulator: DataType) -> None:
        self.out = out
        self.accumulator = accumulator
        self.exprs: list[Expr] = []

    def make(
        self, op: Op, inputs: Sequence[BoundTensor | Scalar], name: str, logical: Sequence[Axis],
        dtype: DataType | None = None,
    ) -> BoundTensor:  # fmt: skip
        domain = BoundDomain(tuple(logical), self.out.domain.mesh)
        made = BoundTensor(f"{self.out.name}{name}", dtype or self.accumulator, domain)
        self.exprs.append(Expr(op, tuple(inputs), (made,)))
        return made

    def combine(self, op: Pointwise, parts: BoundTensor, at: int, count: int) -> None:
        """The ``count`` segments along axis ``at``, two and two, then twos and twos."""
        logical = tuple(a for k, a in enumerate(parts.domain.logical) if k != at)
        held: list[BoundTensor] = []
        for k in range(count):
            index = Scalar(f"{self.out.name}k{k}", DataType.Int, k, is_literal=True)
            held.append(self.make(Select(at), (parts, index), f"s{k}", logical))
        while len(held) > 1:
            pairs = list(zip(held[::2], held[1::2], strict=True))
            held = [self.make(op, pair, f"a{len(held)}_{k}", logical) for k, pair in enumerate(pairs)]
        last = self.exprs.pop()
        if self.accumulator is self.out.dtype:
            self.exprs.append(replace(last, outputs=(self.out,)))
        else:
            self.exprs += [last, Expr(Cast(), (held[0],), (self.out,))]
