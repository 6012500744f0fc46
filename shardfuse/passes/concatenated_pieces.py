"""make_in_parts: outputs that are pieces of one size put together are made piece by piece, each where it belongs.

before (half of a rotary embedding)::

    inputs: T0[i0, i4]:Float
    T1[i0, i2]:Float = slice(T0, starts=(0, 0), stops=(9, 2), steps=(1, 1))
    T2[i0, i3]:Float = slice(T0, starts=(0, 2), stops=(9, 4), steps=(1, 1))
    T3[i0, i3]:Float = neg(T2)
    T4[i0, i4]:Float = cat(T3, T1, dim=1)
    T5[i0, i4]:Float = mul(T4, T0)
    outputs: T5

after (what nothing reads any more goes with a later pass)::

    inputs: T0[i0, i4]:Float
    T1[i0, i2]:Float = slice(T0, starts=(0, 0), stops=(9, 2), steps=(1, 1))
    T2[i0, i3]:Float = slice(T0, starts=(0, 2), stops=(9, 4), steps=(1, 1))
    T3[i0, i3]:Float = neg(T2)
    T4p0[i0, i4%2]:Float = slice(T3, starts=(0, 0), stops=(9, 2), steps=(1, 1))
    T4p1[i0, i4%2]:Float = slice(T1, starts=(0, 0), stops=(9, 2), steps=(1, 1))
    T0p0[i0, i4%2]:Float = slice(T0, starts=(0, 0), stops=(9, 2), steps=(1, 1))
    T5p0[i0, i4%2]:Float = mul(T4p0, T0p0)
    T0p1[i0, i4%2]:Float = slice(T0, starts=(0, 2), stops=(9, 4), steps=(1, 1))
    T5p1[i0, i4%2]:Float = mul(T4p1, T0p1)
    T5[i0, i4]:Float = stream_cat(T5p0, T5p1, stream=(i4/2,))
    outputs: T5

A kernel that looks for each element in every piece loads and computes all pieces for all elements, under masks: 0.86
of a copy's speed on an H200 where the parts, side by side in one kernel, reach 0.99.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.call import Cat, Slice
from ..ir.digits import Axis, extent, split
from ..ir.expr import BoundFusion, BoundTensor, Expr, Value
from ..ir.op import Expand, Reduce, Reshape, StreamCat
from ..ir.stream import Stream
from .chains import computes_each_element, is_for_kernel, is_held

_MOST_PARTS = 4
"""Each is a copy of what is computed, in one kernel."""


def make_in_parts(fusion: BoundFusion) -> None:
    for expr, op in [(e, e.op) for e in fusion.exprs if isinstance(e.op, Cat)]:
        parts = _Parts(fusion, expr, op.dim)
        if parts.may_be():
            parts.make()


class _Parts:
    """``cat`` and what is computed of it, element by element, up to outputs."""

    def __init__(self, fusion: BoundFusion, cat: Expr, dim: int) -> None:
        self.fusion, self.cat, self.dim = fusion, cat, dim
        self.axis: Axis = cat.output.domain.logical[dim]
        self.count = len(cat.tensors)
        self.names = {t.name for t in fusion.tensors()}
        whole = dict.fromkeys(cat.outputs)
        self.exprs = [cat]
        for e in fusion.exprs:
            if any(t in whole for t in e.tensors):
                self.exprs.append(e)
                whole.update(dict.fromkeys(e.outputs))
        self.whole = whole
        self.pieces: dict[BoundTensor, list[BoundTensor]] = {}

    def may_be(self) -> bool:
        """Is all that comes of the cat computed element by element, and are the pieces?"""
        extents = {extent(t.domain.logical[self.dim]) for t in self.cat.tensors}
        if not 1 < self.count <= _MOST_PARTS or len(extents) > 1 or 0 in extents or not self._share_axes():
            return False
        makers = self.fusion.producer_of()
        computed = (t in makers and computes_each_element(makers[t]) for t in self.cat.tensors)
        if len(self.exprs) == 1 and not all(computed):
            return False  # nothing but copies: a library's cat, or windows
        if not (all(map(self._goes_by_parts, self.exprs)) and all(map(self._may_be_cut, self.whole))):
            return False
        return not self._rests_on_reduction(makers)  # its kernel walks the whole axis

    def _share_axes(self) -> bool:
        """Have the pieces the axes of the cat beside its own?  One element may be the first rank's, or each one's."""
        whole, *pieces = (t.domain.logical for t in (self.cat.output, *self.cat.tensors))
        return all(a == b for axes in pieces for d, (a, b) in enumerate(zip(axes, whole, strict=True)) if d != self.dim)

    def _rests_on_reduction(self, makers: Mapping[BoundTensor, Expr]) -> bool:
        """Is any of it computed, element by element, of what a kernel reduces?"""
        todo = [t for e in self.exprs for t in e.tensors]
        seen = dict.fromkeys(todo)
        while todo:
            maker = makers.get(todo.pop())
            if maker is None or not is_for_kernel(maker):
                continue
            if isinstance(maker.op, Reduce):
                return True
            todo += [t for t in maker.tensors if t not in seen]
            seen.update(dict.fromkeys(maker.tensors))
        return False

    def _goes_by_parts(self, expr: Expr) -> bool:
        if not all(is_held(t.dtype) for t in (*expr.tensors, *expr.outputs)):
            return False
        return expr is self.cat or (computes_each_element(expr) and not isinstance(expr.op, Expand | Reshape))

    def _may_be_cut(self, tensor: BoundTensor) -> bool:
        domain, outputs = tensor.domain, self.fusion.outputs
        is_whole = self.axis in domain.logical and self.axis in domain.local_axes()
        is_output = tensor in outputs and tensor not in self.fusion.aliases and domain.allocation is None
        is_read = any(tensor in e.tensors for e in self.exprs)
        return is_whole and (is_read != is_output) and domain.allocation is None

    def make(self) -> None:
        """Puts the parts in the place of the whole."""
        mine = dict.fromkeys(self.exprs)
        made: list[Expr] = []
        for expr in self.fusion.exprs:
            made += self._parts_of(expr) if expr in mine else [expr]
        self.fusion.exprs = made

    def _parts_of(self, expr: Expr) -> list[Expr]:
        outer, inner = split(self.axis, extent(self.axis) // self.count)
        out = expr.output
        if expr is self.cat and self._are_pieces(inner):
            self.pieces[out] = list(expr.tensors)
            return self._put_together(out, outer)
        self.pieces[out] = [self._piece(out, j, inner) for j in range(self.count)]
        made: list[Expr] = []
        for j, piece in enumerate(self.pieces[out]):
            if expr is self.cat:
                source = expr.tensors[j]
                sizes = tuple(map(extent, source.domain.logical))
                made.append(_slice(source, piece, (0,) * source.ndim, sizes))
                continue
            inputs = [self._input(v, j, inner, made) for v in expr.inputs]
            made.append(replace(expr, inputs=tuple(inputs), outputs=(piece,)))
        return made + self._put_together(out, outer)

    def _are_pieces(self, inner: Axis) -> bool:
        """Are the tensors of the cat pieces as they are?  Those with one element along its axis are."""
        k, tensors = self.dim, self.cat.tensors
        is_once = len(dict.fromkeys(tensors)) == len(tensors) and not any(t in self.fusion.outputs for t in tensors)
        return is_once and all(t.domain.logical[k] == inner for t in tensors)

    def _put_together(self, out: BoundTensor, outer: Axis) -> list[Expr]:
        if out not in self.fusion.outputs:
            return []
        return [Expr(StreamCat(Stream(outer)), tuple(self.pieces[out]), (out,))]

    def _input(self, value: Value, j: int, inner: Axis, made: list[Expr]) -> Value:
        """Part ``j`` of what an Expr reads."""
        if not isinstance(value, BoundTensor) or self.axis not in value.domain.logical:
            return value
        if value in self.pieces:
            return self.pieces[value][j]
        at, n = value.domain.logical.index(self.axis), extent(inner)
        piece = self._piece(value, j, inner)
        starts = tuple(j * n if k == at else 0 for k in range(value.ndim))
        stops = tuple((j + 1) * n if k == at else extent(axis) for k, axis in enumerate(value.domain.logical))
        made.append(_slice(value, piece, starts, stops))
        return piece

    def _piece(self, tensor: BoundTensor, j: int, inner: Axis) -> BoundTensor:
        logical = tuple(inner if axis == self.axis else axis for axis in tensor.domain.logical)
        name = f"{tensor.name}p{j}"
        while name in self.names:
            name += "x"
        self.names.add(name)
        return BoundTensor(name, tensor.dtype, replace(tensor.domain, logical=logical, allocation=None))


def _slice(x: BoundTensor, out: BoundTensor, starts: tuple[int, ...], stops: tuple[int, ...]) -> Expr:
    return Expr(Slice(starts, stops, (1,) * x.ndim), (x,), (out,))
