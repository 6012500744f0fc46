"""fuse_windows: slices, pads, cats and flips become loads at other places, so that they are part of kernels.

before (columns turned by one)::

    inputs: T0[i0, i4]:Float
    T1[i0, 1]:Float = slice(T0, starts=(0, 0), stops=(9, 1), steps=(1, 1))
    T2[i0, i3]:Float = slice(T0, starts=(0, 1), stops=(9, 4), steps=(1, 1))
    T3[i0, i3]:Float = neg(T2)
    T4[i0, i4]:Float = cat(T3, T1, dim=1)
    T5[i0, i4]:Float = mul(T4, T0)
    outputs: T5

after (what nothing reads any more goes with the next pass)::

    inputs: T0[i0, i4]:Float
    T1[i0, 1]:Float = slice(T0, starts=(0, 0), stops=(9, 1), steps=(1, 1))
    T2[i0, i3]:Float = window(T0, reads=(axis 1: 1 + j, 0 <= j < 3,))
    T3[i0, i3]:Float = neg(T2)
    T0w[i0, i4]:Float = window(T0, reads=(axis 1: 1 + j, 0 <= j < 3,))
    T3w[i0, i4]:Float = neg(T0w)
    T4i[i4]:Int32 = iota(shape=(4,), start=0, step=1)
    T4m[i4]:Bool = lt(T4i, 3)
    T4b[1, i4]:Bool = broadcast(T4m, new=(True, False))
    T4[i0, i4]:Float = where(T4b, T3w, T1)
    T5[i0, i4]:Float = mul(T4, T0)
    outputs: T5

A window is taken of a stored tensor: on its way up it passes whatever computes each element on its own, where that
moves no more bytes than storing the result would (`passes/chains.py`).  So does a slice, which is a window where
kernels alone read it and else a view.  A cat or pad of stored tensors that no kernel reads stays one torch call, and so
does one of many pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.base_op import numbers
from ..ir.call import Cat, Flip, Pad, Select, ShapeCall, Slice
from ..ir.digits import Axis, extent
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundFusion, BoundTensor, Expr, Value
from ..ir.op import Broadcast, Full, Iota, Pointwise, Squeeze
from ..ir.scalar import Scalar
from .chains import Chains, Seen, sight_of

_WHERE, _LT, _GE = map(Pointwise, ("where", "lt", "ge"))
_MOST_PIECES = 8
"""Each element of a cat is looked for in every piece."""


def fuse_windows(fusion: BoundFusion) -> None:
    if not any(isinstance(expr.op, ShapeCall) for expr in fusion.exprs):
        return
    chains = Chains(fusion)
    for expr in fusion.exprs:
        if not _rewritten(chains, expr):
            chains.emit(expr)
    fusion.exprs = chains.exprs


def _rewritten(chains: Chains, expr: Expr) -> bool:
    """Has ``expr`` been said otherwise?"""
    tensors = (*expr.tensors, *expr.outputs)
    if isinstance(expr.op, ShapeCall) and any(extent(axis) == 0 for t in tensors for axis in t.domain.logical):
        return False
    match expr.op:
        case Slice():
            return _slice(chains, expr, expr.op)
        case Select(at):
            return _select(chains, expr, at)
        case Cat(at):
            return _cat(chains, expr, at)
        case Pad(widths):
            return _pad(chains, expr, numbers(widths))
        case Flip():
            return _flip(chains, expr, expr.op)
        case _:
            return False


def _slice(chains: Chains, expr: Expr, op: Slice) -> bool:
    """Where its input is computed element by element, a slice of what that is computed from; a view else, or a window
    where kernels alone read it."""
    (x,) = expr.tensors
    seen = sight_of(expr, op)
    if not seen or not (chains.passes(x, seen) or (chains.is_for_kernels(expr.output) and chains.fits(x))):
        return False
    chains.through(x, seen, expr.output)
    return True


def _select(chains: Chains, expr: Expr, at: int) -> bool:
    """A slice of one element, less its axis, where the index is known."""
    x, place = expr.inputs
    assert isinstance(x, BoundTensor), "an index is of a tensor"
    index, n = place.value if isinstance(place, Scalar) else None, extent(x.domain.logical[at])
    if not isinstance(index, int) or not -n <= index < n:
        return False
    logical = tuple(() if k == at else axis for k, axis in enumerate(x.domain.logical))
    if not x.domain.logical[at]:
        one = x
    else:
        seen = (Seen(x.domain.logical[at], (), index % n, 1, 0, 1),)
        one = chains.through(x, seen, chains.stand_in(expr.output, chains.like(x, x.name, logical)))
    chains.emit(Expr(Squeeze((at,)), (one,), (expr.output,)))
    return True


def _flip(chains: Chains, expr: Expr, op: Flip) -> bool:
    (x,), out = expr.tensors, expr.output
    seen = sight_of(expr, op)
    if not seen or not (chains.passes(x, seen) or chains.is_read_by_kernel(out)) or not chains.fits(x):
        return False
    chains.through(x, seen, out)
    return True


def _pad(chains: Chains, expr: Expr, widths: tuple[int, ...]) -> bool:
    (x, fill), out = expr.inputs, expr.output
    assert isinstance(x, BoundTensor), "a pad is of a tensor"
    assert isinstance(fill, Scalar), "a pad is by a number"
    seen: list[Seen] = []
    masks: list[tuple[int, int, int]] = []
    for k, (old, new) in enumerate(zip(x.domain.logical, out.domain.logical, strict=True)):
        before, after = widths[2 * k], widths[2 * k + 1]
        if before == after == 0:
            continue
        start, stop = max(before, 0), min(before + extent(old), extent(new))
        if old:
            seen.append(Seen(old, new, -before, 1, start, stop))
        if start > 0 or stop < extent(new):
            masks.append((k, start, stop))
    if not chains.fits(x) or any(start >= stop for _, start, stop in masks):
        return False
    passes = bool(seen) and chains.passes(x, tuple(seen))
    if not seen or not (passes or chains.is_read_by_kernel(out)):
        return False
    is_read = all(x.domain.logical[k] for k, _, _ in masks)
    if not passes and is_read and fill.is_literal and fill.value == 0:
        chains.read(x, tuple(seen), out)
        return True
    whole = out if not masks else None
    inside = chains.through(x, tuple(seen), whole)
    if masks:
        _filled(chains, out, inside, masks, fill)
    return True


def _filled(
    chains: Chains, out: BoundTensor, x: BoundTensor, masks: Sequence[tuple[int, int, int]], fill: Scalar
) -> None:
    """``out`` is ``x`` where the index along every axis of ``masks`` is inside, else ``fill``."""
    value = chains.like(out, f"{out}v", ())
    chains.emit(Expr(Full(()), (fill,), (value,)))
    tests = [
        _test(chains, out, k, op, at)
        for k, start, stop in masks
        for op, at, there in ((_GE, start, start > 0), (_LT, stop, stop < extent(out.domain.logical[k])))
        if there
    ]
    for k, mask in enumerate(tests):
        made = out if k == len(tests) - 1 else chains.like(out, out.name, out.domain.logical)
        chains.emit(Expr(_WHERE, (mask, x, value), (made,)))
        x = made


def _cat(chains: Chains, expr: Expr, k: int) -> bool:
    out = expr.output
    target = out.domain.logical[k]
    pieces: list[tuple[BoundTensor, tuple[Seen, ...], int]] = []
    start = 0
    for t in expr.tensors:
        source, stop = t.domain.logical[k], start + extent(t.domain.logical[k])
        pieces.append((t, (Seen(source, target, -start, 1, start, stop),) if source else (), stop))
        start = stop
    gains = chains.is_read_by_kernel(out) or any(seen and chains.passes(t, seen) for t, seen, _ in pieces)
    if not 1 < len(pieces) <= _MOST_PIECES or not gains or not chains.fits(out):
        return False
    values = [chains.through(t, seen) for t, seen, _ in pieces]
    current = values[-1]
    for j in reversed(range(len(pieces) - 1)):
        mask = _test(chains, out, k, _LT, pieces[j][2])
        made = out if j == 0 else chains.like(out, out.name, out.domain.logical)
        chains.emit(Expr(_WHERE, (mask, values[j], current), (made,)))
        current = made
    return True


def _test(chains: Chains, out: BoundTensor, k: int, op: Pointwise, at: int) -> BoundTensor:
    """Is the index along axis ``k`` of ``out`` less than ``at``, or no less?"""
    axis: Axis = out.domain.logical[k]
    index = _index(chains, out, axis)
    mask = _new(chains, f"{out}m", DataType.Bool, (axis,), out)
    number: Value = Scalar(str(at), DataType.Int, at, is_literal=True)
    chains.emit(Expr(op, (index, number), (mask,)))
    new = tuple(j != k for j in range(out.ndim))
    if not any(new):
        return mask
    wide = _new(chains, f"{out}b", DataType.Bool, tuple(() if n else axis for n in new), out)
    chains.emit(Expr(Broadcast(new), (mask,), (wide,)))
    return wide


def _index(chains: Chains, out: BoundTensor, axis: Axis) -> BoundTensor:
    """The index along ``axis``, made once."""
    key = axis, out.domain.mesh
    if key not in chains.indices:
        index = _new(chains, f"{out}i", DataType.Int32 if extent(axis) < 2**31 else DataType.Int, (axis,), out)
        chains.emit(Expr(Iota((extent(axis),), 0, 1), (), (index,)))
        chains.indices[key] = index
    return chains.indices[key]


def _new(chains: Chains, name: str, dtype: DataType, logical: tuple[Axis, ...], like: BoundTensor) -> BoundTensor:
    domain: BoundDomain = replace(like.domain, logical=logical, sharding=(), allocation=None)
    return BoundTensor(chains.unique(name), dtype, domain)
