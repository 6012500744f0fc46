"""Moving a tensor between placements, with autograd: one fusion of one op each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ..errors import PlacementError
from ..executor.agreement import failures_told
from ..frontend import FusionDefinition
from ..frontend.detection import has_dtensor
from ..ir import DataType
from ..mesh import DeviceMesh
from ..mesh.groups import world_key
from .fused import PLAIN, FusedModule, FusedOp
from .placed_spec import FusionSpec
from .placement import TensorPlacement, define, move, place
from .refused_calls import refusing_beside_dtensors
from .timer import FusionTimer

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from .placement import Placements

    Fixed = Placement | tuple[Placement, ...] | TensorPlacement


@refusing_beside_dtensors
def redistribute(
    x: torch.Tensor,
    mesh: DeviceMesh,
    source: Placements,
    target: Placements,
    *,
    grad: Placements | None = None,
    dtype: torch.dtype | None = None,
    unsharded: Sequence[int] | None = None,
    timer: FusionTimer | None = None,
) -> torch.Tensor:
    """Move a tensor to another placement: the local tensor of ``target`` from the local tensor ``x`` of ``source``.

    Shard to Replicate is an all-gather, Replicate to Shard the copy of a slice, Partial to Replicate an all-reduce,
    Partial to Shard a reduce-scatter, Shard to another Shard an all-to-all.

    x: this rank's part, of any shape and dtype.
    unsharded: the shape of the whole x, where local tensors are shards that differ in size.
    grad: where the gradient of the result arrives, as ``target`` by default; ``Partial()`` where each rank holds a
    summand of it (what a column-parallel matmul leaves).  The gradient of x is placed as x is, whole for a partial x.
    dtype: that of the result, to which it is rounded on arrival; its gradient comes back in x's.
    Raises PlacementError and ModuleArgumentError.
    """
    wanted = target if grad is None else grad
    if torch.compiler.is_compiling():
        if has_dtensor((x,)):
            raise PlacementError("x", cast("Any", x).placements, "torch.compile", "call its redistribute()")
        text = _text(mesh, source, target, wanted, dtype, timer)
        return Redistribution.library_op([x], text, None if unsharded is None else list(unsharded))[0]
    try:
        move = _made(world_key(), mesh, _fixed(source), _fixed(target), _fixed(wanted), dtype, timer)
        return move(x, unsharded=unsharded)
    except PlacementError:
        with failures_told(mesh.ranks):
            raise


class Redistribution(FusedModule):
    """What ``redistribute`` does between three placements, as a module.  dtype: that of the result, by name."""

    family = "redistribute"

    def __init__(
        self, mesh: DeviceMesh, source: Placements, target: Placements, grad: Placements, dtype: str | None = None
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self._source = TensorPlacement.of("source", source, mesh)
        self._target = TensorPlacement.of("target", target, mesh)
        self._grad = TensorPlacement.of("grad", grad, mesh)
        if self._target.is_partial:
            raise PlacementError("target", (target,), "a redistribution", "pass Shard or Replicate")
        self._dtype: str | None = dtype
        self.describe()

    def settings(self) -> dict[str, object]:
        placements = {"source": self._source, "target": self._target, "grad": self._grad}
        return {"mesh": self.mesh, **placements, "dtype": self._dtype}

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        if type(x) not in PLAIN and has_dtensor((x,)):
            return self.on_dtensor(self._forward, x, self._source, unsharded, (self._target, self._grad))
        return self._forward(x, unsharded=unsharded)

    def _forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        return self.run((x,), unsharded)[0]

    def _check_gradient(self, target: TensorPlacement, grad: TensorPlacement) -> None:
        """Resolved.  Raises PlacementError for a gradient that has not the size of the result on each rank."""
        assert self.mesh is not None, "the constructor takes no None"
        if any(n > 1 and a != b for n, a, b in zip(self.mesh.shape, target.shards, grad.shards, strict=True)):
            advice = "pass Shard where target has it, and Partial() or Replicate() elsewhere"
            raise PlacementError("grad", (", ".join(grad.letters()),), "target, as which the gradient is cut", advice)

    def whole(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> Sequence[int] | None:
        return tensors[0].shape if self._source.is_uncut else unsharded

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        (x,), mesh = tensors, self.mesh
        said = (("source", self._source), ("target", self._target), ("grad", self._grad))
        whole = self.whole(tensors, unsharded)
        placements = {name: p.resolve(name, x.ndim).for_shape(mesh, whole) for name, p in said}
        self._check_gradient(placements["target"], placements["grad"])
        dtype = DataType.from_torch(x.dtype)
        result_dtype = dtype if self._dtype is None else DataType.from_torch(getattr(torch, self._dtype))
        return _op(_Move(ndim=x.ndim, dtype=dtype, result_dtype=result_dtype, mesh=mesh, **placements))


@lru_cache(maxsize=256)
def _made(
    world: tuple[int, int],
    mesh: DeviceMesh,
    source: Fixed,
    target: Fixed,
    grad: Fixed,
    dtype: torch.dtype | None,
    timer: FusionTimer | None,
) -> Redistribution:
    move = Redistribution(mesh, source, target, grad, None if dtype is None else str(dtype).removeprefix("torch."))
    move.timer = timer
    return move


def _fixed(placements: Placements) -> Fixed:
    """A key."""
    if isinstance(placements, str):  # refused as one placement, not as its letters
        return cast("Any", placements)
    return tuple(placements) if isinstance(placements, Sequence) else placements


def _text(
    mesh: DeviceMesh,
    source: Placements,
    target: Placements,
    grad: Placements,
    dtype: torch.dtype | None,
    timer: FusionTimer | None,
) -> str:
    """What ``Redistribution(...).text`` is, in words that torch.compile knows."""
    words = ",".join(
        f'"{name}":[{",".join([_word(name, p) for p in _entries(placements)])}]'
        for name, placements in (("source", source), ("target", target), ("grad", grad))
    )
    typed = "null" if dtype is None else f'"{dtype}"'.replace("torch.", "")
    timed = "" if timer is None else f',"timer":{timer.number}'
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f'{{"mesh":{mesh.text},{words},"dtype":{typed}{timed},"rank":{rank}}}'


def _entries(placements: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", placements) if isinstance(placements, Sequence) else (placements,)


def _word(name: str, placement: Any) -> str:
    """Raises PlacementError for what `TensorPlacement.of` refuses."""
    if placement.is_shard():
        return f'"S{placement.dim}"'
    if placement.is_replicate():
        return '"R"'
    kind = type(placement).__name__  # Dynamo cannot print all that torch has
    if kind != "Partial" or placement.reduce_op != "sum":
        raise PlacementError(name, (kind,), "a redistribution", "pass torch's Shard, Replicate or Partial()")
    return '"P"'


@dataclass(frozen=True, kw_only=True)
class _Move(FusionSpec):
    result_dtype: DataType
    source: TensorPlacement
    target: TensorPlacement
    grad: TensorPlacement


@lru_cache(maxsize=256)
def _op(spec: _Move) -> FusedOp:
    forward = _definition(spec, spec.source, spec.target, (spec.dtype, spec.result_dtype))
    backward = _definition(spec, spec.grad, spec.source.gradient(), (spec.result_dtype, spec.dtype))
    return FusedOp(forward, backward, 1, (), (spec.source,), (spec.grad,), (0,), is_view=True)


def _definition(
    spec: _Move, source: TensorPlacement, target: TensorPlacement, dtypes: tuple[DataType, DataType]
) -> FusionDefinition:
    """(x of the first dtype and of ``source``) -> (x of the second and of ``target``)."""
    with FusionDefinition() as fd:
        x = define(fd, spec.mesh, source, [-1] * spec.ndim, dtypes[0])
        moved = fd.ops.set(x) if source == target else move(fd, x, spec.mesh, source, target)
        if dtypes[0] != dtypes[1]:
            moved = fd.ops.cast(moved, dtype=dtypes[1])
            place(moved, spec.mesh, target)  # which tells the shape of its local tensor where torch.compile asks for it
        fd.add_output(moved)
    return fd
