"""Runs one change of sharding on this rank's tensor: which collective, along which dim, how pieces are put together.

A shard of the outermost part of an axis goes through its own dim, uneven or not.  Any other digit goes through a view
with a dim per digit, which needs even shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from math import prod
from typing import cast

import torch

from ..analysis.communication_table import Collective, communication_of, packed
from ..analysis.sharding import outermost
from ..ir.digits import Axis, Digit, refine
from ..ir.domain import BoundDomain, without
from ..ir.expr import BoundTensor, Expr
from ..ir.layout import local_extent
from ..ir.op import Reduce, Reshard
from ..mesh import DeviceMesh, ParallelType, Team, current_rank
from . import bound_collectives, collective_calls, nccl
from .all_to_all import prepare_exchange
from .bound_collectives import Bind, CollectiveCall, bound
from .collective_arguments import with_extent
from .kept_tensors import made_to_last

Step = Callable[[torch.Tensor], torch.Tensor | None]
Arrange = Callable[[torch.Tensor], torch.Tensor]


def prepare(expr: Expr, rank: int, device: torch.device, *, in_place: bool = False) -> Step:
    """A function from ``rank``'s source piece to its target piece, everything that depends on sizes worked out.

    A `CollectiveCall` where a program may run it on tensors that it allocates itself.  ``in_place``: the source is
    read by this alone, and an all-reduce may write its result there.
    """
    found = communication_of(expr)
    assert found is not None, f"{expr.op.name} changes no sharding"
    source, target = expr.tensors[0], expr.output
    if not found.mesh_dims:
        return _move(found.kind, source, target, rank, device)
    mesh, op = cast(DeviceMesh, target.domain.mesh), expr.op
    team = Team.of(mesh.box(rank, found.mesh_dims), rank)
    if isinstance(op, Reshard) and op.stream is not None:
        assert expr.chunk is not None, "chunks are gathered one by one"
        if found.kind is Collective.COLLECTIVE_PERMUTE:
            return _permute_along(team, expr.chunk, source, target)
        return _broadcast_along(team, op.stream.chunk(expr.chunk, rank), target, rank, device)
    if isinstance(op, Reshard) and op.is_exchange:
        return prepare_exchange(source.domain, target.domain, found.mesh_dims, mesh, rank, device)
    if isinstance(op, Reduce) and found.kind is Collective.ALL_REDUCE:
        return _all_reduce(op.kind, op.axes, source, target, team, rank, device, in_place=in_place)
    if len(found.mesh_dims) != 1:  # an all-gather of numbers of each rank, which stand outermost
        return _gather_ranks(source, target, team, rank, device)
    change = _Change(source.domain, target.domain, found.mesh_dims[0], mesh, team, rank, device, target.dtype.torch)
    if isinstance(op, Reduce):
        (axis,) = op.axes
        return change.reduce_scatter(op.kind, axis)
    match found.kind:
        case Collective.ALL_GATHER:
            return change.all_gather()
        case Collective.SLICE:
            return change.slice()
        case _:
            return change.all_to_all()


def _gather_ranks(source: BoundTensor, target: BoundTensor, team: Team, rank: int, device: torch.device) -> Step:
    """One number of each rank, which stand outermost in ``target``."""
    shape, dtype = target.domain.local_shape(rank), target.dtype.torch

    def step(x: torch.Tensor) -> torch.Tensor:
        return collective_calls.equal_all_gather(x.reshape(1, -1), 0, team).reshape(shape)

    if prod(shape) % team.size:
        return step
    bind = bound_collectives.all_gather(0, team, (team.size, prod(shape) // team.size))
    return bound(bind, step, team, device, source.domain.local_shape(rank), shape, dtype)


def _all_reduce(
    op: collective_calls.Reduction, axes: tuple[int, ...], source: BoundTensor, target: BoundTensor, team: Team,
    rank: int, device: torch.device, *, in_place: bool,
) -> Step:  # fmt: skip
    shape, dtype = target.domain.local_shape(rank), target.dtype.torch

    def step(x: torch.Tensor) -> torch.Tensor:
        return collective_calls.all_reduce(x.squeeze(axes), op, team, in_place=in_place).reshape(shape)

    given = source.domain.local_shape(rank)
    if 0 in shape or not nccl.reduces(op, dtype, team.size):
        if not collective_calls.is_one_step(prod(shape) * dtype.itemsize, team.size):
            return step
        bind = bound_collectives.all_reduce_by_gathering(op, shape, team.size)
        return bound(bind, step, team, device, given, shape, dtype, is_bare=False)
    bind = bound_collectives.all_reduce(op, shape)
    return bound(bind, step, team, device, given, shape, dtype, is_in_place=in_place)


def prepare_packed(
    exprs: Sequence[Expr],
    inputs: Sequence[BoundTensor],
    outputs: Sequence[BoundTensor],
    rank: int,
    device: torch.device,
    in_place: Collection[BoundTensor] = (),
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function from the local ``inputs`` of several collectives to their ``outputs``: one call for all of them.

    By NCCL that is a group, which takes tensors from where they are.  Elsewhere they are put one behind the other, each
    from a multiple of 16 bytes on, as kernels take it that tensors begin.
    """
    steps = [prepare(e, rank, device, in_place=e.tensors[0] in in_place) for e in exprs]
    bound_ones = [s.collectives[0] for s in steps if isinstance(s, CollectiveCall)]
    if len(bound_ones) == len(exprs) and all(c.is_bare for c in bound_ones):
        by_output = dict(zip((e.output for e in exprs), zip(bound_ones, exprs, strict=True), strict=True))
        sources = [inputs.index(by_output[t][1].tensors[0]) for t in outputs]
        return CollectiveCall([by_output[t][0] for t in outputs], sources)
    found = packed(exprs)
    assert found is not None, f"{[e.op.name for e in exprs]} are not one call"
    mesh = cast(DeviceMesh, exprs[0].output.domain.mesh)
    team = Team.of(mesh.box(rank, found.mesh_dims), rank)
    made = {e.output: inputs.index(e.tensors[0]) for e in exprs}
    parts = [(made[t], t.domain.local_shape(rank)) for t in outputs]
    members = team.size if found.kind is Collective.ALL_GATHER else 1
    dtype = exprs[0].output.dtype.torch
    unit = max(16 // dtype.itemsize, 1)
    sizes = [prod(shape) // members for _, shape in parts]
    gaps = made_to_last(lambda: [torch.zeros(-size % unit, dtype=dtype, device=device) for size in sizes], device)
    starts = [0, *accumulate(size + len(gap) for size, gap in zip(sizes, gaps, strict=True))][:-1]

    op = exprs[0].op

    def exchange(x: torch.Tensor) -> torch.Tensor:
        """From what a rank has, flat, to a row for each member that gave one: a gather's, or the one sum of all."""
        if isinstance(op, Reduce):
            return collective_calls.all_reduce(x, op.kind, team, in_place=True)[None]
        return collective_calls.all_gather(x[None], 0, team)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = [tensors[k].reshape(-1) for k, _ in parts]
        flat = torch.cat([piece for pair in zip(own, gaps, strict=True) for piece in pair])
        whole = exchange(flat)
        pieces = [whole[:, start : start + size] for start, size in zip(starts, sizes, strict=True)]
        return tuple(p.contiguous().reshape(shape) for p, (_, shape) in zip(pieces, parts, strict=True))

    return run


def _others(domain: BoundDomain, p: ParallelType) -> Axis:
    return tuple(d for q, digits in domain.sharding if q is not p for d in digits)


class _Change:
    """What one mesh dimension holds, before and after."""

    def __init__(
        self, source: BoundDomain, target: BoundDomain, p: ParallelType, mesh: DeviceMesh, team: Team, rank: int,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.device = device
        self.dtype = dtype
        self.source = source
        self.target = target
        self.team = team
        self.rank = rank
        self.index = team.index
        self.shape = target.local_shape(rank)
        self.had, self.has = source.digits_on(p), target.digits_on(p)
        self.whole = [without(axis, _others(source, p)) for axis in source.logical]
        self.source_shapes = [source.local_shape(r) for r in team.ranks]
        self.target_shapes = [target.local_shape(r) for r in team.ranks]

    def all_gather(self) -> Step:
        at = outermost(self.whole, self.had)
        team, shape = self.team, self.shape
        if at is not None:
            sizes = [s[at] for s in self.source_shapes]
            if _equal(sizes):
                bind = bound_collectives.all_gather(at, team, shape)
                return self.bound(bind, lambda x: collective_calls.equal_all_gather(x, at, team).reshape(shape))
            return lambda x: collective_calls.all_gather(x, at, team, sizes).reshape(shape)
        pieces = self.view(self.source.local_axes(), self.source)
        join = self.joined((*self.had,), self.source.local_axes(), self.target.local_axes(), pieces)
        return lambda x: join(collective_calls.all_gather(x.reshape(1, *pieces), 0, team))

    def reduce_scatter(self, op: collective_calls.Reduction, axis: int) -> Step:
        team, shape = self.team, self.shape
        at = outermost([a for k, a in enumerate(self.whole) if k != axis], self.has)
        if at is not None:
            sizes = [s[at] for s in self.target_shapes]
            if _equal(sizes):
                return self.equal_reduce_scatter(op, axis, at)
            return lambda x: collective_calls.reduce_scatter(x.squeeze(axis), at, op, team, sizes).reshape(shape)
        local = tuple(a for k, a in enumerate(self.source.local_axes()) if k != axis)
        expose = self.exposed(local)
        return lambda x: collective_calls.equal_reduce_scatter(expose(x.squeeze(axis)), 0, op, team).reshape(shape)

    def equal_reduce_scatter(self, op: collective_calls.Reduction, axis: int, at: int) -> Step:
        team, shape = self.team, self.shape

        def step(x: torch.Tensor) -> torch.Tensor:
            return collective_calls.equal_reduce_scatter(x.squeeze(axis), at, op, team).reshape(shape)

        if op != "sum":
            return step
        return self.bound(bound_collectives.reduce_scatter(at, team, shape, self.dtype), step)

    def bound(self, bind: Bind, otherwise: Arrange) -> Arrange:
        """``bind``'s step where the pieces have elements and NCCL takes them, else ``otherwise``."""
        given = self.source.local_shape(self.rank)
        return bound(bind, otherwise, self.team, self.device, given, self.shape, self.dtype)

    def slice(self) -> Step:
        at = outermost(self.whole, self.has)
        shape = self.shape
        if at is not None:
            start = sum(s[at] for s in self.target_shapes[: self.index])
            return lambda x: x.narrow(at, start, shape[at]).view(shape)
        expose, index = self.exposed(self.source.local_axes()), self.index
        return lambda x: expose(x)[index].reshape(shape)

    def all_to_all(self) -> Step:
        team, shape = self.team, self.shape
        a, b = outermost(self.whole, self.had), outermost(self.whole, self.has)
        if a is not None and b is not None and a != b:
            split, concat = [s[b] for s in self.target_shapes], [s[a] for s in self.source_shapes]
            if _equal(split) and _equal(concat):
                piece = with_extent(shape, a, concat[0])
                bind = bound_collectives.all_to_all(b, a, team, piece)
                return self.bound(bind, lambda x: collective_calls.equal_all_to_all(x, b, a, team).reshape(shape))
            return lambda x: collective_calls.all_to_all(x, b, a, team, split, concat).reshape(shape)
        expose = self.exposed(self.source.local_axes())
        left = tuple(without_digits(axis, self.has, self.cuts()) for axis in self.source.local_axes())
        pieces = self.view(left, self.target)
        join = self.joined(self.had, left, self.target.local_axes(), pieces)
        return lambda x: join(collective_calls.all_to_all(expose(x), 0, 1, team).reshape(len(team.ranks), *pieces))

    # views with a dim per digit

    def cuts(self) -> dict[Digit, Axis]:
        """Every digit of source and target in common atoms."""
        axes = (*self.source.local_axes(), *self.target.local_axes())
        return refine([*(d for axis in axes for d in axis), *self.had, *self.has])

    def view(self, axes: Sequence[Axis], domain: BoundDomain) -> tuple[int, ...]:
        """One extent for every atom of ``axes``; 0 alone where the rank holds nothing."""
        if 0 in domain.local_shape(self.rank):
            return (0,)
        cuts = self.cuts()
        here = domain.coordinates(self.rank)
        return tuple(local_extent(atom, here) for axis in axes for d in axis for atom in cuts.get(d, (d,)))

    def exposed(self, local: Sequence[Axis]) -> Arrange:
        """From a local tensor to [team, the rest]: the digits that the target has on the mesh in front."""
        cuts, ranks = self.cuts(), len(self.team.ranks)
        atoms = [atom for axis in local for d in axis for atom in cuts[d]]
        shape = self.view(local, self.source)
        if 0 in shape:
            return lambda x: x.reshape(ranks, 0)
        front = [atoms.index(atom) for d in self.has for atom in cuts[d]]
        order = [*front, *(k for k in range(len(atoms)) if k not in front)]
        return lambda x: x.reshape(shape).permute(order).reshape(ranks, -1)

    def joined(self, gathered: Axis, have: Sequence[Axis], want: Sequence[Axis], pieces: tuple[int, ...]) -> Arrange:
        """From [team, the atoms of ``have``] to the local shape of the target, whose axes are ``want``."""
        shape = self.shape
        if 0 in shape:
            return lambda x: x.reshape(shape)
        cuts = self.cuts()
        front = [atom for d in gathered for atom in cuts[d]]
        atoms = [*front, *(atom for axis in have for d in axis for atom in cuts.get(d, (d,)))]
        wanted = [atom for axis in want for d in axis for atom in cuts[d]]
        order = [atoms.index(atom) for atom in wanted]
        extents = tuple(atom.extent for atom in front)
        return lambda x: x.reshape(*extents, *pieces).permute(order).reshape(shape).contiguous()


def _equal(sizes: Sequence[int]) -> bool:
    return sizes[0] > 0 and sizes.count(sizes[0]) == len(sizes)


def without_digits(axis: Axis, gone: Axis, cuts: dict[Digit, Axis]) -> Axis:
    """The atoms of ``axis`` less those of ``gone``."""
    lost = [atom for d in gone for atom in cuts[d]]
    return tuple(atom for d in axis for atom in cuts[d] if atom not in lost)


def _move(kind: Collective, source: BoundTensor, target: BoundTensor, rank: int, device: torch.device) -> Step:
    """From one mesh to another.  Ranks of the target alone are given any tensor, and do not read it."""
    a, b = cast(DeviceMesh, source.domain.mesh), cast(DeviceMesh, target.domain.mesh)
    dtype, shape = source.dtype.torch, target.domain.local_shape(rank if rank in b.ranks else b.ranks[0])
    root = a.ranks[0]
    ranks = b.ranks if root in b.ranks else (root, *b.ranks)  # pieces go out in the order of the target's ranks
    if kind in (Collective.BROADCAST, Collective.SCATTER) and rank not in ranks:
        return lambda _: None  # one of several ranks that have it, and not the one that gives it
    if kind is Collective.BROADCAST:
        return lambda x: _only_in(b, rank, collective_calls.broadcast(x, shape, dtype, device, root, ranks))
    if kind is Collective.SEND:
        return _send(a, b, shape, dtype, rank, device)
    if kind is Collective.SCATTER:
        at = outermost(target.domain.logical, target.domain.sharding[0][1])
        assert at is not None, "a scatter is of the outermost part of an axis"
        sizes = [target.domain.local_shape(r)[at] if r in b.ranks else 0 for r in ranks]
        whole = source.domain.local_shape(root)
        return lambda x: _only_in(b, rank, collective_calls.scatter(x, at, sizes, whole, dtype, device, root, ranks))
    at = outermost(source.domain.logical, source.domain.sharding[0][1])
    assert at is not None, "a gather is of the outermost part of an axis"
    home = b.ranks[0]
    everyone = tuple(dict.fromkeys((*a.ranks, home)))
    pieces = [source.domain.local_shape(r)[at] if r in a.ranks else 0 for r in everyone]
    empty = [0 if k == at else n for k, n in enumerate(target.domain.local_shape(home))]

    def gather(x: torch.Tensor) -> torch.Tensor | None:
        mine = x if rank in a.ranks else torch.empty(empty, dtype=dtype, device=device)
        return collective_calls.gather(mine, at, pieces, home, everyone)

    return gather


def _only_in(mesh: DeviceMesh, rank: int, x: torch.Tensor) -> torch.Tensor | None:
    return x if rank in mesh.ranks else None


def _broadcast_along(team: Team, root: int, target: BoundTensor, rank: int, device: torch.device) -> Step:
    """From the ``root``-th of the team to all of it."""
    shape, dtype, giver = target.domain.local_shape(rank), target.dtype.torch, team.ranks[root]

    def step(x: torch.Tensor) -> torch.Tensor:
        given = x.reshape(shape) if rank == giver else None
        return collective_calls.broadcast(given, shape, dtype, device, giver, team.ranks)

    return step


def _permute_along(team: Team, distance: int, source: BoundTensor, target: BoundTensor) -> Step:
    """From each of the team to the one ``distance`` before it, in a ring: one call, a send and a receive."""
    taker, giver = ((team.index + k) % team.size for k in (-distance, distance))
    given, shape = source.domain.local_shape(team.rank), target.domain.local_shape(team.rank)
    give = [prod(given) if k == taker else 0 for k in range(team.size)]
    take = [shape if k == giver else (0,) for k in range(team.size)]
    return lambda x: collective_calls.exchange(x.reshape(-1), give, take, team)[giver]


def _send(
    a: DeviceMesh, b: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype, rank: int, device: torch.device
) -> Step:
    """Rank k of ``a`` sends to rank k of ``b``, in order of the pairs: chains of ranks do not wait in a ring."""
    pairs = list(zip(a.ranks, b.ranks, strict=False))

    def step(x: torch.Tensor) -> torch.Tensor | None:
        out: torch.Tensor | None = None
        for src, dst in pairs:
            if src == dst == rank:
                out = x
            elif src == rank:
                collective_calls.send(x, dst)
            elif dst == rank:
                out = collective_calls.recv(shape, dtype, device, src)
        return out

    return step


def sum_over_mesh(
    n: int, mesh: DeviceMesh, mesh_dims: Sequence[ParallelType], team: Sequence[int], device: torch.device
) -> int:
    """The sum of every rank's ``n`` along ``mesh_dims``, on each rank of ``team``: 8 bytes a mesh dimension.

    Where ``team`` has ranks that ``mesh`` lacks, they learn it from one sum over all of ``team``, to which one rank of
    each place along ``mesh_dims`` adds.  A rank that is not in ``team`` guesses, without the others: it runs
    only what depends on no mesh.
    """
    rank = current_rank()
    if rank not in team:
        return n * prod(mesh.extent(p) for p in mesh_dims)
    if set(team) <= set(mesh.ranks):
        teams = [mesh.team(rank, p) for p in mesh_dims]
    else:
        place = mesh.coordinate(rank)
        others = [mesh.mesh_dim(p) for p in mesh.parallel_types if p not in mesh_dims]
        teams, n = [tuple(team)], 0 if place is None or any(place[k] for k in others) else n
    total = torch.tensor([n], dtype=torch.int64, device=device)
    for ranks in teams:
        total = collective_calls.all_reduce(total, "sum", Team.of(ranks, rank))
    return int(total.item())
