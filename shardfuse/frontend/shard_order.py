"""In which order mesh dimensions cut a dim of a DTensor, and how a DTensor's spec is made to say so.

Mesh dimensions that cut one dim do so from left to right, unless the spec says another order: by ``shard_order``, or,
where ``use_strided_shard_as_shard_order`` is set, by the split factors of its strided shards, as FSDP beside tensor
parallelism has them.  `DTensor.from_local` sets that for all strided shards; torch then puts pieces together wrongly
whose split factors come from a reshape and are no order of mesh dimensions (torch 2.11 raises).

    [2, 4, 2] of (Shard(1), Shard(1)) on (2, 2), reshaped to [16]    (_StridedShard(0, sf=2), _StridedShard(0, sf=2))
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import PlacementError
from ..mesh import DeviceMesh
from .given import along, dim_of, is_sharded, placements_along, split_factor
from .pieces import Pieces, is_same, torch_pieces

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Orders = dict[int, tuple[int, ...]]
"""For each dim that mesh dimensions cut, these, the first to cut first."""


def dtensor_of(
    local: torch.Tensor,
    mesh: TorchDeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: tuple[int, ...],
) -> DTensor:
    """The DTensor of this rank's ``local``, cut by ``placements`` from left to right.

    ``shape``, ``stride``: of the unsharded tensor, which no rank could tell by a short shard of its own.
    """
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    if any(is_sharded(p) and split_factor(p) > 1 for p in placements) and not _is_an_order(mesh, placements, shape):
        spec = spec_of(made)
        spec.use_strided_shard_as_shard_order = False
        spec.shard_order = spec.compute_default_shard_order(spec.placements)
    return made


def dtensor_like(like: DTensor, local: torch.Tensor, mesh: TorchDeviceMesh) -> DTensor:
    """The DTensor of this rank's ``local``, cut as ``like`` is and in the order of its cuts, on a mesh of its ranks."""
    made = dtensor_of(local, mesh, like.placements, like.shape, like.stride())
    spec, given = spec_of(made), spec_of(like)
    spec.use_strided_shard_as_shard_order = given.use_strided_shard_as_shard_order
    spec.shard_order = given.shard_order
    return made


def spec_of(dtensor: DTensor) -> Any:
    """torch's word for all but the local tensor."""
    return cast("Any", dtensor)._spec


def shard_order_of(dtensor: DTensor) -> Hashable:
    """What tells DTensors of the same placements apart, cut in another order; ``None`` where strided shards say it."""
    return spec_of(dtensor).shard_order


def is_left_to_right(dtensor: DTensor) -> bool:
    """Do its mesh dimensions cut from left to right?  torch copies between DTensors of the same placements as if so."""
    spec = spec_of(dtensor)
    return spec.shard_order is None or spec.shard_order == spec.compute_default_shard_order(spec.placements)


def left_to_right(
    name: str,
    mesh: TorchDeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    said: Any,
) -> tuple[Placement, ...]:
    """The placements that cut a DTensor from left to right as its spec has it cut, in whatever order.

    ``said``: its ``shard_order``.  Raises PlacementError where no placements do, which may be where shards are short.
    """
    orders = _decoded(placements, mesh.shape) if said is None else {e.tensor_dim: tuple(e.mesh_dims) for e in said}
    if orders is None:
        return placements
    if said is not None and any(is_sharded(p) and split_factor(p) > 1 for p in placements):
        return placements  # cut from left to right: torch knows no other order beside strided shards
    found = list(placements)
    ours = DeviceMesh.from_torch(mesh)
    for dim, order in orders.items():
        if list(order) == sorted(order):
            continue
        for k in order:
            found[k] = along(dim, _factor(k, order, mesh.shape))
        size = shape[dim]
        if size % prod(mesh.size(k) for k in order) and not is_same(
            _ordered_pieces(size, order, ours), torch_pieces(size, placements_along(dim, found), ours)
        ):
            against = f"dim {dim} of {size} elements, which mesh dimensions {list(order)} cut in this order"
            raise PlacementError(name, placements, against, "redistribute it to Replicate() and back before the call")
    return tuple(found)


def _is_an_order(mesh: TorchDeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> bool:
    """Do strided shards stand for an order of mesh dimensions, which comes to the same pieces?"""
    orders = _decoded(placements, mesh.shape)
    return orders is not None and all(shape[d] % prod(mesh.size(k) for k in order) == 0 for d, order in orders.items())


def _decoded(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> Orders | None:
    """The order of mesh dimensions that strided shards stand for, ``None`` where they stand for none.

    A split factor is the number of ranks of those that cut before and stand to the right.
    """
    found: dict[int, list[int]] = {}
    for k in reversed(range(len(placements))):
        placement = placements[k]
        if not is_sharded(placement):
            continue
        order = found.setdefault(dim_of(placement), [])
        ranks = (prod(mesh_shape[i] for i in order[:at]) for at in range(len(order) + 1))
        at = next((at for at, n in enumerate(ranks) if n == split_factor(placement)), None)
        if at is None:
            return None
        order.insert(at, k)
    return {dim: tuple(order) for dim, order in sorted(found.items())}


def _factor(mesh_dim: int, order: Sequence[int], mesh_shape: Sequence[int]) -> int:
    return prod(mesh_shape[k] for k in order[: list(order).index(mesh_dim)] if k > mesh_dim)


def _ordered_pieces(n: int, order: Sequence[int], mesh: DeviceMesh) -> Pieces:
    """Blocks of blocks, as ``order`` cuts a dim of ``n``."""
    found: Pieces = {}
    for rank in mesh.ranks:
        at = mesh.coordinate(rank)
        assert at is not None, "a rank of the mesh"
        index = torch.arange(n, device="cpu")
        for k in order:
            size = -(-len(index) // mesh.shape[k])
            index = index[at[k] * size : (at[k] + 1) * size]
        found[rank] = index
    return found
