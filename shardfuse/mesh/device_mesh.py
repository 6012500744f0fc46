"""The device mesh: a box of ranks, of any number of dimensions, and the parallel types that name them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from itertools import product
from math import prod
from typing import Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from shardfuse.base_error import shown
from shardfuse.errors import (
    ArgumentError,
    MeshDimensionError,
    MeshDimNamesError,
    MeshExceedsWorldError,
    MeshRanksError,
    RankNotInMeshError,
    ShardAxisError,
)
from shardfuse.mesh.groups import current_rank


class ParallelType(Enum):
    """What an axis is parallel over: nothing (serial), the chunks of a stream, or the ranks of a mesh dimension.

    `mesh_x` is the last mesh dimension, `mesh_y` the one before, as in nvFuser.
    """

    serial = "serial"
    stream = "stream"
    mesh_x = "mesh_x"
    mesh_y = "mesh_y"
    mesh_z = "mesh_z"
    mesh_3 = "mesh_3"
    mesh_4 = "mesh_4"
    mesh_5 = "mesh_5"
    mesh_6 = "mesh_6"
    mesh_7 = "mesh_7"

    @property
    def is_mesh(self) -> bool:
        """True where it names a mesh dimension."""
        return self in _MESH_TYPES

    @property
    def mesh_index(self) -> int:
        """Place of the named mesh dimension counted from the last: 0 for mesh_x, 1 for mesh_y, ..."""
        return _MESH_TYPES.index(self)

    def mesh_dim(self, ndim: int) -> int:
        """Index of the named dimension in a mesh of `ndim` dimensions, e.g. mesh_x -> ndim - 1.

        Raises MeshDimensionError where it names none of them.
        """
        if not self.is_mesh or _MESH_TYPES.index(self) >= ndim:
            raise MeshDimensionError(
                self.value, f"a mesh of {ndim} dimensions", [kind.value for kind in _MESH_TYPES[:ndim]]
            )
        return ndim - 1 - _MESH_TYPES.index(self)

    def __str__(self) -> str:
        return self.value


_MESH_TYPES = tuple(kind for kind in ParallelType if kind not in (ParallelType.serial, ParallelType.stream))


@runtime_checkable
class _HasToList(Protocol):
    """A numpy array or a torch tensor: what it holds, as nested lists of Python numbers."""

    def tolist(self) -> object: ...


class DeviceMesh:
    """An array of distinct ranks: those that share a tensor.  Immutable; equal and hashed by ranks, shape and names.

    ranks: a range, a nested list or tuple, or an integer numpy array or torch tensor; a flat one is a 1-D mesh.
    dim_names: one string per mesh dimension, outermost first, or None.
    Raises MeshRanksError and MeshDimNamesError.
    """

    __slots__ = ("_coordinates", "_dim_names", "_origin", "_ranks", "_shape", "text")

    def __init__(self, ranks: object, dim_names: Sequence[str] | None = None) -> None:
        nested = ranks.tolist() if isinstance(ranks, _HasToList) else list(ranks) if isinstance(ranks, range) else ranks
        shape = _shape_of(nested)
        flat = tuple(_flatten(nested, shape, ()))
        _check_ranks(flat, shape)
        if dim_names is not None and not _are_names(dim_names, len(shape)):
            raise MeshDimNamesError(tuple(dim_names) if isinstance(dim_names, list) else dim_names, len(shape))
        self._ranks = flat
        self._shape = shape
        self._dim_names = None if dim_names is None else tuple(dim_names)
        self._coordinates = dict(zip(flat, product(*map(range, shape)), strict=True))
        self._origin: TorchDeviceMesh | None = None
        self.text = json.dumps({"ranks": self._nested(), "names": self._dim_names}, separators=(",", ":"))
        """Ranks and names, as they are passed to ops of compiled graphs."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, flat, the last mesh dimension fastest."""
        return self._ranks

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of every mesh dimension, outermost first."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of mesh dimensions."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    @property
    def dim_names(self) -> tuple[str, ...] | None:
        """Names of the mesh dimensions, outermost first, or None."""
        return self._dim_names

    @property
    def parallel_types(self) -> tuple[ParallelType, ...]:
        """Parallel type of every mesh dimension, outermost first, e.g. (mesh_y, mesh_x)."""
        return _MESH_TYPES[: self.ndim][::-1]

    def mesh_dim(self, parallel_type: ParallelType) -> int:
        """Index of the mesh dimension. Raises MeshDimensionError where the mesh has no such dimension."""
        if parallel_type not in self.parallel_types:
            raise MeshDimensionError(parallel_type.value, repr(self), [kind.value for kind in self.parallel_types])
        return parallel_type.mesh_dim(self.ndim)

    def extent(self, parallel_type: ParallelType) -> int:
        """Number of ranks along the mesh dimension. Raises MeshDimensionError."""
        return self._shape[self.mesh_dim(parallel_type)]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The rank's place in the mesh, outermost first; None where the rank is not in the mesh.

        Raises ArgumentError for what is no integer.
        """
        if not hasattr(rank, "__index__"):
            raise ArgumentError("coordinate", "rank", rank, "an integer")
        return self._coordinates.get(rank.__index__())

    def index(self, rank: int, parallel_type: ParallelType) -> int:
        """The rank's place along one mesh dimension. Raises MeshDimensionError and RankNotInMeshError."""
        dim = self.mesh_dim(parallel_type)
        return self._place(rank)[dim]

    def team(self, rank: int, parallel_type: ParallelType) -> tuple[int, ...]:
        """The ranks along one mesh dimension through `rank`, in the mesh's order.

        Raises MeshDimensionError and RankNotInMeshError.
        """
        return self.box(rank, (parallel_type,))

    def box(self, rank: int, parallel_types: Sequence[ParallelType]) -> tuple[int, ...]:
        """The ranks through `rank` along several mesh dimensions, in the mesh's order.

        Raises MeshDimensionError and RankNotInMeshError.
        """
        free = [self.mesh_dim(parallel_type) for parallel_type in parallel_types]
        place = self._place(rank)
        at = [range(n) if d in free else (place[d],) for d, n in enumerate(self._shape)]
        strides = [prod(self._shape[d + 1 :]) for d in range(self.ndim)]
        return tuple(self._ranks[sum(p * s for p, s in zip(where, strides, strict=True))] for where in product(*at))

    def validate_in_world(self, world_size: int) -> None:
        """Raise MeshExceedsWorldError where a rank of the mesh is not in a world of `world_size` ranks."""
        if max(self._ranks) >= world_size:
            raise MeshExceedsWorldError(repr(self), self.size, max(self._ranks), world_size)

    def shard_tensor(
        self,
        tensor: torch.Tensor,
        axis: int,
        rank: int | None = None,
        parallel_type: ParallelType = ParallelType.mesh_x,
    ) -> torch.Tensor:
        """This rank's piece of an unsharded tensor, cut along `axis` as `torch.chunk` cuts, contiguous.

        7 rows over 4 ranks are 2, 2, 2, 1; 5 over 4 are 2, 2, 1, 0. `rank` defaults to this process's rank.
        Raises ShardAxisError, MeshDimensionError and RankNotInMeshError.
        """
        if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError("shard_tensor", "tensor", tensor, "a torch.Tensor")
        if not isinstance(axis, int) or isinstance(axis, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError("shard_tensor", "axis", axis, "an integer")
        if not -tensor.ndim <= axis < tensor.ndim:
            raise ShardAxisError(axis, tensor.ndim)
        index = self.index(current_rank() if rank is None else rank, parallel_type)
        extent = tensor.shape[axis]
        chunk = -(-extent // self.extent(parallel_type))
        start = min(index * chunk, extent)
        return tensor.narrow(axis, start, min(chunk, extent - start)).contiguous()

    @classmethod
    def from_torch(cls, mesh: TorchDeviceMesh) -> DeviceMesh:
        """The same mesh as a `torch.distributed.DeviceMesh`, with its dimension names.  Raises ArgumentError."""
        if not isinstance(mesh, TorchDeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError("DeviceMesh.from_torch", "mesh", mesh, "a torch.distributed.device_mesh.DeviceMesh")
        made = cls(mesh.mesh, mesh.mesh_dim_names)
        made._origin = mesh
        return made

    @property
    def origin(self) -> TorchDeviceMesh | None:
        """The mesh that `from_torch` was given: DTensors on it may be part of a larger mesh's, as FSDP wants them."""
        return self._origin

    def to_torch(self, device_type: str) -> TorchDeviceMesh:
        """The same mesh as a `torch.distributed.DeviceMesh`.

        Collective: torch makes process groups here, so every rank of the world calls it, in the same order.
        Raises MeshExceedsWorldError.
        """
        if dist.is_initialized():
            self.validate_in_world(dist.get_world_size())
        return TorchDeviceMesh(
            device_type, torch.tensor(self._ranks, device="cpu").reshape(self._shape), mesh_dim_names=self._dim_names
        )

    def _place(self, rank: int) -> tuple[int, ...]:
        place = self._coordinates.get(rank)
        if place is None:
            raise RankNotInMeshError(rank, repr(self))
        return place

    def _nested(self) -> list[object]:
        level: list[object] = list(self._ranks)
        for extent in reversed(self._shape[1:]):
            level = [level[i : i + extent] for i in range(0, len(level), extent)]
        return level

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return (self._ranks, self._shape, self._dim_names) == (other._ranks, other._shape, other._dim_names)

    def __hash__(self) -> int:
        return hash((self._ranks, self._shape, self._dim_names))

    def __deepcopy__(self, memo: object) -> DeviceMesh:
        """Itself, which is immutable: the copy of a module is on the mesh of the module."""
        return self

    def __reduce__(self) -> tuple[type[DeviceMesh], tuple[list[object], tuple[str, ...] | None]]:
        """Ranks and names alone: process groups stay in the process that made them."""
        return DeviceMesh, (self._nested(), self._dim_names)

    def __repr__(self) -> str:
        names = "" if self._dim_names is None else f", dim_names={self._dim_names!r}"
        return f"DeviceMesh({self._nested()!r}{names})"


def _shape_of(nested: object) -> tuple[int, ...]:
    """Extents of a nested list or tuple, told by its first elements; a lone number has none."""
    shape: list[int] = []
    while isinstance(nested, (list, tuple)):
        level = cast("Sequence[object]", nested)
        shape.append(len(level))
        if not level:
            raise MeshRanksError("no ranks", "at least one")
        nested = level[0]
    if not shape:
        made = " (DeviceMesh.from_torch(mesh) takes torch's mesh)" if isinstance(nested, TorchDeviceMesh) else ""
        raise MeshRanksError(shown(nested), f"a list of ranks{made}")
    if len(shape) > len(_MESH_TYPES):
        raise MeshRanksError(f"{len(shape)} dimensions", f"at most {len(_MESH_TYPES)}")
    return tuple(shape)


def _flatten(nested: object, shape: tuple[int, ...], place: tuple[int, ...]) -> list[int]:
    """The numbers of a box of this shape, in order; a ragged box or another kind of element is refused."""
    if not shape:
        if isinstance(nested, bool) or not hasattr(nested, "__index__"):
            raise MeshRanksError(f"{nested!r} at {list(place)}", "a rank, a whole number")
        return [int(cast("int", nested))]
    if not isinstance(nested, (list, tuple)):
        raise MeshRanksError(f"{nested!r} at {list(place)}", f"a list of {shape[0]} (a box, not a ragged list)")
    level = cast("Sequence[object]", nested)
    if len(level) != shape[0]:
        raise MeshRanksError(
            f"a list of {len(level)} at {list(place)}", f"a list of {shape[0]} (a box, not a ragged list)"
        )
    return [rank for i, item in enumerate(level) for rank in _flatten(item, shape[1:], (*place, i))]


def _check_ranks(ranks: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if min(ranks) < 0:
        raise MeshRanksError(f"rank {min(ranks)}", "ranks of 0 or more")
    if len(set(ranks)) != len(ranks):
        repeated = next(rank for i, rank in enumerate(ranks) if rank in ranks[:i])
        raise MeshRanksError(f"rank {repeated} more than once", f"{prod(shape)} distinct ranks")


def _are_names(names: Sequence[object], ndim: int) -> bool:
    if isinstance(names, str) or not isinstance(names, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    distinct = len(set(map(str, names))) == len(names)
    return len(names) == ndim and distinct and all(isinstance(n, str) for n in names)
