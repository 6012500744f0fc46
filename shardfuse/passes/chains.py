"""Chains of Exprs that compute each element on its own, built again so that they are read at other places.

``window(f(a, b)) = f(window(a), window(b))``, up to stored tensors, where that moves no more bytes than storing
``f(a, b)`` would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from ..analysis.sharding import is_opaque, is_untouched
from ..ir.base_op import numbers
from ..ir.call import Flip, ShapeCall, Slice
from ..ir.digits import Axis, cut_out, extent
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundFusion, BoundTensor, Expr, Value
from ..ir.op import Cast, Expand, Full, Iota, Op, Pointwise, Reduce, Relabel, Reshape, Set, StreamCat, View, Window
from ..ir.window import Read
from ..mesh import DeviceMesh
from ..ops.promotion import why_no_text
from ..ops.shape_calls import slice_bounds
from ..ops.table import POINTWISE


@dataclass(frozen=True)
class Seen:
    """The axis ``source`` as ``target``: index j is ``offset + step * j`` of ``source`` where start <= j < stop."""

    source: Axis
    target: Axis
    offset: int
    step: int
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Is there an element at every index?"""
        return self.start <= 0 and self.stop >= extent(self.target)

    def after(self, outer: Seen) -> Seen:
        """``outer``, which sees this one's target, in terms of this one's source."""
        if outer.step > 0:
            first, last = self.start - outer.offset, self.stop - outer.offset
        else:
            first, last = outer.offset - self.stop + 1, outer.offset - self.start + 1
        step = abs(outer.step)
        start, stop = max(outer.start, -(-first // step)), min(outer.stop, -(-last // step))
        offset = self.offset + self.step * outer.offset
        return Seen(self.source, outer.target, offset, self.step * outer.step, start, max(start, stop))


Sight = tuple[Seen, ...]
"""How a tensor is seen: the axes that are seen otherwise than they are."""


Moving = Slice | Flip | Window | Relabel
"""Ops whose result is their input, seen otherwise."""


def sight_of(expr: Expr, op: Moving) -> Sight:
    """What ``op``, that of ``expr``, sees of its input."""
    old, new = expr.tensors[0].domain.logical, expr.output.domain.logical
    if isinstance(op, Relabel):
        return tuple(Seen(a, b, 0, 1, 0, extent(b)) for a, b in zip(old, new, strict=True) if a)
    if isinstance(op, Window):
        return tuple(Seen(old[r.axis], new[r.axis], r.offset, r.step, r.start, r.stop) for r in op.reads)
    if isinstance(op, Flip):
        axes = [new[k] for k in op.dims]
        return tuple(Seen(axis, axis, extent(axis) - 1, -1, 0, extent(axis)) for axis in axes if axis)
    starts, stops, steps = numbers(op.starts), numbers(op.stops), op.steps
    bounds = [(*slice_bounds(extent(axis), a, b), s) for axis, a, b, s in zip(old, starts, stops, steps, strict=True)]
    return tuple(
        Seen(a, b, first, step, 0, extent(b))
        for a, b, (first, last, step) in zip(old, new, bounds, strict=True)
        if a and (a, first, last, step) != (b, 0, extent(a), 1)
    )


class Chains:
    """The Exprs of ``fusion`` so far rewritten; ``emit`` adds one."""

    def __init__(self, fusion: BoundFusion) -> None:
        self.exprs: list[Expr] = []
        self._made: dict[BoundTensor, Expr] = {}
        self._outputs = dict.fromkeys(fusion.outputs)
        self._readers: dict[BoundTensor, list[Expr]] = {}
        for expr in fusion.exprs:
            for t in dict.fromkeys(expr.tensors):
                self._readers.setdefault(t, []).append(expr)
        self._seen: dict[tuple[BoundTensor, Sight, bool], BoundTensor] = {}
        self.indices: dict[tuple[Axis, DeviceMesh | None], BoundTensor] = {}
        self._names = {t.name for t in fusion.tensors()}
        # asked about what has been made, and of a tensor again for each way to it
        self._leaves = cache(self._find_leaves)
        self._reduces_anew = cache(self._would_reduce_anew)
        self._is_stored = cache(self._stands_in_memory)
        self._rests_on_reduction = cache(self._comes_of_reduction)

    def emit(self, expr: Expr) -> None:
        self.exprs.append(expr)
        self._made.update(dict.fromkeys(expr.outputs, expr))

    def unique(self, name: str) -> str:
        found, k = name, 2
        while found in self._names:
            found, k = f"{name}{k}", k + 1
        self._names.add(found)
        return found

    def like(self, tensor: BoundTensor, name: str, logical: tuple[Axis, ...]) -> BoundTensor:
        """A tensor of these axes, for the rest as ``tensor``."""
        sharding = tensor.domain.sharding if logical else ()
        domain = replace(tensor.domain, logical=logical, allocation=None, sharding=sharding)
        return BoundTensor(self.unique(f"{name}w"), tensor.dtype, domain)

    def stand_in(self, tensor: BoundTensor, other: BoundTensor) -> BoundTensor:
        """``other``, which is read where ``tensor`` was."""
        self._readers[other] = self._readers.get(tensor, [])
        if tensor in self._outputs:
            self._outputs[other] = None
        return other

    # what may be

    @staticmethod
    def fits(tensor: BoundTensor) -> bool:
        """Does a kernel hold numbers of its type?"""
        return is_held(tensor.dtype)

    def is_read_by_kernel(self, tensor: BoundTensor) -> bool:
        return any(is_for_kernel(e) for e in self._readers.get(tensor, []))

    def is_for_kernels(self, tensor: BoundTensor) -> bool:
        """Is it read by kernels alone, through views or not?"""
        return tensor not in self._outputs and all(map(self._serves_kernel, self._readers.get(tensor, [])))

    def _serves_kernel(self, reader: Expr) -> bool:
        if isinstance(reader.op, StreamCat):
            return True  # whose parts kernels make where they belong
        if is_opaque(reader) or not self.fits(reader.output):
            return False
        return (
            self.is_for_kernels(reader.output)
            if isinstance(reader.op, View)
            else is_for_kernel(reader) and not isinstance(reader.op, ShapeCall)
        )

    def passes(self, tensor: BoundTensor, sight: Sight) -> bool:
        """Is ``tensor`` better computed as it is seen than stored and read so?"""
        leaves = self._leaves(tensor, sight)
        if leaves is None or self._reduces_anew(tensor, sight):
            return False
        cost = sum(_bytes(t, s) + (0 if self._is_stored(t) else _bytes(t)) for t, s in leaves)
        gain = 0.0
        if not self._is_stored(tensor):
            readers = self._readers.get(tensor, [])
            views = sum(isinstance(e.op, ShapeCall) for e in readers)
            stored = dict.fromkeys(t for t, _ in leaves if self._is_stored(t))
            whole = sum(map(_bytes, stored)) if views == len(readers) else 0
            gain = (_bytes(tensor) + whole) / max(views, 1)
        return cost <= _bytes(tensor, sight) + gain

    def _stands_in_memory(self, tensor: BoundTensor) -> bool:
        """Is it in memory in any case?"""
        if tensor not in self._made or tensor in self._outputs:
            return True
        expr = self._made[tensor]
        if isinstance(expr.op, View | Relabel | Slice) and self._is_stored(expr.tensors[0]):
            return True
        return any(not is_for_kernel(e) for e in self._readers.get(tensor, []))

    def _find_leaves(self, tensor: BoundTensor, sight: Sight) -> dict[tuple[BoundTensor, Sight], None] | None:
        """The stored tensors behind ``tensor``, each as it is seen; ``None`` where ``tensor`` is one itself."""
        behind = self._behind(tensor, sight)
        if behind is None:
            return None
        if self._is_zero_outside(tensor):
            return dict.fromkeys(behind)
        found: dict[tuple[BoundTensor, Sight], None] = {}
        for t, s in behind:
            if not s:
                continue
            further = self._leaves(t, s)
            found |= {(t, s): None} if further is None or self._is_nearer(t, s, further) else further
        return found

    def _is_nearer(self, tensor: BoundTensor, sight: Sight, leaves: Iterable[tuple[BoundTensor, Sight]]) -> bool:
        """Is it stored, and better read than computed anew?"""
        return self._is_stored(tensor) and sum(_bytes(*leaf) for leaf in leaves) > _bytes(tensor, sight)

    def _would_reduce_anew(self, tensor: BoundTensor, sight: Sight) -> bool:
        """Is it computed of reduced values that would be reduced anew for every index that is seen?"""
        if all(one.source == one.target for one in sight) or self._is_zero_outside(tensor):
            return False
        return any(
            self._reduces_anew(t, s) if s else self._rests_on_reduction(t) for t, s in self._behind(tensor, sight) or []
        )

    def _comes_of_reduction(self, tensor: BoundTensor) -> bool:
        """Is it, or what it is computed from element by element, a reduction's result?"""
        expr = self._made.get(tensor)
        if expr is None or not is_for_kernel(expr):
            return False
        return isinstance(expr.op, Reduce) or any(self._rests_on_reduction(t) for t in expr.tensors)

    def _is_zero_outside(self, tensor: BoundTensor) -> bool:
        """Is it a window with no element at some index?  What is read so has zeros there, and no value computed of such
        zeros: it is read from memory, however the window is seen."""
        expr = self._made.get(tensor)
        if expr is None or not isinstance(expr.op, Window):
            return False
        return not all(one.is_whole for one in sight_of(expr, expr.op))

    def _behind(self, tensor: BoundTensor, sight: Sight) -> list[tuple[BoundTensor, Sight]] | None:
        """The inputs of what makes ``tensor``, and how each is seen; ``None`` where that cannot be done elsewhere."""
        expr = self._made.get(tensor)
        if expr is None or tensor.domain.allocation is not None or not all(map(self.fits, (*expr.tensors, tensor))):
            return None
        if isinstance(expr.op, Reshape | Reduce) and expr.op.segments:
            return None  # added up by the same kernel on any number of ranks
        if isinstance(expr.op, Moving) and not (isinstance(expr.op, Relabel) and tensor.domain.sharding):
            own = sight_of(expr, expr.op)
            seen = [one.after(outer) for one in own for outer in sight if outer.source == one.target and one.target]
            known = [one.source for one in seen]
            seen += [one for one in own if one.source not in known]
            seen += [outer for outer in sight if all(outer.source != one.target for one in own)]
            return [(expr.tensors[0], tuple(seen))]
        if isinstance(expr.op, Iota | Full):
            return [] if isinstance(expr.op, Full) or tensor.dtype.is_integral else None
        is_sum = _is_local_sum(expr.op) and all(one.is_whole for one in sight)
        if not is_sum and not computes_each_element(expr):
            return None
        found: list[tuple[BoundTensor, Sight]] = []
        for t in dict.fromkeys(expr.tensors):
            seen = [_held(t.domain, one) for one in sight]
            if None in seen:
                return None
            along = tuple(one for some in seen for one in some or ())
            if len(dict.fromkeys(one.source for one in along)) < len(along):
                return None  # two parts of one axis, each seen by itself
            found.append((t, along))
        return found

    # what is

    def through(self, tensor: BoundTensor, sight: Sight, out: BoundTensor | None = None) -> BoundTensor:
        """``tensor`` as it is seen, under the name of ``out`` where there is one."""
        if not sight:
            return tensor
        as_views = out is not None and not self.is_for_kernels(out)
        if self.passes(tensor, sight):
            return self._anew(tensor, sight, as_views, out)
        return self.read(tensor, sight, out, as_view=as_views)

    def _anew(self, tensor: BoundTensor, sight: Sight, as_views: bool, out: BoundTensor | None = None) -> BoundTensor:
        """What makes ``tensor``, of inputs that are seen otherwise; ``tensor`` itself read so where it is a leaf.

        ``as_views``: what is read is views where that can be, so that what is but a view of one stays one.
        """
        if not sight:
            return tensor
        key = (tensor, sight, as_views)
        if out is None and key in self._seen:
            return self._seen[key]
        leaves, behind = self._leaves(tensor, sight), self._behind(tensor, sight)
        if leaves is None or behind is None or (out is None and self._is_nearer(tensor, sight, leaves)):
            made = self.read(tensor, sight, out, as_view=as_views)
        else:
            made = self._built(tensor, sight, as_views, out, dict(behind))
        self._seen.setdefault(key, made)
        return made

    def _built(
        self,
        tensor: BoundTensor,
        sight: Sight,
        as_views: bool,
        out: BoundTensor | None,
        behind: dict[BoundTensor, Sight],
    ) -> BoundTensor:
        expr = self._made[tensor]
        if isinstance(expr.op, Moving):
            (source,) = expr.tensors
            if self._is_zero_outside(tensor):
                return self.read(source, behind[source], out, as_view=as_views)
            return self._anew(source, behind[source], as_views, out)
        seen = {t: self._anew(t, s, as_views) for t, s in behind.items()}
        inputs: list[Value] = [seen[v] if isinstance(v, BoundTensor) else v for v in expr.inputs]
        made = out or self.like(tensor, tensor.name, _moved(tensor.domain.logical, sight))
        op = _seen_op(expr.op, tuple(extent(axis) for axis in made.domain.logical), sight)
        self.emit(replace(expr, op=op, inputs=tuple(inputs), outputs=(made,)))
        return made

    def read(
        self, tensor: BoundTensor, sight: Sight, out: BoundTensor | None = None, *, as_view: bool = False
    ) -> BoundTensor:
        """The stored ``tensor`` as it is seen, a window of it or, where it is asked for and can be, a view."""
        logical = tensor.domain.logical
        made = out or self.like(tensor, tensor.name, _moved(logical, sight))
        if out is None and tensor.domain.allocation is not None:
            made.domain = replace(made.domain, allocation=_moved(tensor.domain.allocation, sight))
        if as_view and all(one.is_whole and one.step > 0 for one in sight):
            where = {one.source: one for one in sight}
            whole = [where.get(a) or Seen(a, a, 0, 1, 0, extent(a)) for a in logical]
            starts = tuple(one.offset for one in whole)
            stops = tuple(one.offset + one.step * (extent(one.target) - 1) + 1 for one in whole)
            steps = tuple(one.step for one in whole)
            self.emit(Expr(Slice(starts, stops, steps), (tensor,), (made,)))
            return made
        reads = tuple(Read(logical.index(s.source), s.offset, s.step, s.start, s.stop) for s in sight)
        self.emit(Expr(Window(reads), (tensor,), (made,)))
        return made


def is_held(dtype: DataType) -> bool:
    return not dtype.is_complex and not (dtype.itemsize == 1 and dtype.is_floating)


def _held(domain: BoundDomain, one: Seen) -> Sight | None:
    """What ``one`` sees of these axes: nothing, or one of them; ``None`` where it sees otherwise than along one.

    A single index of the outer or inner part of an axis is a slice of the whole of it, where no rank has but a shard.
    """
    if one.source in domain.logical:
        return (one,)
    if is_untouched(domain.logical, one.source):
        return ()
    if one.target or len(one.source) != 1:
        return None
    for axis, local in zip(domain.logical, domain.local_axes(), strict=True):
        above, below = (cut_out(axis, one.source[0]) if axis == local else None) or ((), ())
        if above and not below:
            return (Seen(axis, above, one.offset, extent(one.source), 0, extent(above)),)
        if below and not above:
            return (Seen(axis, below, one.offset * extent(below), 1, 0, extent(below)),)
    return None


def _seen_op(op: Op, shape: tuple[int, ...], sight: Sight) -> Op:
    """``op`` that makes a tensor of ``shape``, seen so."""
    match op:
        case Iota():
            (one,), (start, step) = sight, op.counting
            return Iota(shape, start + step * one.offset, step * one.step)
        case Full() | Expand() | Reshape():
            return replace(op, shape=shape)
        case _:
            return op


def _is_local_sum(op: Op) -> bool:
    return isinstance(op, Reduce) and not op.mesh_dims


def computes_each_element(expr: Expr) -> bool:
    """Does each element of its result depend on one of each input?"""
    if isinstance(expr.op, Pointwise):
        return why_no_text(POINTWISE[expr.op.name], expr.inputs) is None
    return isinstance(expr.op, Cast | Set) or (isinstance(expr.op, View) and not is_opaque(expr))


def is_for_kernel(expr: Expr) -> bool:
    """Is it a kernel's work, or becomes it that?"""
    return computes_each_element(expr) or isinstance(expr.op, ShapeCall) or _is_local_sum(expr.op)


def _moved(axes: Iterable[Axis], sight: Sight) -> tuple[Axis, ...]:
    where = {one.source: one.target for one in sight}
    return tuple(where.get(axis, axis) for axis in axes)


def _bytes(tensor: BoundTensor, sight: Sight = ()) -> int:
    """Of one rank, as it is seen."""
    whole = tensor.dtype.itemsize * prod(extent(axis) for axis in tensor.domain.local_axes())
    if not whole:
        return 0  # an axis without elements has none as it is seen, and no extent to divide by
    for one in sight:
        whole = whole // extent(one.source) * (one.stop - one.start)
    return whole
