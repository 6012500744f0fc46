"""Moving a tensor between placements, with autograd: one fusion of one op each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch

from ..errors import PlacementError
from ..executor.agreement import failures_told
from ..frontend import FusionDefinition
from ..frontend.detection import has_dtensor
from ..ir import DataType
from ..mesh import DeviceMesh
from .dtensor import Given, Result, on_local_tensors
from .fused import FusedOp, FusionTimer
from .placement import TensorPlacement, define, move

if TYPE_CHECKING:
    from .placement import Placements


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
    """The local tensor of ``target`` from the local tensor ``x`` of ``source``.

    Shard to Replicate is an all-gather, Replicate to Shard the copy of a slice, Partial to Replicate an all-reduce,
    Partial to Shard a reduce-scatter, Shard to another Shard an all-to-all.  x: any shape and dtype.
    unsharded: the shape of the whole x, where local tensors are shards that differ in size.
    grad: where the gradient of the result arrives, as ``target`` by default; ``Partial()`` where each rank holds a
    summand of it (what a column-parallel matmul leaves).  The gradient of x lives as x does, whole for a partial x.
    dtype: that of the result, to which it is rounded on arrival; its gradient comes back in x's.
    Raises PlacementError.
    """
    try:
        said = (source, target, target if grad is None else grad)
        return _redistributed(x, mesh, said, x.dtype if dtype is None else dtype, unsharded, timer)
    except PlacementError:
        with failures_told(mesh.ranks):
            raise


def _redistributed(
    x: torch.Tensor,
    mesh: DeviceMesh,
    said: tuple[Placements, Placements, Placements],
    dtype: torch.dtype,
    unsharded: Sequence[int] | None,
    timer: FusionTimer | None,
) -> torch.Tensor:
    placements = [
        TensorPlacement.of(name, value, mesh).resolve(name, x.ndim)
        for name, value in zip(("source", "target", "grad"), said, strict=True)
    ]
    if placements[1].is_partial:
        raise PlacementError("target", (said[1],), "a redistribution", "pass Shard or Replicate")
    if has_dtensor((x,)) or placements[0].is_uncut:
        unsharded = tuple(x.shape)
    placements = [p.for_shape(mesh, unsharded) for p in placements]
    op = _op(_Move(x.ndim, DataType.from_torch(x.dtype), DataType.from_torch(dtype), mesh, id(mesh), *placements))
    if unsharded is not None and has_dtensor((x,)):
        result = Result(tuple(unsharded), placements[1], placements[2])
        here = partial(op.apply, timer, unsharded)
        return on_local_tensors(here, mesh, [Given("x", x, placements[0])], [result])[0]
    return op.apply(timer, unsharded, x)[0]


@dataclass(frozen=True)
class _Move:
    ndim: int
    dtype: DataType
    result_dtype: DataType
    mesh: DeviceMesh
    mesh_id: int
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
        fd.add_output(fd.ops.cast(moved, dtype=dtypes[1]))
    return fd
