"""rank_axis: a local definition with collectives in it as a fusion over the mesh of their ranks.

What each rank has of its own is one tensor with a leading axis of the ranks, which the mesh shards; a collective then
is a sum over that axis, or a change of its sharding, and everything else does to each rank's part what it did before.
What comes from a collective is alike on all ranks, and has no such axis.

before (what a rank does; ``T0``, ``T1`` of [-1, 64])::

    T2 = fd.ops.all_reduce_sum(T0)
    T3 = fd.ops.add(T2, T1)
    T4 = fd.ops.sum(T3, dims=[1])

after, on 2 ranks (``T0``, ``T1`` of [2, -1, 64], axis 0 on the mesh)::

    T2 = fd.ops.sum(T0, dims=[0])
    T3 = fd.ops.add(T2, T1)
    T4 = fd.ops.sum(T3, dims=[2])

Nothing is taken to be alike that is not by construction: an input may differ between ranks, as it may in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ..frontend.definition import FusionDefinition
from ..ir.base_op import BaseOp
from ..ir.fusion import FusionInput, Record, Val
from ..ir.op import (
    Broadcast,
    Cast,
    Expand,
    Full,
    Permute,
    Pointwise,
    RecordOp,
    Reduce,
    Reshape,
    Set,
    SizeOf,
    Squeeze,
)
from ..ir.scalar import Scalar
from ..ir.tensor_view import TensorView
from ..mesh import DeviceMesh, ParallelType
from .aten_collectives import GATHERING, SCATTERING, Collective
from .compile_errors import GroupSizeError, UntranslatableError


@dataclass(frozen=True)
class MeshDefinition:
    """``fd``: over a mesh.  ``input_parts``, ``output_parts``: has each tensor the leading axis of the ranks?"""

    fd: FusionDefinition
    input_parts: tuple[bool, ...]
    output_parts: tuple[bool, ...]


def on_mesh(local: FusionDefinition, mesh: DeviceMesh) -> MeshDefinition:
    """Raises ``UntranslatableError`` for an op that has no form with an axis of the ranks; ``GroupSizeError``."""
    lift = _Lift(mesh)
    with lift.fd:
        for declared in local.fusion.inputs:
            lift.add_input(declared)
        for record in local.fusion.records:
            lift.add(record)
        for tv in local.fusion.outputs:
            lift.add_output(tv)
    tensors = [i.val for i in local.fusion.inputs if isinstance(i.val, TensorView)]
    return MeshDefinition(
        lift.fd,
        tuple(lift.is_part(tv) for tv in tensors),
        tuple(lift.is_part(tv) for tv in local.fusion.outputs),
    )


class _Lift:
    """``now``: what stands for each value of the local definition.  ``parts``: those that have the axis of the ranks"""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.fd = FusionDefinition()
        self.fd.fusion.wraps_integers = True
        self.now: dict[Val, Val] = {}
        self.parts: dict[TensorView, None] = {}

    def is_part(self, tv: Val) -> bool:
        return tv in self.parts

    def tensor(self, tv: Val) -> TensorView:
        return cast(TensorView, self.now[tv])

    def place(self, tv: TensorView, *, is_part: bool) -> TensorView:
        tv.set_device_mesh(self.mesh)
        if is_part:
            tv.axis(0).parallelize(ParallelType.mesh_x)
        return tv

    def add_input(self, declared: FusionInput) -> None:
        val = declared.val
        if isinstance(val, Scalar):
            self.now[val] = self.fd.define_scalar(dtype=val.dtype)
            return
        if val.is_cpu:
            raise UntranslatableError(val.name, "on the CPU", "a tensor of the GPUs beside a collective")
        order = [val.ndim, *declared.stride_order] if declared.stride_order else None
        made = self.fd.define_tensor(shape=[self.mesh.size, *val.shape], dtype=val.dtype, stride_order=order)
        self.now[val] = self.place(made, is_part=True)
        self.parts[val] = None

    def add_output(self, tv: TensorView) -> None:
        """In the same order in memory; the axis of the ranks has one element on each and is outermost."""
        made, allocation = self.tensor(tv), tv.domain.allocation
        if made in self.fd.fusion.outputs or made.domain.allocation is not None:
            made = self.fd.ops.set(made)
        self.place(made, is_part=self.is_part(tv))
        order = None
        if allocation is not None:
            outer = [allocation.index(axis) for axis in tv.domain.logical]
            order = [len(outer) - 1 - place for place in outer]
            order = [len(outer), *order] if self.is_part(tv) else order
        self.fd.add_output(made, stride_order=order)

    def add(self, record: Record) -> None:
        op: BaseOp = record.op
        if isinstance(op, Collective):
            self.now[record.outputs[0]] = self.collective(record, op)
            return
        is_part = any(map(self.is_part, record.inputs))
        values = [self.operand(v, record, is_part=is_part) for v in record.inputs]
        outputs: list[Val] = []
        for out in record.outputs:
            if isinstance(out, Scalar):
                outputs.append(self.fd.fusion.new_scalar(out.dtype))
            else:
                outputs.append(self.fd.fusion.new_tensor([self.mesh.size] * is_part + [*out.shape], out.dtype))
                if is_part:
                    self.parts[out] = None
            self.now[out] = outputs[-1]
        named = record.op.with_numbers(self.renamed)
        self.fd.fusion.record(_lifted(named, self.mesh.size) if is_part else _known(named), values, outputs)

    def operand(self, value: Val, record: Record, *, is_part: bool) -> Val:
        """Beside the axis of the ranks: tensors align at their last axes, so that it must come before all others."""
        if isinstance(value, Scalar):
            if value.is_literal and value not in self.now:
                self.now[value] = self.fd.fusion.new_scalar(value.dtype, value.value, is_literal=True)
            return self.now[value]
        made = self.tensor(value)
        if not is_part or not isinstance(record.op, Pointwise) or not self.is_part(value):
            return made
        missing = max(v.ndim for v in record.inputs if isinstance(v, TensorView)) - value.ndim
        flags = [False, *[True] * missing, *[False] * value.ndim]
        return self.fd.ops.broadcast(made, flags) if missing else made

    def renamed(self, value: Scalar) -> Any:
        return value if value.is_literal else self.now[value]

    def collective(self, record: Record, op: Collective) -> TensorView:
        (x,), name, ops = record.inputs, op.name, self.fd.ops
        if op.ranks not in (None, self.mesh.size):
            raise GroupSizeError(name, op.ranks, self.mesh.size)
        if not isinstance(x, TensorView) or not self.is_part(x):
            raise UntranslatableError(f"what {name} is of", "alike on all ranks", "a tensor of each rank's own")
        part, out = self.tensor(x), record.outputs[0]
        shape = list(cast(TensorView, out).shape)
        if name == GATHERING:
            whole = self.place(ops.set(part), is_part=False)
            return ops.reshape(whole, _merged(shape))
        if name == SCATTERING:
            self.parts[cast(TensorView, out)] = None
            cut = ops.reshape(part, [self.mesh.size, self.mesh.size, *shape])
            self.place(cut, is_part=True)
            return self.place(ops.sum(cut, [0], dtype=x.dtype), is_part=True)
        reduce = {"all_reduce_sum": ops.sum, "all_reduce_max": ops.max, "all_reduce_min": ops.min}[name]
        reduced = ops.sum(part, [0], dtype=x.dtype) if name == "all_reduce_sum" else reduce(part, [0])
        return self.place(reduced, is_part=False)


def _merged(shape: Sequence[int]) -> list[int]:
    """Of a reshape that joins the axis of the ranks and rows: one size follows from the others."""
    if len([n for n in shape if n < 0]) > 1:
        raise UntranslatableError("a gather", f"of shape {list(shape)}", "one of at most one size that is no number")
    return list(shape)


def _lifted(op: RecordOp, ranks: int) -> RecordOp:
    """``op`` with a leading axis, which it leaves alone."""
    match op:
        case Pointwise() | Cast() | Set():
            return op
        case Reduce() | Squeeze():
            return replace(op, axes=tuple(a + 1 for a in op.axes))
        case SizeOf():
            return replace(op, dims=tuple(d + 1 for d in op.dims))
        case Broadcast():
            return replace(op, new=(False, *op.new))
        case Permute():
            return replace(op, dims=(0, *(d + 1 for d in op.dims)))
        case Expand() | Reshape():
            return replace(op, shape=(ranks, *op.shape))
        case _:
            raise UntranslatableError("an op beside a collective", op.name, "a pointwise op, a view or a reduction")


def _known(op: RecordOp) -> RecordOp:
    """``op`` of what all ranks have alike, as it is."""
    if not isinstance(op, Full):
        _lifted(op, 1)
    return op
