"""Device meshes, process groups and the life of a rank."""

from shardfuse.mesh.device_mesh import DeviceMesh, ParallelType
from shardfuse.mesh.groups import Team, current_rank, process_group, world_size

__all__ = ["DeviceMesh", "ParallelType", "Team", "current_rank", "process_group", "world_size"]
