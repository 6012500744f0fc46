"""Which axes of a definition must have one extent: what tells an unsharded size without asking other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.call import Call
from ..ir.domain import IterDomain
from ..ir.fusion import Fusion, Record
from ..ir.op import Broadcast, Cast, Expand, Permute, Pointwise, Reduce, Set, Squeeze
from ..ir.tensor_view import TensorView
from ..ops.torch_calls import TORCH_CALLS


def equal_extents(fusion: Fusion) -> Mapping[IterDomain, IterDomain]:
    """A representative for each logical axis; axes of one representative have one extent, or an extent of 1."""
    classes = _Classes()
    for record in fusion.records:
        for places in _meetings(record):
            for axis in places[1:]:
                classes.join(places[0], axis)
    return {axis: classes.find(axis) for tv in fusion.tensors() for axis in tv.domain.logical}


class _Classes:
    def __init__(self) -> None:
        self.parent: dict[IterDomain, IterDomain] = {}

    def find(self, axis: IterDomain) -> IterDomain:
        while axis in self.parent:
            axis = self.parent[axis]
        return axis

    def join(self, a: IterDomain, b: IterDomain) -> None:
        a, b = self.find(a), self.find(b)
        if a is not b:
            self.parent[b] = a


def _meetings(record: Record) -> list[list[IterDomain]]:
    """The groups of axes that ``record`` makes equal; axes of a static 1 are broadcast and say nothing."""
    out = record.outputs[0]
    ins = [v for v in record.inputs if isinstance(v, TensorView)]
    if not isinstance(out, TensorView) or not ins:
        return []
    to = out.domain.logical
    x = ins[0].domain.logical
    op = record.op
    match op:
        case Pointwise() | Cast() | Set():
            lined_up = [[t.domain.logical[-k] for t in (*ins, out) if t.ndim >= k] for k in range(1, len(to) + 1)]
            return [[axis for axis in column if axis.extent != 1] for column in lined_up]
        case Call():
            return _named(op, ins, [v for v in record.outputs if isinstance(v, TensorView)])
        case Permute():
            return [[x[d], to[k]] for k, d in enumerate(op.dims)]
        case Broadcast():
            kept = [axis for axis, new in zip(to, op.new, strict=True) if not new]
            return [[a, b] for a, b in zip(x, kept, strict=True)]
        case Squeeze() | Reduce():
            return [[a, b] for a, b in zip([a for k, a in enumerate(x) if k not in op.axes], to, strict=True)]
        case Expand():
            return [[a, b] for a, b in zip(x, to, strict=True) if a.extent != 1]
        case _:
            return []


def _named(op: Call, ins: Sequence[TensorView], outs: Sequence[TensorView]) -> list[list[IterDomain]]:
    columns: dict[str, list[IterDomain]] = {}
    signature = TORCH_CALLS[op.name].signature([t.shape for t in ins], op)
    for t, axes in zip((*ins, *outs), (*signature.inputs, *signature.outputs), strict=True):
        for name, axis in zip(axes, t.domain.logical, strict=True):
            columns.setdefault(name, []).append(axis)
    return [[axis for axis in column if axis.extent != 1] for column in columns.values()]
