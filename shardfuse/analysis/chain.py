"""The cheapest chain of steps that takes a tensor from one sharding to another, by an explicit cost model.

    have T[i0/4@mesh_y, i1/4@mesh_x], want T[i0/4@mesh_x, i1]
    1. all_gather over mesh_x    2. all_to_all over (mesh_y, mesh_x) ...        or        one all_to_all over both

States are what the mesh dimensions hold: each what it had, what it shall have, or nothing.  A step changes one of them
(slice: free; all_gather; all_to_all between digits that stand beside each other), or all that are left at once: an
exchange, an all-to-all over several mesh dimensions or between digits that overlap (cyclic to blocked), in which each
rank sends each other what that one lacks.  A step costs a latency, its bytes over the slowest link that it uses, and
the passes over memory that put pieces in order.  The shortest way through the states is the chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..ir.digits import Axis, extent
from ..ir.domain import BoundDomain, Sharding, without
from ..mesh import DeviceMesh, ParallelType
from .sharding import is_even, is_possible, ordered, outermost, stand_together


@dataclass(frozen=True)
class Links:
    """What joins ranks: latencies in seconds, bandwidths in bytes per second of one rank.  Nodes hold neighbours."""

    ranks_per_node: int
    latency: float
    latency_across: float
    bandwidth: float
    bandwidth_across: float
    memory: float

    def seconds(self, ranks: Sequence[int], received: float, moved: float) -> float:
        """A collective of ``ranks`` in which each receives so many bytes, and moves so many in its own memory."""
        is_across = len(dict.fromkeys(r // self.ranks_per_node for r in ranks)) > 1
        latency = self.latency_across if is_across else self.latency
        bandwidth = self.bandwidth_across if is_across else self.bandwidth
        return latency + received / bandwidth + moved / self.memory


ONE_STEP_BYTES = 8 * 2**20
"""Up to here an all-reduce that adds up in float32 gathers all that there is, n - 2 times the bytes more than in two
steps: as many as another call takes the host time."""


PAIR_BYTES = 4 * 2**20
"""Up to here two ranks give each other 16-bit partial sums that a kernel then adds up, above they all-reduce them.

With a residual and an RMSNorm of rows of 8192, in a CUDA graph on two H200s: 2 MB 34.9 us against 37.3, 32 MB 204
against 175."""


def h200_nodes(ranks_per_node: int) -> Links:
    """H200s joined by NVLink to a node, nodes by a 400 Gb/s link for each GPU; about what NCCL reaches."""
    return Links(ranks_per_node, 12e-6, 30e-6, 350e9, 45e9, 3.5e12)


@dataclass(frozen=True)
class ChainStep:
    """``kind``: slice, all_gather, all_to_all, exchange.  ``sharding``: what the tensor has after it."""

    kind: str
    mesh_dims: tuple[ParallelType, ...]
    sharding: Sharding
    seconds: float


def cheapest_chain(
    mesh: DeviceMesh,
    logical: Sequence[Axis],
    have: Sharding,
    want: Sharding,
    itemsize: int,
    links: Links,
) -> list[ChainStep]:
    """The steps from ``have`` to ``want``; none where they are equal.  The same on every rank."""
    search = _Search(mesh, tuple(logical), dict(want), itemsize, links)
    known: dict[Sharding, tuple[ChainStep, ...]] = {}
    queue: list[tuple[float, int, int, Sharding, tuple[ChainStep, ...]]] = [(0.0, 0, 0, ordered(have), ())]
    pushed = 0
    while queue:
        seconds, length, _, state, chain = heapq.heappop(queue)
        if state in known:
            continue
        known[state] = chain
        if state == ordered(want):
            return list(chain)
        for step in search.steps(dict(state)):
            if step.sharding not in known:
                pushed += 1
                heapq.heappush(queue, (seconds + step.seconds, length + 1, pushed, step.sharding, (*chain, step)))
    raise AssertionError(f"an exchange reaches {want} from {have}")


Entries = dict[ParallelType, Axis]


@dataclass(frozen=True)
class _Search:
    mesh: DeviceMesh
    logical: tuple[Axis, ...]
    want: Entries
    itemsize: int
    links: Links

    def steps(self, state: Entries) -> Iterator[ChainStep]:
        """All steps that one can take from here."""
        changed = tuple(p for p in self.mesh.parallel_types if state.get(p) != self.want.get(p))
        for p in changed:
            had, has = state.get(p, ()), self.want.get(p, ())
            rest = {q: digits for q, digits in state.items() if q is not p}
            if had and is_possible(rest, self.logical, self.mesh):
                yield self.step("all_gather", (p,), state, rest)
            if not has or not is_possible({**rest, p: has}, self.logical, self.mesh):
                continue
            if not had:
                yield self.step("slice", (p,), state, {**rest, p: has})
            elif self.is_all_to_all(rest, had, has, self.mesh.extent(p)):
                yield self.step("all_to_all", (p,), state, {**rest, p: has})
        yield self.step("exchange", changed, state, self.want)

    def is_all_to_all(self, rest: Entries, had: Axis, has: Axis, ranks: int) -> bool:
        """Are pieces regular: between even parts, or the outermost parts of two axes?  Then they may be uneven."""
        if is_even(had, ranks) and is_even(has, ranks):
            return stand_together([*rest.values(), had, has])
        places = outermost(self.local(rest), had), outermost(self.local(rest), has)
        return None not in places and places[0] != places[1]

    def local(self, entries: Entries) -> tuple[Axis, ...]:
        gone = tuple(d for digits in entries.values() for d in digits)
        return tuple(without(axis, gone) for axis in self.logical)

    def bytes(self, entries: Entries) -> int:
        domain = BoundDomain(self.logical, self.mesh, ordered(entries.items()))
        return prod(extent(axis) for axis in domain.local_axes()) * self.itemsize

    def step(self, kind: str, dims: tuple[ParallelType, ...], before: Entries, after: Entries) -> ChainStep:
        ranks = self.mesh.box(self.mesh.ranks[0], dims)
        gives, gets = self.bytes(before), self.bytes(after)
        received = gets * (1 - 1 / len(ranks))
        match kind:
            case "slice":
                seconds = 0.0
            case "all_gather":
                is_in_order = all(outermost(self.logical, before[p]) == 0 for p in dims)
                seconds = self.links.seconds(ranks, received, 0 if is_in_order else 2 * gets)
            case "all_to_all":
                seconds = self.links.seconds(ranks, received, 2 * gives + 2 * gets)
            case _:
                seconds = self.links.seconds(ranks, received, gives + 5 * gets)
        return ChainStep(kind, dims, ordered(after.items()), seconds)
