"""Fusions on DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardfuse.compat.nvfuser_direct.definition import FusionDefinition
from shardfuse.mesh import ParallelType

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def execute_with_dtensors(fd: FusionDefinition, in_dtensors: Iterable[DTensor]) -> list[DTensor]:
    """Run ``fd`` on the local pieces; outputs come as DTensors on the mesh of the inputs."""
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    inputs = list(in_dtensors)
    mesh = inputs[0].device_mesh
    outputs = fd.execute([x.to_local() for x in inputs])
    found: list[DTensor] = []
    for out, sharding in zip(outputs, fd.fec.get_output_shardings(), strict=True):
        placements: list[Placement] = []
        for k in range(mesh.ndim):
            axis = sharding.axis_sharded_on(
                (ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z)[mesh.ndim - 1 - k]
            )
            placements.append(Replicate() if axis < 0 else Shard(axis))
        found.append(DTensor.from_local(out, mesh, placements))
    return found
