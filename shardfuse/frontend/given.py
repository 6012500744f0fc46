"""What a DTensor argument says of itself: its mesh, its placements, and where they cut short shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ..errors import PlacementError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, eq=False)
class Given:
    """What a DTensor argument says of itself, one object for all that say the same.

    ``uneven``: for each mesh dimension, does it cut into short shards?
    """

    mesh: TorchDeviceMesh
    placements: tuple[Placement, ...]
    uneven: tuple[bool, ...]

    @property
    def partial(self) -> tuple[int, ...]:
        """The mesh dimensions over which it holds partial values."""
        return tuple(k for k, placement in enumerate(self.placements) if placement.is_partial())


def given_of(argument: str, dtensor: DTensor) -> Given:
    """What ``argument`` says.  Raises PlacementError for placements that no sharding is."""
    placements = tuple(dtensor.placements)
    mesh = dtensor.device_mesh
    sizes = list(dtensor.shape)
    uneven: list[bool] = []
    cut: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if not is_sharded(placement):
            uneven.append(False)
            continue
        ranks, dim = mesh.size(mesh_dim), dim_of(placement)
        factor = split_factor(placement)
        pieces = cut.setdefault(dim, [sizes[dim]])
        short = pieces[0] % (ranks * factor) != 0
        if short and factor > 1:
            raise PlacementError(
                argument,
                placements,
                f"{sizes[dim]} elements along dim {dim}",
                f"pad it to a multiple of {ranks * factor}",
            )
        chunk = -(-pieces[0] // ranks)
        if any(piece and min(-(-piece // ranks), piece) != min(chunk, piece) for piece in pieces):
            raise PlacementError(
                argument, placements, f"{sizes[dim]} elements along dim {dim}",
                "two mesh dimensions cut its short shards and its whole ones at different places: pad it",
            )  # fmt: skip
        uneven.append(short)
        cut[dim] = list(
            dict.fromkeys(n for piece in pieces for n in (chunk, piece - piece // chunk * chunk if chunk else 0))
        )
    return Given(mesh, placements, tuple(uneven))


def is_sharded(placement: Placement) -> bool:
    return not placement.is_partial() and not placement.is_replicate()


def dim_of(placement: Placement) -> int:
    return cast(int, placement.dim)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def split_factor(placement: Placement) -> int:
    """How often the shards of this mesh dimension repeat along the dim: 1 for Shard, more for _StridedShard."""
    return cast(int, getattr(placement, "split_factor", 1))
