"""Runs an exchange: an all-to-all between any two shardings, in which each rank gives each other what that one lacks.

What a rank holds of a tensor is the product of what it holds of each axis, and so is what another one lacks of it: an
exchange follows from the unsharded indices of every rank along every axis.

Where pieces are of rows before, and differ along one axis after (cyclic to blocked; columns to rows), two gathers along
those axes put all of them in order; else each piece is cut out and put in by itself, as a gather along another axis
would transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from ..ir.domain import BoundDomain
from ..mesh import DeviceMesh, ParallelType, Team
from ..ops.evaluate import holds_digit, unsharded_index
from ..ops.moved_bits import moved
from . import collective_calls, packing
from .kept_tensors import made_to_last

_CPU = torch.device("cpu")
Step = Callable[[torch.Tensor], torch.Tensor]
Indices = list[torch.Tensor]
"""Unsharded indices along each axis, ascending."""


def prepare_exchange(
    source: BoundDomain,
    target: BoundDomain,
    dims: Sequence[ParallelType],
    mesh: DeviceMesh,
    rank: int,
    device: torch.device,
) -> Step:
    """A function from ``rank``'s piece of ``source`` to its piece of ``target``, which differ on ``dims``."""
    team = Team.of(mesh.box(rank, dims), rank)
    replicated = [p for p in dims if not source.digits_on(p)]
    has = {r: _indices(source, r) for r in team.ranks}
    lacks = {r: _indices(target, r) for r in team.ranks}

    def gives(giver: int, taker: int) -> bool:
        """Of ranks with equal pieces the one beside the taker gives."""
        return all(mesh.index(giver, p) == mesh.index(taker, p) for p in replicated)

    cut, put = _axes(target, dims), _axes(source, dims)
    along = (put or [0])[0] if target.logical and cut in ([], [0]) and len(put) < 2 else None
    return between(team, has, lacks, gives, along, device)


def between(
    team: Team,
    has: Mapping[int, Indices],
    lacks: Mapping[int, Indices],
    gives: Callable[[int, int], bool],
    along: int | None,
    device: torch.device,
) -> Step:
    """A function from what this member ``has`` to what it ``lacks``: for each member, unsharded indices of each axis.

    ``gives``: does the one rank give to the other what that one lacks?  ``along``: the axis along which pieces of rows
    are put together, where all are.
    """
    rank = team.rank
    given = [_common(has[rank], lacks[r]) if gives(rank, r) else None for r in team.ranks]
    taken = [_common(lacks[rank], has[r]) if gives(r, rank) else None for r in team.ranks]
    shape = tuple(len(index) for index in lacks[rank])

    def step() -> Step:
        plan = _Plan(team, shape, _pieces(given, device), _pieces(taken, device))
        return plan.by_pieces(device) if along is None else plan.by_two_gathers(along, device)

    return made_to_last(step, device)


def _axes(domain: BoundDomain, dims: Sequence[ParallelType]) -> list[int]:
    """The axes of which the mesh dimensions hold parts; no facts of one rank, as they say how pieces lie on the way."""
    digits = [d for p in dims for d in domain.digits_on(p)]
    return [k for k, axis in enumerate(domain.logical) if any(holds_digit(axis, d) for d in digits)]


def _indices(domain: BoundDomain, rank: int) -> Indices:
    return [unsharded_index(domain, k, rank, _CPU) for k in range(len(domain.logical))]


def _common(own: Indices, others: Indices) -> Indices:
    """Along each axis the places in ``own`` of what ``others`` have too; both ascend."""
    return [torch.isin(a, b, assume_unique=True).nonzero().reshape(-1) for a, b in zip(own, others, strict=True)]


@dataclass(frozen=True)
class _Piece:
    """A part of a local tensor: places along each axis."""

    places: tuple[torch.Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(p) for p in self.places)

    def slices(self) -> tuple[slice, ...] | None:
        """The same places by start, stop and step, where they can be told so."""
        found: list[slice] = []
        for places in self.places:
            steps = places.diff()
            step = int(steps[0]) if len(steps) else 1
            if not bool((steps == step).all()):
                return None
            start = int(places[0]) if len(places) else 0
            found.append(slice(start, start + step * len(places), step))
        return tuple(found)


def _pieces(found: Sequence[Indices | None], device: torch.device) -> tuple[_Piece | None, ...]:
    """Without those that are empty."""
    return tuple(
        None if places is None or any(len(p) == 0 for p in places) else _Piece(tuple(p.to(device) for p in places))
        for places in found
    )


@dataclass(frozen=True)
class _Plan:
    """``given``, ``taken``: what each member of the team is given of the tensor before, and gives of the one after."""

    team: Team
    after: tuple[int, ...]
    given: tuple[_Piece | None, ...]
    taken: tuple[_Piece | None, ...]

    def exchange(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What each member gives, in the shape of its piece."""
        sizes = [0 if p is None else prod(p.shape) for p in self.given]
        shapes = [(0,) if p is None else p.shape for p in self.taken]
        return collective_calls.exchange(flat, sizes, shapes, self.team)

    def by_two_gathers(self, put: int, device: torch.device) -> Step:
        own = [p.places[0] for p in self.given if p is not None]
        order = torch.cat(own) if own else torch.empty(0, dtype=torch.int64, device=device)
        pieces = [(k, p) for k, p in enumerate(self.taken) if p is not None]
        landed = torch.cat([p.places[put] for _, p in pieces]) if pieces else None
        back = None if landed is None or bool((landed.diff() == 1).all()) else landed.argsort()
        plan, after = self, self.after

        def exchange(x: torch.Tensor) -> torch.Tensor:
            found = plan.exchange(x.index_select(0, order).reshape(-1))
            if not pieces:
                return x.new_empty(after)
            whole = torch.cat([found[k] for k, _ in pieces], put)
            return (whole if back is None else whole.index_select(put, back)).contiguous()

        return partial(moved, exchange)

    def by_pieces(self, device: torch.device) -> Step:
        given = [p for p in self.given if p is not None]
        cuts, shapes = [_cutter(p) for p in given], [p.shape for p in given]
        sizes = [prod(shape) for shape in shapes]
        puts = [(k, p, p.slices()) for k, p in enumerate(self.taken) if p is not None]
        plan, after = self, self.after

        def exchange(x: torch.Tensor) -> torch.Tensor:
            flat = x.new_empty(sum(sizes))
            parts = [part.view(shape) for part, shape in zip(flat.split_with_sizes(sizes), shapes, strict=True)]
            packing.copy_all(parts, [cut(x) for cut in cuts])
            found = plan.exchange(flat)
            out = x.new_empty(after)
            for k, piece, slices in puts:
                if slices is not None:
                    out[slices] = found[k]
                else:
                    out[_open_mesh(piece.places)] = found[k]
            return out

        return partial(moved, exchange)


def _cutter(piece: _Piece) -> Step:
    slices = piece.slices()
    if slices is not None:
        return lambda x: x[slices]
    places = _open_mesh(piece.places)
    return lambda x: x[places]


def _open_mesh(places: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Index tensors that broadcast to the product of the places."""
    n = len(places)
    return tuple(p.reshape([-1 if d == k else 1 for d in range(n)]) for k, p in enumerate(places))
