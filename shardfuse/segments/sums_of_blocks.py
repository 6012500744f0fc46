"""Sums that other axes of a tensor need than the rows a kernel holds: it makes them of blocks of its rows, in passing.

    A: T9[n, g] = sum(T7, (c, h, w)); T10 = sub(T7, T9)      reads T0, T1, and holds a group of channels
    B: T12[g, c] = sum(T11, (n, h, w))                       reads T0, T1 again

becomes, with blocks of 256 neighbours of a row::

    A: the same, and T12p[n, g, c, b] = sum(T11, 256 neighbours)      stores one number for each block
    B: T12[g, c] = sum(T12p, (n, b))                                  reads those alone

The gradient of a group norm so reads each of its inputs once.  A block lies in what one warp loads at once, so that its
sum takes no shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..ir.digits import Axis, CutError, extent, merge, split
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce, Reshape, is_reduction
from .recompute import moved_bytes
from .segment import Segment, leading_to
from .space import Space, analyse

Pair = tuple[Segment, Segment]
Accepts = Callable[[Pair, Pair], bool]
"""Are the second two segments as good kernels as the first two, in whose place they are?"""


def sum_in_blocks(
    segments: Sequence[Segment], widest: int, accepts: Accepts
) -> tuple[list[Segment], dict[Expr, list[Expr]]]:
    """``segments``, in the order given, with sums made of sums of blocks wherever that moves fewer bytes; and by each
    such sum what is in its place.

    widest: bytes that a warp loads at once.
    """
    found, instead = list(segments), dict[Expr, list[Expr]]()
    for sums in filter(_adds_up, segments):
        b = found.index(sums)
        for a, rows in enumerate(found):
            both = _in_blocks(rows, sums, widest) if a != b and _may_move(found, a, b) else None
            if both is None:
                continue
            after, cut = both
            if moved_bytes(after) < moved_bytes((rows, sums)) and accepts((rows, sums), after):
                found[a], found[b] = after
                found.insert(max(a, b), found.pop(b))
                instead |= cut
                break
    return found, instead


def _adds_up(segment: Segment) -> bool:
    """Are all of its reductions sums, in whatever order, over the same axes of tensors that are cut alike?"""
    sums = [e for e in segment.exprs if isinstance(e.op, Reduce)]
    kinds = {(e.op.axes, e.tensors[0].domain, e.output.dtype) for e in sums if isinstance(e.op, Reduce)}
    is_free = all(is_reduction(e.op, "sum") and not (e.op.in_pairs or e.op.segments or e.partial) for e in sums)
    return len(kinds) == 1 and is_free


def _may_move(segments: Sequence[Segment], a: int, b: int) -> bool:
    """May ``b`` begin where ``a`` is, what it reads being there, and end behind ``a``?"""
    made = {t for s in segments[a:b] for t in s.outputs}
    read = {t for s in segments[b + 1 : a + 1] for t in s.inputs}
    return made.isdisjoint(segments[b].inputs) and read.isdisjoint(segments[b].outputs)


def _in_blocks(rows: Segment, sums: Segment, widest: int) -> tuple[Pair, dict[Expr, list[Expr]]] | None:
    """``rows`` with the sums of its blocks, and ``sums`` as sums of these, by each what is in its place; ``None`` where
    they have no such blocks."""
    space = analyse(rows)
    if isinstance(space, str) or not space.r or space.block or space.is_promised or not space.is_inner:
        return None
    added = [e for e in sums.exprs if isinstance(e.op, Reduce)]
    cuts = _blocks_of(added[0], space, widest)
    if cuts is None:
        return None
    instead = {expr: _summed(expr, *cuts) for expr in added}
    before = leading_to(sums.exprs, [e.tensors[0] for e in added])
    inside = [*dict.fromkeys((*rows.exprs, *before)), *(e for new in instead.values() for e in new[:-1])]
    stored = [new[-2].output for new in instead.values()]
    behind = leading_to([instead[e][-1] if e in instead else e for e in sums.exprs], sums.outputs)
    after = Segment.of(inside, (*rows.outputs, *stored)), Segment.of(behind, sums.outputs)
    return after, instead


def _blocks_of(expr: Expr, space: Space, widest: int) -> tuple[Axis, Axis] | None:
    """The innermost axes that ``expr`` adds up as blocks, and what is in each: a power of two, of the elements that a
    warp loads at once or fewer; ``None`` where there are no two in each."""
    inner = merge(*_innermost(expr))
    n = extent(inner)
    size = min(n & -n, widest // space.narrowest)
    while size > 1:
        try:
            return split(inner, size)
        except CutError:  # an image whose width it does not divide
            size //= 2
    return None


def _innermost(expr: Expr) -> tuple[Axis, ...]:
    """The last axes of what ``expr`` reduces, all of which it does."""
    logical = expr.tensors[0].domain.logical
    assert isinstance(expr.op, Reduce), expr
    first = len(logical)
    while first - 1 in expr.op.axes:
        first -= 1
    return logical[first:]


def _summed(expr: Expr, blocks: Axis, own: Axis) -> list[Expr]:
    """``expr`` as sums of ``own`` for each of ``blocks``, and a sum of these."""
    (x,), out = expr.tensors, expr.output
    assert isinstance(expr.op, Reduce), expr
    first = len(x.domain.logical) - len(_innermost(expr))
    kept = (*x.domain.logical[:first], blocks)
    logical = (*kept, own)
    whole = BoundTensor(f"{out.name}v", x.dtype, BoundDomain(logical, x.domain.mesh))
    accumulated = DataType.Float if out.dtype.is_low_precision else out.dtype
    part = BoundTensor(f"{out.name}p", accumulated, BoundDomain(kept, x.domain.mesh))
    reshape = Expr(Reshape(tuple(map(extent, logical))), (x,), (whole,), chunk=expr.chunk)
    summed = Expr(Reduce("sum", (first + 1,)), (whole,), (part,), chunk=expr.chunk)
    axes = (*(a for a in expr.op.axes if a < first), first)
    return [reshape, summed, replace(expr, op=Reduce("sum", axes), inputs=(part,))]
