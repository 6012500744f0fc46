"""Where a tensor lives on a mesh, in DTensor's words, and how a fusion definition declares it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from ..errors import PlacementError
from ..frontend import FusionDefinition, pieces
from ..frontend.pieces import Cut
from ..ir import DataType, TensorView
from ..mesh import DeviceMesh, current_rank

if TYPE_CHECKING:
    # 500 modules and half a second: only the caller, who makes placements, pays for it.
    from torch.distributed.tensor.placement_types import Placement

    Placements: TypeAlias = "Placement | Sequence[Placement] | TensorPlacement"


@dataclass(frozen=True)
class TensorPlacement:
    """Per mesh dimension, outermost first, the dim that it shards, or whether it holds partial sums; else replicas.

    ``uneven``: shards may differ in size, as ``torch.chunk`` cuts them.
    ``strided``: local tensors come with the strides that they have, not as contiguous copies.
    """

    shards: tuple[int | None, ...] = ()
    partial: tuple[bool, ...] = ()
    uneven: bool = False
    strided: bool = False

    @staticmethod
    def of(argument: str, placements: Placements | None, mesh: DeviceMesh | None) -> TensorPlacement:
        """Read torch's placements: one, or a sequence with one per mesh dimension; None is replicated.

        A TensorPlacement, which a module that is made again from its settings has, is taken as it is.
        Raises PlacementError where their number is not the mesh's, where there are placements but no mesh, and for
        those that modules do not compute: partial results of another operation than a sum, and torch's private ones.
        """
        if isinstance(placements, TensorPlacement):
            return placements
        if placements is None:
            n = mesh.ndim if mesh is not None else 0
            return TensorPlacement((None,) * n, (False,) * n)
        entries = tuple(placements) if isinstance(placements, Sequence) else (placements,)
        if not all(hasattr(p, "is_shard") for p in entries):
            given = (placements,) if isinstance(placements, str) else entries
            found = [repr(p) if isinstance(p, str) else p for p in given]  # the error quotes no words
            raise PlacementError(argument, found, "a placement", "pass torch's Shard, Replicate or Partial")
        if mesh is None:
            raise PlacementError(argument, entries, "no mesh", "pass mesh= too, or leave the placement out")
        if len(entries) != mesh.ndim:
            raise PlacementError(argument, entries, f"a mesh of {mesh.ndim} dimensions", "pass one placement for each")
        for placement in entries:
            _refuse_unknown(argument, placement)
        return TensorPlacement(tuple(_shard_dim(p) for p in entries), tuple(p.is_partial() for p in entries))

    @staticmethod
    def of_whole_values(
        argument: str, placements: Placements | None, mesh: DeviceMesh | None, what: str
    ) -> TensorPlacement:
        """As ``of``, for ``what`` cannot work on each rank's summand.  Raises PlacementError where it would have to."""
        found = TensorPlacement.of(argument, placements, mesh)
        if found.is_partial:
            against = f"{what}, which needs whole values"
            raise PlacementError(argument, (placements,), against, "pass Shard or Replicate")
        return found

    @property
    def is_partial(self) -> bool:
        return any(self.partial)

    @property
    def is_uncut(self) -> bool:
        """Has every rank tensors of the unsharded size: replicas, or partial sums?"""
        return all(dim is None for dim in self.shards)

    def letters(self) -> list[str]:
        """As settings are printed: "S" and the dim, "P" or "R" for each mesh dimension."""
        pairs = zip(self.shards, self.partial, strict=True)
        return ["P" if is_partial else "R" if dim is None else f"S{dim}" for dim, is_partial in pairs]

    @property
    def cut_dims(self) -> tuple[int, ...]:
        """The dims that mesh dimensions cut, one each."""
        return tuple(dim for dim in self.shards if dim is not None)

    @property
    def leading(self) -> int:
        """How many axes of partial sums stand before the tensor's own in a definition."""
        return sum(self.partial)

    def resolve(self, argument: str, ndim: int) -> TensorPlacement:
        """Count sharded dims from the front.  Raises PlacementError for one that a tensor of ``ndim`` dims has not."""
        for dim in self.shards:
            if dim is not None and not -ndim <= dim < ndim:
                found = (f"Shard({dim})",)
                raise PlacementError(argument, found, f"a tensor of {ndim} dims", "shard a dim that it has")
        return replace(self, shards=tuple(None if d is None else d % ndim for d in self.shards))

    def gradient(self) -> TensorPlacement:
        """Where the gradient lives: with the tensor; that of a partial sum is whole on every rank."""
        return replace(self, partial=(False,) * len(self.partial))

    def replicated(self) -> TensorPlacement:
        """Whole on every rank of the mesh."""
        return TensorPlacement((None,) * len(self.shards), (False,) * len(self.partial))

    def without(self, dim: int) -> TensorPlacement:
        """The placement of what is left when ``dim`` (resolved) is reduced: replicated where ``dim`` was sharded."""
        return replace(self, shards=tuple(None if d == dim else d for d in self.shards))

    def only(self, dim: int) -> TensorPlacement:
        """The placement of a vector along ``dim`` (resolved) of this tensor."""
        return replace(self, shards=tuple(0 if d == dim else None for d in self.shards))

    def local(self, mesh: DeviceMesh | None, unsharded: torch.Tensor) -> torch.Tensor:
        """This rank's piece (a view) of an unsharded tensor.

        A mesh dimension cuts as ``torch.chunk`` does; a second one on the same dim cuts all parts at the same places,
        whole ones and short ones, as a split of a fusion does: 10 rows over 3 x 2 ranks are 2, 2, 2, 2, 2 and none.
        """
        for dim in dict.fromkeys(d for d in self.shards if d is not None):
            start, stop = self._span(mesh, dim, unsharded.shape[dim])
            unsharded = unsharded.narrow(dim, start, stop - start)
        return unsharded

    def local_shape(self, mesh: DeviceMesh | None, unsharded: Sequence[int]) -> tuple[int, ...]:
        """The shape of this rank's piece, dims counted from either end.  Sizes may be symbolic."""
        resolved = tuple(None if d is None else d % len(unsharded) for d in self.shards)
        spans = [replace(self, shards=resolved)._span(mesh, dim, size) for dim, size in enumerate(unsharded)]
        return tuple(stop - start for start, stop in spans)

    def smallest_shape(self, mesh: DeviceMesh, unsharded: Sequence[int]) -> tuple[int, ...]:
        """The shape of the last rank's piece: no rank's is smaller along any dim.  Of a resolved placement.

        By comparisons: Dynamo of torch 2.11 takes no minimum of symbolic sizes.
        """
        return tuple(self._smallest(mesh, dim, size) for dim, size in enumerate(unsharded))

    def _smallest(self, mesh: DeviceMesh, dim: int, size: int) -> int:
        left = chunk = size
        for n, shard_dim in zip(mesh.shape, self.shards, strict=True):
            if shard_dim == dim:
                chunk = -(-chunk // n)
                left = left - (n - 1) * chunk
                if left <= 0:
                    return 0
                left = chunk if left > chunk else left
        return left

    def _span(self, mesh: DeviceMesh | None, dim: int, size: int) -> tuple[int, int]:
        """The part of ``dim`` that this rank has."""
        start, stop, chunk = 0, size, size
        is_even = size % self.parts(mesh, dim) == 0  # then a symbolic size needs no minimum
        for mesh_dim, shard_dim in enumerate(self.shards):
            if mesh is not None and shard_dim == dim:
                index = mesh.index(current_rank(), mesh.parallel_types[mesh_dim])
                if is_even:
                    chunk = chunk // mesh.shape[mesh_dim]
                    start, stop = start + index * chunk, start + (index + 1) * chunk
                    continue
                chunk = -(-chunk // mesh.shape[mesh_dim])
                start = _least(start + index * chunk, stop)
                stop = _least(start + chunk, stop)
        return start, stop

    def cuts(self, mesh: DeviceMesh, dim: int, size: int) -> list[Cut]:
        """Of ``dim`` (resolved), whose unsharded ``size`` may be unknown, -1."""
        found: list[Cut] = []
        for mesh_dim, shard_dim in enumerate(self.shards):
            if shard_dim == dim:
                ranks = mesh.shape[mesh_dim]
                found.append(Cut(mesh_dim, ranks, 1, self.uneven or (size >= 0 and size % ranks != 0)))
                size = -(-size // ranks) if size >= 0 else size
        return found

    def parts(self, mesh: DeviceMesh | None, dim: int) -> int:
        """Into how many parts ``dim`` (resolved) is cut."""
        count = 1
        for mesh_dim, shard_dim in enumerate(self.shards):
            count *= mesh.shape[mesh_dim] if mesh is not None and shard_dim == dim else 1
        return count

    def uneven_dims(self, mesh: DeviceMesh | None, sizes: Sequence[int]) -> list[int]:
        """Along which dims shards of a tensor of these unsharded ``sizes`` differ in size."""
        return [dim for dim, size in enumerate(sizes) if size % self.parts(mesh, dim)]

    def cuts_unevenly(self, mesh: DeviceMesh | None, sizes: Sequence[int]) -> bool:
        """Do shards of a tensor of these unsharded ``sizes`` differ in size?"""
        return len(self.uneven_dims(mesh, sizes)) > 0

    def for_shape(self, mesh: DeviceMesh | None, sizes: Sequence[int] | None) -> TensorPlacement:
        """The placement for a tensor of these unsharded sizes: uneven where they say so; unknown sizes say nothing."""
        return self if sizes is None or not self.cuts_unevenly(mesh, sizes) else replace(self, uneven=True)

    def in_place(self, local: torch.Tensor) -> torch.Tensor:
        """A strided local tensor as it is read; contiguous where its rows are not whole, which would cost more."""
        strides = local.stride()
        return local.contiguous() if strides[-1] != 1 or 0 in strides else local


WHOLE = TensorPlacement()
"""Of a tensor without a mesh."""
_least: Callable[[int, int], int] = cast("Any", torch).sym_min  # of sizes that may be symbolic


def _refuse_unknown(argument: str, placement: Placement) -> None:
    from torch.distributed.tensor import Partial

    if is_taken(placement):
        return
    if type(placement) is Partial:
        advice = "pass Partial(), and an average's parts divided by the number of ranks"
        raise PlacementError(argument, (placement,), "a sum, the only operation over partial tensors", advice)
    against = "modules, which take Shard, Replicate and Partial alone"
    raise PlacementError(argument, (placement,), against, "redistribute the tensor to one of these first")


def is_taken(placement: Placement) -> bool:
    """Is there a module for it?  There is none for a vocabulary-parallel embedding's, whose summands torch masks."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Partial:
        return cast("Any", placement).reduce_op == "sum"
    return type(placement) in (Shard, Replicate)


def _shard_dim(placement: Placement) -> int | None:
    return int(cast("Any", placement).dim) if placement.is_shard() else None  # torch leaves dim without a type


def define(
    fd: FusionDefinition, mesh: DeviceMesh | None, placement: TensorPlacement, shape: Sequence[int], dtype: DataType
) -> TensorView:
    """Declare a fusion input of unsharded ``shape`` (-1 symbolic) that lives as ``placement`` says."""
    contiguity = None if placement.strided else True
    if mesh is None:
        return fd.define_tensor(shape=list(shape), contiguity=contiguity, dtype=dtype)
    leading = [mesh.shape[d] for d, is_partial in enumerate(placement.partial) if is_partial]
    tv = fd.define_tensor(shape=[*leading, *shape], contiguity=contiguity, dtype=dtype)
    place(tv, mesh, placement)
    return tv


def place(tv: TensorView, mesh: DeviceMesh | None, placement: TensorPlacement) -> None:
    """State where ``tv`` lives."""
    if mesh is not None:
        partial = [d for d, is_partial in enumerate(placement.partial) if is_partial]
        sizes = tv.shape[placement.leading :]
        cuts = [(dim, placement.cuts(mesh, dim, size)) for dim, size in enumerate(sizes) if dim in placement.shards]
        pieces.place(tv, mesh, partial, cuts[::-1])


def move(
    fd: FusionDefinition, tv: TensorView, mesh: DeviceMesh | None, source: TensorPlacement, target: TensorPlacement
) -> TensorView:
    """``tv`` of ``source`` as ``target`` wants it, by the collective or free slice that shardfuse finds for it."""
    if source == target or mesh is None:
        return tv
    moved = fd.ops.sum(tv, list(range(source.leading))) if source.is_partial else fd.ops.set(tv)
    place(moved, mesh, target)
    return moved


def give(
    fd: FusionDefinition,
    tv: TensorView,
    mesh: DeviceMesh | None,
    target: TensorPlacement,
    source: TensorPlacement | None = None,
    stride_order: Sequence[int] | None = None,
) -> None:
    """Return ``tv`` placed as ``target``.  ``source``: where it is computed, where that is another place.

    stride_order: of its dims in memory, as ``add_output`` takes it; contiguous where it is left out.
    """
    if mesh is not None:
        is_elsewhere = source is not None and source != target
        tv = fd.ops.set(tv) if is_elsewhere or tv.has_device_mesh() else tv
        place(tv, mesh, target)
    fd.add_output(tv, stride_order=stride_order)
