"""Which axes of a definition must have one extent: what tells an unsharded size without asking other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

from ..ir.call import Call
from ..ir.domain import IterDomain
from ..ir.fusion import Fusion, Record
from ..ir.op import (
    Broadcast,
    Cast,
    Expand,
    Full,
    Iota,
    Permute,
    Pointwise,
    Random,
    Reduce,
    Set,
    SizeOf,
    Squeeze,
)
from ..ir.scalar import Scalar
from ..ir.tensor_view import TensorView
from ..ops.torch_calls import TORCH_CALLS

Meeting = tuple[list[IterDomain], list[IterDomain]]
"""Axes of what a record reads that have one extent, or 1; and those of what it makes that have the longest's."""


def equal_extents(fusion: Fusion, ones: Collection[IterDomain] = ()) -> Mapping[IterDomain, IterDomain]:
    """A representative for each logical axis; axes of one representative have one extent.

    ones: axes of inputs that are known to have one element.  Other symbolic axes of inputs count as longer.  One that
    an op made (a reshape to -1) may come out as 1 and be broadcast: two axes that meet it need not be equally long.
    """
    classes = _Classes(ones)
    for declared in fusion.inputs:
        if isinstance(declared.val, TensorView):
            classes.add_long(axis for axis in declared.val.domain.logical if axis not in classes.ones)
    measured: dict[Scalar, IterDomain] = {}
    for record in fusion.records:
        if isinstance(record.op, SizeOf) and len(record.op.dims) == 1:
            of, (dim,) = cast(TensorView, record.inputs[0]), record.op.dims
            measured[cast(Scalar, record.outputs[0])] = of.domain.logical[dim]
        made = [v for v in record.outputs if isinstance(v, TensorView)]
        classes.add_long(axis for tv in made for axis in tv.domain.logical if axis.extent >= 0)
        for meeting in (*_meetings(record, made), *_as_measured(record, made, measured)):
            classes.meet(*meeting)
    return {axis: classes.find(axis) for tv in fusion.tensors() for axis in tv.domain.logical}


class _Classes:
    """``long``: representatives of axes that are not broadcast.  ``ones``: of those that have one element."""

    def __init__(self, ones: Collection[IterDomain]) -> None:
        self.parent: dict[IterDomain, IterDomain] = {}
        self.long: set[IterDomain] = set()
        self.ones = set(ones)

    def find(self, axis: IterDomain) -> IterDomain:
        while axis in self.parent:
            axis = self.parent[axis]
        return axis

    def add_long(self, axes: Iterable[IterDomain]) -> None:
        self.long.update(axis for axis in axes if axis.extent != 1)

    def meet(self, read: Sequence[IterDomain], made: Sequence[IterDomain]) -> None:
        """Join the axes that are not broadcast; where any may be, only the one that all others are broadcast to."""
        found = list(dict.fromkeys(map(self.find, read)))
        longer = [axis for axis in found if axis.extent != 1 and axis not in self.ones]
        equal = [axis for axis in longer if axis in self.long]
        if not equal and len(longer) > 1:
            return
        equal = equal or longer or found[:1]
        for axis in (*equal, *made):
            self.join(equal[0], axis)

    def join(self, a: IterDomain, b: IterDomain) -> None:
        a, b = self.find(a), self.find(b)
        if a is b:
            return
        self.parent[b] = a
        for marked in (self.long, self.ones):
            if b in marked:
                marked.remove(b)
                marked.add(a)


def _meetings(record: Record, made: Sequence[TensorView]) -> list[Meeting]:
    """How the axes of ``record`` belong together."""
    ins = [v for v in record.inputs if isinstance(v, TensorView)]
    if not made or not ins:
        return []
    to = made[0].domain.logical
    x = ins[0].domain.logical
    op = record.op
    match op:
        case Pointwise() | Cast() | Set():
            backwards = range(1, len(to) + 1)
            return [([t.domain.logical[-k] for t in ins if t.ndim >= k], [to[-k]]) for k in backwards]
        case Call():
            return _named(op, ins, made)
        case Permute():
            return [([x[d]], [to[k]]) for k, d in enumerate(op.dims)]
        case Broadcast():
            return _one_by_one(x, [axis for axis, new in zip(to, op.new, strict=True) if not new])
        case Squeeze() | Reduce():
            return _one_by_one([a for k, a in enumerate(x) if k not in op.axes], to)
        case Expand():
            kept = [not isinstance(n, Scalar) and n == -1 for n in op.shape]
            return [([a] if is_kept else [a, b], [b]) for a, b, is_kept in zip(x, to, kept, strict=True)]
        case _:
            return []


def _as_measured(record: Record, made: Sequence[TensorView], measured: Mapping[Scalar, IterDomain]) -> list[Meeting]:
    """Axes of what is filled or drawn by the size of another tensor's."""
    if not isinstance(record.op, Full | Iota | Random):
        return []
    sizes = zip(record.op.shape, made[0].domain.logical, strict=True)
    return [([measured[n]], [axis]) for n, axis in sizes if isinstance(n, Scalar) and n in measured]


def _one_by_one(read: Sequence[IterDomain], made: Sequence[IterDomain]) -> list[Meeting]:
    return [([a], [b]) for a, b in zip(read, made, strict=True)]


def _named(op: Call, ins: Sequence[TensorView], outs: Sequence[TensorView]) -> list[Meeting]:
    columns: dict[str, Meeting] = {}
    signature = TORCH_CALLS[op.name].signature([t.shape for t in ins], op)
    for at, views, names in ((0, ins, signature.inputs), (1, outs, signature.outputs)):
        for t, axes in zip(views, names, strict=True):
            for name, axis in zip(axes, t.domain.logical, strict=True):
                columns.setdefault(name, ([], []))[at].append(axis)
    return [meeting for meeting in columns.values() if meeting[0]]
