"""Columns that are added up for their groups and by themselves: each column's sum is made first, and all others of it.

    A: T9[n, g] = sum(T7 * weight, (c, h, w)); T10 = sub(T7, T9)      walks T0, T1, channels side by side, twice
    B: T12[g, c] = sum(T7, (n, h, w))                                 reads T0, T1 a third time

becomes, with planes of h and w::

    T12p[n, g, c] = sum(T7, (h, w))                                   reads T0, T1
    T9[n, g] = sum(T12p * weight, c); T12[g, c] = sum(T12p, n)        read that alone
    A: T10 = sub(T7, T9)                                              reads T0, T1 again

So the gradient of a group norm, channels-last, reads each of its inputs twice.  Where channels are no columns a kernel
holds the rows, and reads them once (``sums_of_blocks.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..ir.digits import Axis, Digit
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce, Squeeze
from .recompute import share_wide
from .segment import Segment, in_running_order, leading_to, segment_of
from .space import analyse
from .sums_of_blocks import adds_up, from_parts, may_move, reductions, with_axes

Accepts = Callable[[tuple[Segment, Segment], list[Segment]], bool]
"""Are the second segments, of which the first adds up planes, as good kernels as the first two, rows and sums?"""


@dataclass(frozen=True)
class _Planes:
    """``part``: the sums over ``axes`` of ``x``.  exprs: what makes it, and the sum of these for each column."""

    x: BoundTensor
    axes: tuple[int, ...]
    part: BoundTensor
    exprs: list[Expr]


def sum_in_planes(segments: Sequence[Segment], accepts: Accepts) -> tuple[list[Segment], dict[Expr, list[Expr]]]:
    """``segments``, in the order given, with sums of planes made first wherever rows that are walked twice, and sums,
    are made of them; and by each sum what is in its place."""
    found, instead = list(segments), dict[Expr, list[Expr]]()
    for sums in filter(adds_up, segments):
        if sums not in found:
            continue  # it is made of others' planes now
        b = found.index(sums)
        for a, rows in enumerate(found):
            made = None
            if a != b and share_wide(rows, sums) and may_move(found, a, b):
                made = _in_planes(rows, sums)
            if made is None or not accepts((rows, sums), made[0]):
                continue
            (*own, total), cut = made
            found[a : a + 1] = own
            found.remove(sums)
            found.insert(max(found.index(own[-1]) + 1, b + len(own) - 1 if b > a else 0), total)
            instead |= cut
            break
    return found, instead


def _in_planes(rows: Segment, sums: Segment) -> tuple[list[Segment], dict[Expr, list[Expr]]] | None:
    """The sums of planes, those of the rows, the rows, and ``sums``, by each sum what is in its place; ``None`` where a
    sum of the rows is none of planes, or ranks have parts of them."""
    own, space = reductions(rows), analyse(rows)
    if isinstance(space, str) or space.is_promised:
        return None
    kept = {d for e in own for axis in e.output.domain.logical for d in axis}
    planes = {e: found for e in reductions(sums) if (found := _planes_of(e, kept)) is not None}
    if not own or len(planes) != len(reductions(sums)):
        return None
    before = leading_to(sums.exprs, [p.x for p in planes.values()])
    chain = [*dict.fromkeys((*rows.exprs, *before))]
    maker = {t: e for e in chain for t in e.outputs}
    found = ((e, from_parts(e, p.x, p.part, maker, partial(_as_plane, planes=p))) for e in own for p in planes.values())
    of_rows = {e: new for e, new in found if new is not None}
    if len(of_rows) < len(own):
        return None
    rest = [e for e in rows.exprs if e not in of_rows]
    first = [*chain, *(p.exprs[0] for p in planes.values())]
    statistics = [*rest, *(e for new in of_rows.values() for e in new)]
    total = [new for e in sums.exprs for new in (planes[e].exprs[1:] if e in planes else [e])]
    made = [
        segment_of(in_running_order(first), [p.part for p in planes.values()]),
        segment_of(in_running_order(statistics), [e.output for e in own]),
        segment_of(rest, rows.outputs),
        segment_of(total, sums.outputs),
    ]
    if not all(segment.exprs for segment in made):
        return None  # of the rows nothing is wanted but their sums
    return made, {**{e: p.exprs for e, p in planes.items()}, **of_rows}


def _planes_of(expr: Expr, kept: set[Digit]) -> _Planes | None:
    """``expr`` as a sum of those over the axes that have nothing of what the rows ``kept``; ``None`` where there are
    none, or ranks have parts of these."""
    (x,), out, op = expr.tensors, expr.output, expr.op
    assert isinstance(op, Reduce), expr
    logical = x.domain.logical
    axes = tuple(k for k in op.axes if logical[k] and kept.isdisjoint(logical[k]))
    if not axes or any(d in x.domain.mesh_digits for k in axes for d in logical[k]):
        return None
    left = [k for k in range(len(logical)) if k not in axes]
    accumulated = DataType.Float if out.dtype.is_low_precision else out.dtype
    part = BoundTensor(f"{out.name}p", accumulated, with_axes(x, tuple(logical[k] for k in left)))
    summed = Expr(Reduce("sum", axes), (x,), (part,), chunk=expr.chunk)
    others = tuple(left.index(k) for k in op.axes if k not in axes)
    return _Planes(x, axes, part, [summed, replace(expr, op=Reduce("sum", others), inputs=(part,))])


def _as_plane(tensor: BoundTensor, planes: _Planes) -> tuple[Squeeze, tuple[Axis, ...]] | None:
    """The view of a factor without the axes of the planes, and its axes; ``None`` where a plane has several of it."""
    if not _is_alike(tensor, planes):
        return None
    left = tuple(axis for k, axis in enumerate(tensor.domain.logical) if k not in planes.axes)
    return Squeeze(planes.axes), left


def _is_alike(tensor: BoundTensor, planes: _Planes) -> bool:
    """Has ``tensor`` the axes of what planes are summed of or none in their place, and none of the planes' own?"""
    own, axes = tensor.domain.logical, planes.x.domain.logical
    if len(own) != len(axes) or tensor.dtype is not planes.part.dtype or any(own[k] for k in planes.axes):
        return False
    return all(a in ((), b) for a, b in zip(own, axes, strict=True))
