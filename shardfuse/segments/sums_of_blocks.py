"""Sums that other axes of a tensor need than the rows a kernel holds: it makes them of blocks of its rows, in passing.

    A: T9[n, g] = sum(T7, (c, h, w)); T10 = sub(T7, T9)      reads T0, T1, and holds a group of channels
    B: T12[g, c] = sum(T11, (n, h, w))                       reads T0, T1 again

becomes, with blocks of 256 neighbours of a row::

    A: the same, and T12p[n, g, c, b] = sum(T11, 256 neighbours)      stores one number for each block
    B: T12[g, c] = sum(T12p, (n, b))                                  reads those alone

The gradient of a group norm so reads each of its inputs once.  A block lies in what one warp loads at once, so that its
sum takes no shared memory.  A sum of the row that differs by factors which all of a block have alike is one of what
blocks have been summed to::

    A: T9[n, g] = sum(T11 * weight, (c, h, w))   becomes   T9[n, g] = sum(T12p * weight, (c, b))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..ir.digits import Axis, CutError, extent, merge, split
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Broadcast, Pointwise, Reduce, Reshape, Squeeze, View, is_reduction
from .recompute import moved_bytes, share_wide
from .segment import Segment, in_running_order, leading_to, segment_of
from .space import Space, analyse

RowsAndSums = tuple[Segment, Segment]
Accepts = Callable[[RowsAndSums, RowsAndSums], bool]
"""Are the second two segments as good kernels as the first two, in whose place they are?"""


def sum_in_blocks(
    segments: Sequence[Segment], widest: int, accepts: Accepts
) -> tuple[list[Segment], dict[Expr, list[Expr]]]:
    """``segments``, in the order given, with sums made of sums of blocks wherever that moves fewer bytes; and by each
    such sum what is in its place.

    widest: bytes that a warp loads at once.
    """
    found, instead = list(segments), dict[Expr, list[Expr]]()
    for sums in filter(adds_up, segments):
        if sums not in found:
            continue  # it has the blocks of others now
        b = found.index(sums)
        for a, rows in enumerate(found):
            if a == b or not share_wide(rows, sums) or not may_move(found, a, b):
                continue
            both = _in_blocks(rows, sums, widest)
            if both is None:
                continue
            after, cut = both
            if moved_bytes(after) < moved_bytes((rows, sums)) and accepts((rows, sums), after):
                found[a], found[b] = after
                found.insert(max(a, b), found.pop(b))
                instead |= cut
                break
    return found, instead


def adds_up(segment: Segment) -> bool:
    """Are all of its reductions sums, in whatever order, over the same axes of tensors that are cut alike?"""
    sums = reductions(segment)
    kinds = {(e.op.axes, e.tensors[0].domain, e.output.dtype) for e in sums if isinstance(e.op, Reduce)}
    return len(kinds) == 1 and all(map(_is_free_sum, sums))


def reductions(segment: Segment) -> list[Expr]:
    """All but those over axes of one element, such as a batch of one sample."""
    return [e for e in segment.exprs if isinstance(e.op, Reduce) and any(e.tensors[0].axes[k] for k in e.op.axes)]


def _is_free_sum(expr: Expr) -> bool:
    """Is it a sum of what a rank has, in whatever order?"""
    op = expr.op
    return is_reduction(op, "sum") and not (op.in_pairs or op.segments or op.mesh_dims)


def may_move(segments: Sequence[Segment], a: int, b: int) -> bool:
    """May what ``b`` sums be made where ``a`` is, all that it reads being there, and ``b`` itself run behind both?

    Whichever of the two is the later one: the rows store what the sums read.
    """
    made = {t for s in segments[a:b] for t in s.outputs}
    read = {t for s in segments[b + 1 : a + 1] for t in s.inputs}
    return made.isdisjoint(segments[b].inputs) and read.isdisjoint(segments[b].outputs)


def _in_blocks(rows: Segment, sums: Segment, widest: int) -> tuple[RowsAndSums, dict[Expr, list[Expr]]] | None:
    """``rows`` with the sums of its blocks, and ``sums`` as sums of these, by each what is in its place; ``None`` where
    they have no such blocks."""
    instead = cut_sums(sums, rows, widest)
    if instead is None:
        return None
    before = leading_to(sums.exprs, [e.tensors[0] for e in instead])
    exprs = [*dict.fromkeys((*rows.exprs, *before)), *(e for new in instead.values() for e in new[:-1])]
    stored = [new[-2].output for new in instead.values()]
    maker = {e.output: e for e in exprs}
    parts = [(e.tensors[0], new[-2].output) for e, new in instead.items()]
    of_rows = {e: new for e in rows.exprs for x, part in parts if (new := from_blocks(e, x, part, maker))}
    inside = in_running_order([new for e in exprs for new in of_rows.get(e, [e])])
    return (segment_of(inside, (*rows.outputs, *stored)), totals(sums, instead)), {**instead, **of_rows}


def cut_sums(sums: Segment, walked: Segment, widest: int) -> dict[Expr, list[Expr]] | None:
    """For each reduction of ``sums`` the sums of blocks, and the sum of these; ``None`` where the rows of ``walked``,
    which reads the same tensors, have no blocks, or promise their bits."""
    space = analyse(walked)
    if isinstance(space, str) or not space.r or space.is_promised or not space.is_inner:
        return None
    added = reductions(sums)
    cuts = _blocks_of(added[0], space, widest)
    return None if cuts is None else {expr: _summed(expr, *cuts) for expr in added}


def totals(sums: Segment, cut: Mapping[Expr, list[Expr]]) -> Segment:
    """``sums`` made of what ``cut`` has for the blocks of each."""
    return segment_of([cut[e][-1] if e in cut else e for e in sums.exprs], sums.outputs)


def _blocks_of(expr: Expr, space: Space, widest: int) -> tuple[Axis, Axis] | None:
    """The innermost axes that ``expr`` adds up as blocks, and what is in each: a power of two, of the elements that a
    warp loads at once or fewer; ``None`` where there are no two in each, or ranks have parts of these axes."""
    if not set(expr.tensors[0].domain.mesh_digits).isdisjoint(d for axis in _innermost(expr) for d in axis):
        return None
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
    whole = BoundTensor(f"{out.name}v", x.dtype, with_axes(x, logical))
    accumulated = DataType.Float if out.dtype.is_low_precision else out.dtype
    part = BoundTensor(f"{out.name}p", accumulated, with_axes(x, kept))
    reshape = Expr(Reshape(tuple(map(extent, logical))), (x,), (whole,), chunk=expr.chunk)
    summed = Expr(Reduce("sum", (first + 1,)), (whole,), (part,), chunk=expr.chunk)
    axes = (*(a for a in expr.op.axes if a < first), first)
    return [reshape, summed, replace(expr, op=Reduce("sum", axes), inputs=(part,))]


def with_axes(tensor: BoundTensor, logical: tuple[Axis, ...]) -> BoundDomain:
    """The domain of what has these axes and is cut among ranks as ``tensor`` is."""
    return BoundDomain(logical, tensor.domain.mesh, tensor.domain.sharding)


# sums of rows that are made of those of blocks

_Makers = Mapping[BoundTensor, Expr]
_Seen = tuple[Broadcast | Squeeze, tuple[Axis, ...]]
_AsPart = Callable[[BoundTensor], _Seen | None]
"""The view of a factor in which it is multiplied with sums, and its axes; ``None`` where these do not have it alike."""
_MUL = Pointwise("mul")


def from_blocks(expr: Expr, x: BoundTensor, part: BoundTensor, maker: _Makers) -> list[Expr] | None:
    """The sum ``expr`` of a row as one of ``part``, the sums of blocks of ``x``; ``None`` where it is none of those.

    What it adds up has to be ``x``, or what the blocks of ``x`` add up to, times what all of a block have alike.
    """
    return from_parts(expr, x, part, maker, lambda t: _as_blocks(t, part) if _is_alike(t, x, part) else None)


def from_parts(expr: Expr, x: BoundTensor, part: BoundTensor, maker: _Makers, as_part: _AsPart) -> list[Expr] | None:
    """The sum ``expr`` of a row as one of ``part``, sums of ``x``; ``None`` where it is none of those.

    All is in one type, so that no product is rounded, or wraps around, that was not.  As in torch's own gradient of a
    group norm a sum may be infinite where all of its products are not.
    """
    if not _is_free_sum(expr) or expr.partial or not expr.output.dtype is part.dtype is x.dtype:
        return None
    assert isinstance(expr.op, Reduce), expr
    beside = _quotient(expr.tensors[0], x, maker)
    views = [as_part(t) for t in beside or ()]
    if beside is None or None in views:
        return None
    kept = tuple(axis for k, axis in enumerate(expr.tensors[0].domain.logical) if k not in expr.op.axes)
    whole = merge(*part.domain.logical)
    try:
        outer, rest = split(whole, extent(whole) // extent(merge(*kept)))
    except CutError:
        return None
    is_whole = {d for axis in kept for d in axis}.issuperset(part.domain.mesh_digits)
    if outer != merge(*kept) or kept != expr.output.domain.logical or not is_whole:
        return None
    name, found, last = expr.output.name, list[Expr](), part
    for k, (t, (view, axes)) in enumerate(zip(beside, filter(None, views), strict=True)):
        one = BoundTensor(f"{name}w{k}", t.dtype, with_axes(t, axes))
        product = BoundTensor(f"{name}m{k}", part.dtype, part.domain)
        found += [Expr(view, (t,), (one,)), Expr(_MUL, (last, one), (product,))]
        last = product
    row = BoundTensor(f"{name}r", part.dtype, with_axes(part, (*kept, rest)))
    found.append(Expr(Reshape(tuple(map(extent, row.domain.logical))), (last,), (row,)))
    return [*found, replace(expr, op=Reduce("sum", (len(kept),)), inputs=(row,))]


def _as_blocks(tensor: BoundTensor, part: BoundTensor) -> _Seen:
    """The view of ``tensor`` that has an axis of one element in place of the blocks of ``part``, and its axes."""
    axes = (*tensor.domain.logical[: part.ndim - 1], ())
    if tensor.ndim < part.ndim:
        return Broadcast((*[False] * tensor.ndim, True)), axes
    return Squeeze(tuple(range(part.ndim, tensor.ndim))), axes


def _is_alike(tensor: BoundTensor, x: BoundTensor, part: BoundTensor) -> bool:
    """Has ``tensor`` the axes of ``x`` or none in their place, and none in place of the blocks of ``part``?"""
    own, axes = tensor.domain.logical, x.domain.logical
    if len(own) != len(axes) or tensor.dtype is not part.dtype or any(own[part.ndim - 1 :]):
        return False
    return all(a in ((), b) for a, b in zip(own, axes, strict=True))


def _quotient(product: BoundTensor, x: BoundTensor, maker: _Makers) -> list[BoundTensor] | None:
    """The factors of ``product`` that are none of ``x``; ``None`` where ``x`` has others."""
    factors = _factors(product, maker)
    for source, _ in _factors(x, maker):
        at = next((k for k, (own, _) in enumerate(factors) if own is source), None)
        if at is None:
            return None
        del factors[at]
    return [as_read for _, as_read in factors]


def _factors(tensor: BoundTensor, maker: _Makers) -> list[tuple[BoundTensor, BoundTensor]]:
    """What is multiplied in the type of ``tensor``: each as it was before views of it, and as it is read."""
    found: list[tuple[BoundTensor, BoundTensor]] = []
    todo = [tensor]
    while todo:
        source = as_read = todo.pop()
        while (made := maker.get(source)) is not None and isinstance(made.op, View):
            source = made.tensors[0]
        if made is not None and made.op == _MUL and len(made.tensors) == 2 and source.dtype is tensor.dtype:
            todo += made.tensors
        else:
            found.append((source, as_read))
    return found
