"""Tensors on slices of one torch mesh: what is the same on which ranks.

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    norm: Shard(0) on mesh["dp"]                     FSDP's; ranks 0 and 2 hold it, and ranks 1 and 3 hold it, too
    linear: (Shard(0), Shard(1)) on mesh             all four hold a piece

What is on a slice has no placement for the other dimensions of the mesh.  Where a call has tensors that are spread
along these, it is the same on all ranks along them, as where FSDP shards what tensor parallelism has left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, cast

from ..mesh import DeviceMesh, current_rank


class Slice(NamedTuple):
    """A mesh as a part of a larger one.  root: that one, or the mesh itself; dims: those of the root that it has."""

    mesh: DeviceMesh
    root: DeviceMesh
    dims: frozenset[int]

    @staticmethod
    def of(mesh: DeviceMesh) -> Slice:
        """Of a mesh of torch, by the mesh that torch has made it from; another one is its own root."""
        origin = cast("Any", mesh.origin)
        own = Slice(mesh, mesh, frozenset(range(mesh.ndim)))
        root = None if origin is None else origin._get_root_mesh()
        if root is None or root is origin:
            return own
        whole = DeviceMesh.from_torch(root)
        places = [whole.coordinate(rank) for rank in mesh.ranks]
        if current_rank() not in mesh.ranks or None in places:
            return own
        along = [set(at) for at in zip(*cast("list[tuple[int, ...]]", places), strict=True)]
        dims = frozenset(dim for dim, found in enumerate(along) if len(found) > 1)
        if prod(whole.shape[dim] for dim in dims) != mesh.size:
            return own
        return Slice(mesh, whole, dims)


class Beside(NamedTuple):
    """A slice beside others.  ranks: all that hold a part of what is on it; copies: how often it is there, copy: which
    of these this rank has.
    """

    ranks: tuple[int, ...]
    copies: int
    copy: int


def beside_others(meshes: Sequence[DeviceMesh]) -> list[Beside]:
    """Each mesh on the ranks of all that are slices of the same one."""
    found: dict[int, Slice] = {}  # a call lists many tensors on few meshes
    keys = [id(mesh if mesh.origin is None else mesh.origin) for mesh in meshes]
    dims: dict[DeviceMesh, frozenset[int]] = {}
    for key, mesh in zip(keys, meshes, strict=True):
        if key not in found:
            s = found[key] = Slice.of(mesh)
            dims[s.root] = dims.get(s.root, frozenset()) | s.dims
    placed = {key: _beside(s, dims[s.root]) for key, s in found.items()}
    return [placed[key] for key in keys]


def _beside(own: Slice, dims: frozenset[int]) -> Beside:
    root, place = own.root, own.root.coordinate(current_rank())
    others = sorted(dims - own.dims)
    if place is None or not others:
        return Beside(own.mesh.ranks, 1, 0)
    copies, copy = 1, 0
    for dim in others:
        copies, copy = copies * root.shape[dim], copy * root.shape[dim] + place[dim]
    return Beside(root.box(current_rank(), [root.parallel_types[dim] for dim in sorted(dims)]), copies, copy)
