"""Device meshes, process groups and the life of a rank."""

from shardfuse.mesh.device_mesh import DeviceMesh, ParallelType
from shardfuse.mesh.groups import Team, current_rank, process_group, world_size
from shardfuse.mesh.process import ProcessContext, fail, finalize, initialize

__all__ = [
    "DeviceMesh",
    "ParallelType",
    "ProcessContext",
    "Team",
    "current_rank",
    "fail",
    "finalize",
    "initialize",
    "process_group",
    "world_size",
]
