"""Fusions on DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardfuse.compat.nvfuser_direct.nvfuser_definition import FusionDefinition
from shardfuse.frontend.placements import placements_of, unsharded_strides
from shardfuse.frontend.shard_order import dtensor_of
from shardfuse.ir.digits import extent

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def execute_with_dtensors(fd: FusionDefinition, in_dtensors: Iterable[DTensor]) -> list[DTensor]:
    """Run ``fd`` on the local pieces; outputs come as DTensors on the mesh of the inputs."""
    from torch.distributed.tensor import Replicate

    inputs = list(in_dtensors)
    mesh = inputs[0].device_mesh
    outputs = fd.execute([x.to_local() for x in inputs])
    plan = fd.fec.native.last_plan
    assert plan is not None, "it has run"
    found: list[DTensor] = []
    for out, made in zip(outputs, plan.fusion.outputs, strict=True):
        domain = made.domain
        placements = placements_of(domain)[0] if domain.mesh is not None else [Replicate()] * mesh.ndim
        shape = [extent(axis) for axis in domain.logical]
        found.append(dtensor_of(out, mesh, placements, shape, unsharded_strides(domain)))
    return found
