"""DTensors that torch cuts where no digits do: each rank gives the others what they lack, before and after a fusion.

Both ways it is one all-to-all over the mesh dimensions that shard such a dim, and what it gives follows from the
unsharded sizes, the placements and the mesh: every rank comes to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch

from ..analysis.communication_table import Collective, Communication
from ..errors import InputError
from ..executor.agreement import failures_told
from ..executor.all_to_all import Step, between
from ..ir.digits import Axis, cut_out, extent
from ..ir.domain import BoundDomain
from ..ir.fusion import FusionInput
from ..mesh import DeviceMesh, ParallelType, Team, current_rank
from .given import Given, cuts_of, placements_along
from .pieces import Pieces, digit_domain, is_same, pieces_of, torch_pieces

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Move:
    """``enter``: from this rank's piece as torch cuts it, of ``shape``, to that of digits; ``leave``: back.

    ``stored``: the shape of the piece of digits, its dims as they lie in memory; ``back``: its dims in those places.
    ``elements``: of the largest piece.
    """

    shape: tuple[int, ...]
    stored: tuple[int, ...]
    back: list[int]
    enter: Step
    leave: Step
    dims: tuple[ParallelType, ...]
    team: int
    elements: int

    def communication(self, dtype: torch.dtype) -> Communication:
        return Communication(Collective.ALL_TO_ALL, self.dims, self.elements * dtype.itemsize, self.team)

    def like(self, local: torch.Tensor) -> torch.Tensor:
        """What ``enter`` will give of ``local``, not filled."""
        return local.new_empty(self.stored).permute(self.back)


def move_in(
    mesh: TorchDeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    device: torch.device,
    order: Sequence[int] | None = None,
) -> Move | None:
    """Between the pieces of a DTensor and those that a fusion takes; ``None`` where they are the same.

    ``order``: its dims as they lie in memory, outermost first.  Of a rank of the mesh.
    """
    order = tuple(range(len(shape)) if order is None else order)
    return _move_in(mesh, placements, shape, order, device, current_rank())


@lru_cache(maxsize=1024)
def _move_in(
    torch_mesh: TorchDeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    order: tuple[int, ...],
    device: torch.device,
    rank: int,
) -> Move | None:
    mesh = DeviceMesh.from_torch(torch_mesh)
    own = [placements_along(dim, placements) for dim in range(len(shape))]
    cuts = [cuts_of(size, along, mesh) for size, along in zip(shape, own, strict=True)]
    if not any(is_elsewhere for _, is_elsewhere in cuts):
        return None
    inside: list[Pieces] = []
    for size, (found, _) in zip(shape, cuts, strict=True):
        domain = digit_domain(size, found, mesh)
        assert domain is not None, f"{found} are of digits"
        inside.append(pieces_of(domain, 0))
    outside = [torch_pieces(size, along, mesh) for size, along in zip(shape, own, strict=True)]
    return _between(mesh, inside, outside, [set(along) for along in own], order, device, rank)


def move_out(
    domain: BoundDomain, placements: Sequence[Placement], order: Sequence[int], device: torch.device
) -> Move | None:
    """Between the pieces of a DTensor of ``placements`` and those that a fusion has made, of ``domain``."""
    mesh = domain.mesh
    assert mesh is not None, "pieces are of a mesh"
    inside = [pieces_of(domain, d) for d in range(len(domain.logical))]
    outside = [
        torch_pieces(extent(axis), placements_along(d, placements), mesh) for d, axis in enumerate(domain.logical)
    ]
    cut_by = [
        {*placements_along(d, placements), *(mesh.mesh_dim(p) for p, digits in domain.sharding if _holds(axis, digits))}
        for d, axis in enumerate(domain.logical)
    ]
    return _between(mesh, inside, outside, cut_by, order, device, current_rank())


def _holds(axis: Axis, digits: Axis) -> bool:
    return any(cut_out(axis, d) is not None for d in digits)


def _between(
    mesh: DeviceMesh,
    inside: Sequence[Pieces],
    outside: Sequence[Pieces],
    cut_by: Sequence[set[int]],
    order: Sequence[int],
    device: torch.device,
    rank: int,
) -> Move | None:
    """``cut_by``: of each dim the mesh dimensions that shard it, here or there."""
    elsewhere = [d for d, (a, b) in enumerate(zip(inside, outside, strict=True)) if not is_same(a, b)]
    if not elsewhere:
        return None
    dims = tuple(mesh.parallel_types[k] for k in range(mesh.ndim) if any(k in cut_by[d] for d in elsewhere))
    team = Team.of(mesh.box(rank, dims), rank)
    here, there = ({r: [pieces[d][r] for d in order] for r in mesh.ranks} for pieces in (inside, outside))
    along = 0 if elsewhere == [order[0]] else None
    back = [list(order).index(d) for d in range(len(order))]

    def step(has: dict[int, list[torch.Tensor]], lacks: dict[int, list[torch.Tensor]]) -> Step:
        run = between(team, has, lacks, lambda giver, taker: True, along, device)
        return lambda x: run(x.permute(tuple(order)).contiguous()).permute(back)

    largest = max(prod(map(len, indices)) for pieces in (here, there) for indices in pieces.values())
    shape = tuple(len(index[rank]) for index in outside)
    placeholder = tuple(len(index) for index in here[rank])
    return Move(shape, placeholder, back, step(there, here), step(here, there), dims, team.size, largest)


@dataclass(frozen=True)
class Entering:
    """This rank's piece of an input that torch cuts elsewhere; ``leading``: how many axes of partial values it gets."""

    local: torch.Tensor
    move: Move
    leading: int

    @classmethod
    def of(cls, k: int, declared: FusionInput, given: Given, shape: tuple[int, ...], local: torch.Tensor) -> Entering:
        """Of input ``k``.  Raises InputError, also on the other ranks, for a piece that is not its DTensor's."""
        leading = len(given.partial)
        order = [d - leading for d in declared.dim_order if d >= leading]
        move = move_in(given.mesh, given.placements, shape, local.device, order or None)
        assert move is not None, "torch cuts it elsewhere"
        if tuple(local.shape) != move.shape:
            with failures_told(DeviceMesh.from_torch(given.mesh).ranks):
                raise InputError(
                    k, declared.val.name, f"a DTensor whose local tensor is {list(local.shape)}",
                    f"{list(move.shape)} on this rank, as its placements say", "make it with distribute_tensor",
                )  # fmt: skip
        return cls(local, move, leading)

    def inside(self) -> torch.Tensor:
        """As the fusion takes it."""
        return self.move.enter(self.local)[(None,) * self.leading]

    def write_back(self, written: torch.Tensor) -> None:
        """Put what a fusion has written over ``inside()`` where the DTensor has it."""
        self.local.copy_(self.move.leave(written[(0,) * self.leading]))
