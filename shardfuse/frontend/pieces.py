"""Which elements each rank has along a dim that mesh dimensions shard: as torch cuts it, and as digits can.

10 elements, (Shard(0), Shard(0)) on 3 x 2 ranks: torch 2, 2 | 2, 2 | 1, 1; digits 2, 2 | 2, 2 | 2, 0.  A rank's
elements are their unsharded indices, which ascend.  All of it follows from sizes, placements and the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import ShardingError
from ..ir.digits import Root, axis_of
from ..ir.domain import BoundDomain, IterDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.tensor_view import TensorView
from ..mesh import DeviceMesh
from ..ops.evaluate import unsharded_index
from ..passes.recorded_domains import bound_domain, fits

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

Pieces = dict[int, torch.Tensor]
"""For each rank of a mesh, the indices that it has along one dim."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Cut:
    """What a mesh dimension takes of a dim: every ``ranks``-th part of each of ``factor`` equal ones.

    ``uneven``: parts may be short.
    """

    mesh_dim: int
    ranks: int
    factor: int
    uneven: bool


def torch_pieces(n: int, placements: Mapping[int, Placement], mesh: DeviceMesh) -> Pieces:
    """As torch cuts a dim of ``n``.  ``placements``: of the mesh dimensions that shard it."""
    parts: dict[tuple[int, ...], torch.Tensor] = {(): torch.arange(n, device="cpu")}
    for mesh_dim, ranks in enumerate(mesh.shape):
        placement = placements.get(mesh_dim)
        parts = {
            (*at, k): piece
            for at, index in parts.items()
            for k, piece in enumerate([index] * ranks if placement is None else _split(index, placement, ranks))
        }
    return {rank: parts[coordinate] for rank in mesh.ranks if (coordinate := mesh.coordinate(rank)) is not None}


def _split(index: torch.Tensor, placement: Placement, ranks: int) -> list[torch.Tensor]:
    """By torch's own rule: of strided shards that are short it depends on the version."""
    rule = cast("Any", placement)
    found, _ = rule._split_tensor(index.view([*[1] * rule.dim, -1]), ranks, with_padding=False)
    return [piece.reshape(-1) for piece in found]


def digit_domain(n: int, cuts: Sequence[Cut], mesh: DeviceMesh) -> BoundDomain | None:
    """A dim of ``n`` as `record` has it cut; ``None`` where that is no cut of digits."""
    tv = TensorView("x", [-1], DataType.Float)
    tv.set_device_mesh(mesh)
    if not record(tv, 0, cuts):
        return None
    axes = (axis_of(Root("i", n), tv.domain.shared_singles([n])[0]),)
    try:
        return bound_domain(tv, BoundTensor("x", tv.dtype, BoundDomain(axes))) if fits(tv, axes) else None
    except ShardingError:  # of a part of one element, which some of the ranks are to have
        return None


def pieces_of(domain: BoundDomain, dim: int) -> Pieces:
    """Along ``dim`` of a tensor on a mesh."""
    assert domain.mesh is not None, "pieces are of ranks"
    return {rank: unsharded_index(domain, dim, rank, _CPU) for rank in domain.mesh.ranks}


def is_same(a: Pieces, b: Pieces) -> bool:
    return all(torch.equal(index, b[rank]) for rank, index in a.items())


def place(tv: TensorView, mesh: DeviceMesh, partial: Sequence[int], cuts: Sequence[tuple[int, Sequence[Cut]]]) -> None:
    """Record where ``tv`` lives: each mesh dimension cuts what those before it have left of a dim.

    ``partial``: the mesh dimensions of partial values, of which the first axes of ``tv`` are; ``cuts``: of the dims
    behind those.
    """
    tv.set_device_mesh(mesh)
    axes = tv.domain.loop
    for axis, mesh_dim in enumerate(partial):
        tv.axis(axis).parallelize(mesh.parallel_types[mesh_dim])
    for dim, found in cuts:
        is_recorded = record(tv, tv.domain.loop.index(axes[len(partial) + dim]), found)
        assert is_recorded, f"{found} are of digits"


def record(tv: TensorView, at: int, cuts: Sequence[Cut]) -> bool:
    """Record ``cuts`` of loop axis ``at`` as splits, each of what those before it have left; ``False`` if it cannot."""
    assert tv.domain.mesh is not None, "a mesh dimension is of a mesh"
    parallel_types = tv.domain.mesh.parallel_types
    left = [_Part(tv.domain.loop[at], None)]
    for cut in cuts:
        above = [] if cut.factor == 1 else _cut_front(tv, left, cut.factor, uneven=cut.uneven)
        mine = None if above is None else _cut_front(tv, left, cut.ranks, uneven=cut.uneven)
        if above is None or mine is None:
            return False
        axis = mine[0].axis
        for part in mine[1:]:
            k, other = tv.domain.loop.index(axis), tv.domain.loop.index(part.axis)
            tv.merge(k, other)
            axis = tv.domain.loop[k]
        tv.axis(tv.domain.loop.index(axis)).parallelize(parallel_types[cut.mesh_dim])
        left[:0] = above
    return True


@dataclass(frozen=True)
class _Part:
    """A part of a dim that no mesh dimension has yet.  ``extent``: ``None`` for a rest, which depends on the size."""

    axis: IterDomain
    extent: int | None


def _cut_front(tv: TensorView, parts: list[_Part], factor: int, *, uneven: bool) -> list[_Part] | None:
    """Take the outermost ``factor`` values off ``parts``; ``None`` where they share no cut."""
    front: list[_Part] = []
    while not front or factor > 1:  # a factor of 1 is an axis too: that of a mesh dimension of one rank
        first = parts.pop(0)
        if first.extent is not None and factor % first.extent == 0:
            front.append(first)
            factor //= first.extent
            continue
        if first.extent is not None and first.extent % factor:
            return None
        at = tv.domain.loop.index(first.axis)
        tv.outer_split(at, factor, uneven=uneven)
        front.append(_Part(tv.domain.loop[at], factor))
        parts.insert(0, _Part(tv.domain.loop[at + 1], None if first.extent is None else first.extent // factor))
        factor = 1
    return front
