"""What a domain comes to in DTensor's words: placements, and strides of the unsharded tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PlacementError
from ..ir.digits import Axis, cut_out, extent, root_of
from ..ir.domain import BoundDomain

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def placements_of(argument: str, domain: BoundDomain) -> list[Placement]:
    """The placements of a tensor of this domain, one for each mesh dimension.

    Raises PlacementError where a mesh dimension walks parts of several dims, or short shards of another size than
    DTensor's, which no placement says.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

    assert domain.mesh is not None, "placements are on a mesh"
    left = list(domain.logical)
    placements: list[Placement] = []
    for parallel_type in domain.mesh.parallel_types:
        digits = domain.digits_on(parallel_type)
        if not digits:
            placements.append(Replicate())
            continue
        place = next(((d, found) for d, axis in enumerate(left) if (found := _cut(axis, digits)) is not None), None)
        if place is None:
            raise PlacementError(
                argument,
                digits,
                "DTensor's placements",
                "give this output a sharding of one dim, or take local tensors",
            )
        dim, (above, below) = place
        factor = extent(above)
        shard, wanted = extent(below), -(-extent(left[dim]) // domain.mesh.extent(parallel_type))
        if factor == 1 and shard != wanted:
            raise PlacementError(
                argument,
                [Shard(dim)],
                f"its shards of {shard} along dim {dim}, where DTensor's are {wanted}",
                "give this output a sharding, replicated say, or take local tensors",
            )
        placements.append(Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor))
        left[dim] = (*above, *below)
    return placements


def _cut(axis: Axis, digits: Axis) -> tuple[Axis, Axis] | None:
    """What stands above and below ``digits``, neighbours, in ``axis``."""
    found = cut_out(axis, digits[0])
    if found is None:
        return None
    above, below = found
    for digit in digits[1:]:
        following = cut_out(below, digit)
        if following is None or following[0]:
            return None
        below = following[1]
    return above, below


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
