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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ..frontend.definition import FusionDefinition
from ..ir.expr import Scalar
from ..ir.fusion import FusionInput, Record, Val
from ..ir.tensor_view import TensorView
from ..mesh import DeviceMesh, ParallelType
from ..ops.table import POINTWISE
from .aten_collectives import GATHERING, RECORDED, SCATTERING
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
        if record.op in RECORDED:
            self.now[record.outputs[0]] = self.collective(record)
            return
        is_part = any(map(self.is_part, record.inputs))
        attributes = self.attributes(record, is_part=is_part)
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
        self.fd.fusion.record(record.op, values, outputs, attributes)

    def operand(self, value: Val, record: Record, *, is_part: bool) -> Val:
        """Beside the axis of the ranks: tensors align at their last axes, so that it must come before all others."""
        if isinstance(value, Scalar):
            if value.is_literal and value not in self.now:
                self.now[value] = self.fd.fusion.new_scalar(value.dtype, value.value, is_literal=True)
            return self.now[value]
        made = self.tensor(value)
        if not is_part or record.op not in POINTWISE or not self.is_part(value):
            return made
        missing = max(v.ndim for v in record.inputs if isinstance(v, TensorView)) - value.ndim
        flags = [False, *[True] * missing, *[False] * value.ndim]
        return self.fd.ops.broadcast(made, flags) if missing else made

    def attributes(self, record: Record, *, is_part: bool) -> Mapping[str, object]:
        """Those of the op with a leading axis, which it leaves alone."""
        none: dict[str, Rule] = {}
        rules = _ATTRIBUTES.get(record.op, none if record.op in POINTWISE else None)
        if rules is None or (is_part and not set(record.attributes) <= set(rules)):
            raise UntranslatableError("an op beside a collective", record.op, "a pointwise op, a view or a reduction")
        found: dict[str, object] = {}
        for name, value in record.attributes.items():
            parts = cast("tuple[object, ...] | None", value if isinstance(value, tuple) else None)
            given = value if parts is None else tuple(map(self.renamed, parts))
            found[name] = rules[name](cast("tuple[object, ...]", given), self.mesh.size) if is_part else given
        return found

    def renamed(self, value: object) -> object:
        return self.now[value] if isinstance(value, Scalar) and not value.is_literal else value

    def collective(self, record: Record) -> TensorView:
        (x,), name, ops = record.inputs, record.op, self.fd.ops
        ranks = record.attributes.get("ranks", self.mesh.size)
        if ranks != self.mesh.size:
            raise GroupSizeError(name, cast(int, ranks), self.mesh.size)
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


Rule = Callable[[tuple[object, ...], int], object]
_next: Rule = lambda axes, _: tuple(cast(int, a) + 1 for a in axes)  # noqa: E731
_sized: Rule = lambda shape, ranks: (ranks, *shape)  # noqa: E731
_same: Rule = lambda given, _: given  # noqa: E731
_ATTRIBUTES: dict[str, dict[str, Rule]] = {
    "cast": {"dtype": _same},
    "set": {},
    "size": {"dims": _next},
    **{op: {"axes": _next} for op in ("sum", "prod", "max", "min", "any", "all", "squeeze")},
    "broadcast": {"new": lambda flags, _: (False, *flags)},
    "expand": {"shape": _sized},
    "broadcast_in_dim": {"shape": _sized, "dims": lambda new, _: (0, *(cast(int, d) + 1 for d in new))},
    "reshape": {"shape": _sized},
    "permute": {"dims": lambda order, _: (0, *(cast(int, d) + 1 for d in order))},
    "full": {"shape": _same},
}
