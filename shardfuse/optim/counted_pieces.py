"""Which part of a norm over sharded tensors a rank adds, so that replicas count once and one all-reduce is enough.

    w: Shard(0) over (0, 1)          rank 0 counts its rows, rank 1 its own
    b: Replicate() over (0, 1)       one of the two counts b: the one that has fewer elements to count so far
    e: Shard(0) over (2, 3)          ranks 2 and 3 count their rows

What is on a slice of a torch mesh may have copies on other slices (``mesh_slices``).
Each rank's sum over what it counts, added up over all ranks of all meshes, is the sum over the unsharded tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ..executor.plain_arguments import waited
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh, current_rank
from ..mesh.calls import FAILED_RUN, Call
from ..mesh.groups import Team
from ..mesh.process import ledger_of
from ..source_line import caller_line
from .mesh_slices import holders_of, mesh_of
from .optim_errors import OptimizerArgumentError, OptimizerTensorError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Spread:
    """How one tensor is spread over the ranks of ``mesh``, those that hold nothing of it among them.

    is_sharded: do different ranks hold different elements?  replicas: ranks that hold the same ones; replica: which
    of them this rank is, -1 for a rank outside of the mesh.  elements: of the unsharded tensor, on every rank the same;
    0 where that is not known.
    """

    mesh: DeviceMesh
    is_sharded: bool
    replicas: int
    replica: int
    elements: int


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, after a collective that may still be filling it; a plain tensor as it is."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else waited(local)


def placements_of(tensor: torch.Tensor) -> tuple[Placement, ...] | None:
    """Of a DTensor; ``None`` for a plain one."""
    return tuple(cast("Any", tensor).placements) if has_dtensor((tensor,)) else None


def added(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """A DTensor whose partial sums are added up, by a collective of its mesh; any other tensor as it is.

    torch has such gradients of what is replicated beside sharded rows: a norm's weight, the bias of a linear layer.
    """
    placements = placements_of(tensor)
    if placements is None or not any(p.is_partial() for p in placements):
        return tensor
    from torch.distributed.tensor import Replicate

    return redistributed(tensor, tuple(Replicate() if p.is_partial() else p for p in placements), place)


def places_on_meshes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of each DTensor how many before it are on its mesh: the same on all ranks of that, whatever else they list."""
    counts: dict[object, int] = {}
    places: list[int] = []
    for tensor in tensors:
        mesh = getattr(getattr(tensor, "_spec", None), "mesh", None)
        places.append(counts.get(mesh, 0))
        counts[mesh] = places[-1] + 1
    return places


def redistributed(tensor: torch.Tensor, placements: tuple[Placement, ...], place: int) -> torch.Tensor:
    """A DTensor in other placements.  What ranks send for that is a call of theirs: one may have no such gradient.

    place: by which ranks tell gradients of the same shape apart (``places_on_meshes``).
    """
    spec = cast("Any", tensor)._spec
    if any(here != there and not here.is_replicate() for here, there in zip(spec.placements, placements, strict=True)):
        ledger = ledger_of(DeviceMesh.from_torch(spec.mesh).ranks)
        if ledger is not None:
            ledger.note(_call_of(place, tuple(tensor.shape), tensor.dtype, tuple(spec.placements), placements))
    return cast("Any", tensor).redistribute(placements=placements)


@functools.lru_cache(maxsize=1024)
def _call_of(
    place: int, shape: tuple[int, ...], dtype: torch.dtype, here: tuple[Placement, ...], there: tuple[Placement, ...]
) -> Call:
    moved = " to ".join(f"({', '.join(map(repr, placements))})" for placements in (here, there))
    text = f"shardfuse.optim: gradient {place} of the mesh, {list(shape)} {dtype}, from {moved}"
    return Call.of(text, line=caller_line(in_modules=True))


def note_failure_beside(listed: Sequence[tuple[object, object, object]], *, is_normed: bool = True) -> None:
    """Note that this rank has failed where the others add up the norm of such tensors, and wait for it.

    Its record of calls then differs from theirs, wherever it goes on, and the watchdog ends all by that.  Where all
    have failed alike, all have noted it.  listed: tensors with mesh and placements as the caller has passed them, right
    or wrong: placements that do not fit the mesh are taken for such as cut it, and of what is no mesh it is not known
    who waits.  is_normed: do the others add up a norm, and not partial sums alone?
    """
    spread: list[tuple[DeviceMesh, Sequence[Placement] | None]] = []
    for tensor, given, placements in listed:
        if has_dtensor((cast("torch.Tensor", tensor),)):
            found = cast("Any", tensor)
            spread.append((mesh_of(found), found.placements))
        elif (mesh := _mesh_in(given)) is not None:
            entries = _placements_in(placements)
            spread.append((mesh, entries if entries is not None and len(entries) == mesh.ndim else None))
    held = [holders.ranks for holders in holders_of([own for own, _ in spread])]
    ranks = tuple(sorted({rank for on in held for rank in on}))
    summed = [own.ranks for own, placed in spread if placed is not None and any(p.is_partial() for p in placed)]
    is_added = is_normed and any(
        len(on) < len(ranks) or _cuts(own, placed) for on, (own, placed) in zip(held, spread, strict=True)
    )
    teams: list[tuple[int, ...]] = [*summed[:1], *([ranks] if is_added else [])]
    for team in sorted({*teams}):
        ledger = ledger_of(team)
        if ledger is not None:
            ledger.note(FAILED_RUN)


def _cuts(mesh: DeviceMesh, placements: Sequence[Placement] | None) -> bool:
    if placements is None:
        return mesh.size > 1
    pairs = zip(mesh.shape, placements, strict=True)
    return any(n > 1 and not p.is_replicate() and not p.is_partial() for n, p in pairs)


def spread_of(
    tensor: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    call: str,
    name: str,
    *,
    is_there: bool = True,
) -> Spread | None:
    """By a DTensor's placements, or by those that the caller gave for a plain tensor; ``None`` where there are none.

    is_there: does this rank add some of it?  Then it raises OptimizerTensorError for placements of dims that a plain
    tensor does not have.  Raises OptimizerTensorError for partial sums.
    """
    if has_dtensor((tensor,)):
        spec = cast("Any", tensor)._spec
        return _spread(mesh_of(tensor), tuple(spec.placements), tensor.numel(), call, name)
    if mesh is None or placements is None:
        return None
    for p in placements if is_there else ():
        dim = getattr(p, "dim", 0)
        if p.is_shard() and not -tensor.ndim <= dim < tensor.ndim:
            expected = f"a tensor that has dim {dim}, as its placements say: ({', '.join(map(repr, placements))})"
            raise OptimizerTensorError(call, name, f"has {tensor.ndim} dims", expected, "give it placements of its own")
    # How much it is as a whole is not known, and each rank has to choose the same one that counts a replica.
    return _spread(mesh, tuple(placements), 0, call, name)


def _spread(mesh: DeviceMesh, placements: tuple[Placement, ...], elements: int, call: str, name: str) -> Spread:
    if any(p.is_partial() for p in placements):
        found = f"is partial sums, placements ({', '.join(map(repr, placements))})"
        advice = "call redistribute(placements=...) of the parameter's placements first, which adds them up"
        raise OptimizerTensorError(call, name, found, "Shard or Replicate on every mesh dimension", advice)
    place = mesh.coordinate(current_rank())
    replicas, replica = 1, 0
    for dim, (extent, placement) in enumerate(zip(mesh.shape, placements, strict=True)):
        if placement.is_replicate():
            replicas, replica = replicas * extent, replica * extent + (place[dim] if place else 0)
    is_sharded = replicas < mesh.size
    return Spread(mesh, is_sharded, replicas, replica if place else -1, elements)


def counted(spreads: Sequence[Spread | None]) -> tuple[list[bool], Team | None]:
    """Which of the tensors this rank counts, and over which ranks the sums are added; no team where that is none.

    A plain tensor of which nothing is known is this rank's own where all are, and the same on every rank beside others.
    """
    known = [s for s in spreads if s is not None]
    held = holders_of([s.mesh for s in known])
    ranks = tuple(sorted({rank for on in held for rank in on.ranks}))
    is_whole = all(not s.is_sharded and len(on.ranks) == len(ranks) for s, on in zip(known, held, strict=True))
    if is_whole or current_rank() not in ranks:
        return [s is None or s.replica >= 0 for s in spreads], None
    team, remaining = Team.of(ranks), iter(held)
    loads: dict[tuple[tuple[int, ...], int], list[int]] = {}
    mine: list[bool] = []
    for s in spreads:
        if s is None:
            on, replicas, replica, elements = ranks, team.size, team.index, 0
        else:
            holders = next(remaining)
            on, elements, replicas = holders.ranks, s.elements, s.replicas * holders.copies
            replica = -1 if s.replica < 0 else s.replica * holders.copies + holders.copy
        load = loads.setdefault((on, replicas), [0] * replicas)
        chosen = load.index(min(load))
        load[chosen] += elements + 1
        mine.append(replica == chosen)
    return mine, team


def as_mesh(call: str, mesh: object, placements: object) -> tuple[DeviceMesh | None, tuple[Placement, ...] | None]:
    """What a caller says of plain tensors.  Raises OptimizerArgumentError."""
    if mesh is None and placements is None:
        return None, None
    said, listed = _mesh_in(mesh), _placements_in(placements)
    if said is None:
        raise OptimizerArgumentError(call, "mesh", mesh, "a DeviceMesh, shardfuse's or torch's, with placements")
    if listed is None:
        raise OptimizerArgumentError(call, "placements", placements, "Shard or Replicate for each mesh dimension")
    if len(listed) != said.ndim:
        raise OptimizerArgumentError(call, "placements", listed, f"{said.ndim} of them, one for each mesh dimension")
    return said, listed


def _mesh_in(said: object) -> DeviceMesh | None:
    """A mesh of shardfuse's or torch's; ``None`` for what is none."""
    if isinstance(said, DeviceMesh):
        return said
    return DeviceMesh.from_torch(cast("TorchDeviceMesh", said)) if hasattr(said, "get_coordinate") else None


def _placements_in(said: object) -> tuple[Placement, ...] | None:
    """One placement, or several; ``None`` for what is none."""
    given = [said] if hasattr(said, "is_shard") else said
    if not isinstance(given, (list, tuple)) or not all(hasattr(p, "is_shard") for p in cast("Sequence[object]", given)):
        return None
    return tuple(cast("Sequence[Placement]", given))
