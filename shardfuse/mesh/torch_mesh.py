"""torch's own mesh of a `DeviceMesh`, for DTensors: made by the ranks of the mesh alone, out of groups that exist."""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from shardfuse.mesh.device_mesh import DeviceMesh
from shardfuse.mesh.groups import current_rank, default_group, process_group, world_key, world_size

# Weak, since a mesh holds process groups, and those close their connections when they are released.
_meshes: WeakValueDictionary[tuple[tuple[int, int], DeviceMesh, str], TorchDeviceMesh] = WeakValueDictionary()
_lock = threading.Lock()


def torch_mesh_of(mesh: DeviceMesh, device_type: str) -> TorchDeviceMesh:
    """``mesh`` as a `torch.distributed.DeviceMesh`: the one that it was made from, else one for all that are equal.

    Where process groups are still to be made, all ranks of the mesh take part, and no others; `DeviceMesh.to_torch`
    takes the whole world.  Of several dimensions without names, those of the mesh that is made are mesh_y, mesh_x, ...
    Raises NotInitializedError, MeshExceedsWorldError and RankNotInMeshError.
    """
    origin = mesh.origin
    if origin is not None and origin.device_type == device_type:
        return origin
    default_group()
    mesh.validate_in_world(world_size())
    key = world_key(), mesh, device_type
    with _lock:
        known = _meshes.get(key)
    if known is not None:
        return known
    made = _made(mesh, device_type)
    with _lock:
        return _meshes.setdefault(key, made)


def _made(mesh: DeviceMesh, device_type: str) -> TorchDeviceMesh:
    rank = current_rank()
    groups = [process_group(mesh.team(rank, parallel_type)) for parallel_type in mesh.parallel_types]
    if mesh.ndim == 1 and list(mesh.ranks) == sorted(mesh.ranks):
        # Without names it is equal to what init_device_mesh makes, whose DTensors may then meet those on this one.
        return TorchDeviceMesh.from_group(groups[0], device_type, mesh_dim_names=mesh.dim_names)
    names = mesh.dim_names or tuple(parallel_type.value for parallel_type in mesh.parallel_types)
    ranks = torch.tensor(mesh.ranks, dtype=torch.int, device="cpu").reshape(mesh.shape)
    return TorchDeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)
