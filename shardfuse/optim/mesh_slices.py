"""Tensors on slices of one torch mesh: what is the same on which ranks.

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    norm: Shard(0) on mesh["dp"]                     FSDP's; ranks 0 and 2 hold it, and ranks 1 and 3 hold it, too
    linear: (Shard(0), Shard(1)) on mesh             all four hold a piece

What is on a slice has no placement for the other dimensions of the mesh.  Where a call has tensors that are spread
along these, it is the same on all ranks along them, as where FSDP shards what tensor parallelism has left alone.

Slices may be flattened dimensions, or parts of one that ``_unflatten`` has made: ranks of the whole mesh are numbered
row by row, and a rank's number is written in digits, of which each slice varies some.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..mesh import DeviceMesh, current_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh


class Holders(NamedTuple):
    """The ranks that hold what is on a mesh: those of the mesh, and those of other slices that have a copy of it.

    copies: how many there are; copy: which of them this rank has.
    """

    ranks: tuple[int, ...]
    copies: int
    copy: int


class _Digits:
    """The places of ranks in a mesh of torch, as digits, such that each slice of it varies some of them.

    radices: by digit, the last one first.
    """

    def __init__(self, root: DeviceMesh, slices: Sequence[DeviceMesh]) -> None:
        self.places = {rank: place for place, rank in enumerate(root.ranks)}
        self._ranks = root.ranks
        ends = {1, root.size}
        for mesh in (root, *slices):
            for dim, extent in enumerate(mesh.shape):
                inner = prod(mesh.shape[dim + 1 :])
                along = [self.places[mesh.ranks[k * inner]] for k in range(extent)]
                strides = {high - low for low, high in pairwise(along)}
                if len(strides) == 1:  # not those of a dim of one rank, or of several that are not side by side
                    ends |= {min(strides), min(strides) * extent}
        found = sorted(ends)
        self.is_whole = found[0] > 0 and all(high % low == 0 for low, high in pairwise(found))
        self.radices = tuple(high // low for low, high in pairwise(found)) if self.is_whole else ()

    def of(self, rank: int) -> tuple[int, ...]:
        place, digits = self.places[rank], list[int]()
        for radix in self.radices:
            place, digit = divmod(place, radix)
            digits.append(digit)
        return tuple(digits)

    def varied(self, mesh: DeviceMesh) -> frozenset[int] | None:
        """The digits that the ranks of ``mesh`` differ in, if it has all ranks that differ in these alone."""
        if not self.is_whole:
            return None
        along = [len({*each}) for each in zip(*map(self.of, mesh.ranks), strict=True)]
        is_box = prod(along) == mesh.size and all(n in (1, r) for n, r in zip(along, self.radices, strict=True))
        return frozenset(k for k, n in enumerate(along) if n > 1) if is_box else None

    def box(self, digits: frozenset[int]) -> tuple[int, ...]:
        """The ranks that differ from this one in ``digits`` alone."""
        own = self.of(current_rank())
        is_fixed = [k for k in range(len(own)) if k not in digits]
        places = ((rank, self.of(rank)) for rank in self._ranks)
        return tuple(rank for rank, place in places if all(place[k] == own[k] for k in is_fixed))


def holders_of(meshes: Sequence[DeviceMesh]) -> list[Holders]:
    """Of what is on each mesh, where a call has tensors on all of them."""
    slices: dict[int, tuple[Any, dict[DeviceMesh, None]]] = {}  # a call lists many tensors on few meshes
    roots = [_root_of(mesh) for mesh in meshes]
    for root, mesh in zip(roots, meshes, strict=True):
        slices.setdefault(id(root), (root, {}))[1][mesh] = None
    found = {key: _placed(root, list(its)) for key, (root, its) in slices.items()}
    return [found[id(root)][mesh] for root, mesh in zip(roots, meshes, strict=True)]


def mesh_of(tensor: Any) -> DeviceMesh:
    """Of a DTensor; meshes are made once for all tensors on them."""
    mesh = tensor.device_mesh
    return _made(mesh, id(mesh._get_root_mesh()))


@lru_cache(maxsize=64)
def _made(mesh: TorchDeviceMesh, root: int) -> DeviceMesh:
    """root: the mesh's, by which equal ones differ; its number stays its own, since the mesh keeps it."""
    return DeviceMesh.from_torch(mesh)


def _root_of(mesh: DeviceMesh) -> Any:
    """The mesh of torch that torch has sliced it from, or that it is; None for another one."""
    origin = cast("Any", mesh.origin)
    return None if origin is None else origin._get_root_mesh()


def _placed(root: Any, slices: Sequence[DeviceMesh]) -> dict[DeviceMesh, Holders]:
    """Those of one root; None is that of meshes that are no slices."""
    found = {mesh: Holders(mesh.ranks, 1, 0) for mesh in slices}
    here = [mesh for mesh in slices if current_rank() in mesh.ranks]
    if root is None or len(here) < 2:
        return found
    digits = _Digits(DeviceMesh.from_torch(root), here)
    varied = {mesh: dims for mesh in here if (dims := digits.varied(mesh)) is not None}
    everything = frozenset[int]().union(*varied.values())
    own = digits.of(current_rank())
    for mesh, dims in varied.items():
        copies, copy = 1, 0
        for k in sorted(everything - dims):
            copies, copy = copies * digits.radices[k], copy * digits.radices[k] + own[k]
        if copies > 1:
            found[mesh] = Holders(digits.box(everything), copies, copy)
    return found
