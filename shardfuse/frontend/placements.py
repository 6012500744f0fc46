"""What a domain comes to in DTensor's words: placements, and strides of the unsharded tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..analysis.sharding import is_even
from ..ir.digits import cut_out, extent, root_of
from ..ir.domain import BoundDomain
from ..ops.evaluate import place_in

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def placements_of(domain: BoundDomain) -> tuple[list[Placement], bool]:
    """The placements of a tensor of this domain, one for each mesh dimension, and whether torch may cut it elsewhere.

    Short shards may; and a mesh dimension that walks parts of several dims, which no placement says, is said to shard
    the first of them.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

    assert domain.mesh is not None, "placements are on a mesh"
    left = list(domain.logical)
    placements: list[Placement] = []
    is_exact = True
    for parallel_type in domain.mesh.parallel_types:
        digits = domain.digits_on(parallel_type)
        if not digits:
            placements.append(Replicate())
            continue
        is_exact = is_exact and is_even(digits, domain.mesh.extent(parallel_type))
        place = next(((d, found) for d, axis in enumerate(left) if (found := place_in(axis, digits)) is not None), None)
        if place is None:
            is_exact = False
            placements.append(Shard(next(d for d, axis in enumerate(domain.logical) if cut_out(axis, digits[0]))))
            continue
        dim, (above, below) = place
        factor = extent(above)
        placements.append(Shard(dim) if factor <= 1 else _StridedShard(dim, split_factor=factor))
        left[dim] = (*above, *below)
    return placements, not is_exact


def unsharded_strides(domain: BoundDomain) -> tuple[int, ...]:
    """Strides of the unsharded tensor, its dims in the order in which the domain stores them."""
    logical = domain.logical
    stored = [root_of(d) for axis in domain.storage() for d in axis]
    # A dim of which a rank has one element only is stored anywhere: outside of the others.
    place = {
        d: next((stored.index(root_of(e)) for e in axis if root_of(e) in stored), -1) for d, axis in enumerate(logical)
    }
    strides = [1] * len(logical)
    step = 1
    for d in sorted(range(len(logical)), key=lambda d: (place[d], d), reverse=True):
        strides[d] = step
        step *= extent(logical[d])
    for d in reversed(range(len(logical))):  # what lies inside of a dim of 1, as torch has it
        if extent(logical[d]) == 1:
            strides[d] = strides[d + 1] * extent(logical[d + 1]) if d + 1 < len(logical) else 1
    return tuple(strides)
