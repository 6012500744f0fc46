"""What a DTensor argument says of itself: its mesh, its placements, and how they cut short shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, cast

from ..mesh import DeviceMesh
from .pieces import Cut, digit_domain, is_same, pieces_of, torch_pieces

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, eq=False)
class Given:
    """What a DTensor argument says of itself, one object for all that say the same.

    ``cuts``: for each dim that mesh dimensions shard, how digits cut it.  ``elsewhere``: the dims that torch cuts
    elsewhere, of which ranks exchange what they lack.
    """

    mesh: TorchDeviceMesh
    placements: tuple[Placement, ...]
    cuts: tuple[tuple[int, tuple[Cut, ...]], ...]
    elsewhere: tuple[int, ...]

    @property
    def partial(self) -> tuple[int, ...]:
        """The mesh dimensions over which it holds partial values."""
        return tuple(k for k, placement in enumerate(self.placements) if placement.is_partial())

    @property
    def is_uneven(self) -> bool:
        """May shards be short, so that a local size tells no unsharded one?"""
        return any(cut.uneven for _, cuts in self.cuts for cut in cuts)


def given_of(dtensor: DTensor, placements: tuple[Placement, ...]) -> Given:
    """``placements``: that cut it from left to right."""
    mesh = dtensor.device_mesh
    cuts: list[tuple[int, tuple[Cut, ...]]] = []
    elsewhere: list[int] = []
    for dim, size in enumerate(dtensor.shape):
        found, is_elsewhere = cuts_of(size, placements_along(dim, placements), DeviceMesh.from_torch(mesh))
        if found:
            cuts.append((dim, found))
        if is_elsewhere:
            elsewhere.append(dim)
    return Given(mesh, placements, tuple(cuts), tuple(elsewhere))


def cuts_of(size: int, placements: Mapping[int, Placement], mesh: DeviceMesh) -> tuple[tuple[Cut, ...], bool]:
    """How digits cut a dim that these mesh dimensions shard, and whether torch cuts it elsewhere."""
    asked = [Cut(k, mesh.shape[k], split_factor(p), uneven=False) for k, p in placements.items() if mesh.shape[k] > 1]
    if not asked:
        return (), False
    divides = size % prod(cut.ranks * cut.factor for cut in asked) == 0
    if divides and digit_domain(size, asked, mesh) is not None:
        return tuple(asked), False
    if len(asked) == 1 and asked[0].factor == 1:
        return tuple(_short(size, asked)), False
    wanted = torch_pieces(size, placements, mesh)
    for cuts in (_short(size, asked), _uneven(asked), _uneven([replace(cut, factor=1) for cut in asked])):
        domain = digit_domain(size, cuts, mesh)
        if domain is None:
            continue
        is_elsewhere = not is_same(pieces_of(domain, 0), wanted)
        if not is_elsewhere or all(cut.factor == 1 for cut in cuts):
            return tuple(cuts), is_elsewhere
    raise AssertionError(f"blocks of {size} by {asked} are digits")


def _short(size: int, cuts: Sequence[Cut]) -> list[Cut]:
    """Those that come to short parts are uneven, each of what those before it have left."""
    found: list[Cut] = []
    for cut in cuts:
        found.append(replace(cut, uneven=size % (cut.ranks * cut.factor) != 0))
        size = -(-size // cut.ranks)
    return found


def _uneven(cuts: Sequence[Cut]) -> list[Cut]:
    return [replace(cut, uneven=True) for cut in cuts]


def as_given(placements: Sequence[Placement], inputs: Sequence[Given | None]) -> list[Placement]:
    """An output's ``placements``, by the strided shards of an input where digits said these as blocks.

    So what is computed element by element lives as its input does.
    """
    found = list(placements)
    for given in (g for g in inputs if g is not None):
        for dim, cuts in given.cuts:
            asked = placements_along(dim, given.placements)
            if all(split_factor(asked[cut.mesh_dim]) == cut.factor for cut in cuts):
                continue
            for d in dict.fromkeys(dim_of(p) for p in found if is_sharded(p)):
                own = placements_along(d, found)
                if own.keys() == asked.keys() and all(split_factor(p) == 1 for p in own.values()):
                    for k, p in asked.items():
                        found[k] = along(d, split_factor(p))
    return found


def along(dim: int, factor: int) -> Placement:
    """Shards of ``dim`` that repeat ``factor`` times along it."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def placements_along(dim: int, placements: Sequence[Placement]) -> dict[int, Placement]:
    """Of the mesh dimensions that shard ``dim``."""
    return {k: p for k, p in enumerate(placements) if is_sharded(p) and dim_of(p) == dim}


def is_sharded(placement: Placement) -> bool:
    return not placement.is_partial() and not placement.is_replicate()


def dim_of(placement: Placement) -> int:
    return cast(int, placement.dim)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def split_factor(placement: Placement) -> int:
    """How often the shards of this mesh dimension repeat along the dim: 1 for Shard, more for _StridedShard."""
    return cast(int, getattr(placement, "split_factor", 1))
