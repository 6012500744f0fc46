"""Groups of nodes of a graph that one op may replace: maximal sets around seeds, each convex, all of them at once.

A set is *convex* where no path leaves it and comes back: one op can then run all of it.  Several sets can be replaced
at once where the graph that has each set as one node has no cycle.  ``grouped`` keeps that graph ordered topologically,
and joins two groups along an edge where no third lies on a path between them (Pearce and Kelly, "A dynamic topological
sort algorithm for directed acyclic graphs", 2006: only what stands between the two in the order is looked at).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass
class Groups:
    """The graph of groups.  Nodes are numbers in a topological order.

    ``of``: the group of each node, named by one of its nodes.  ``place``: of each group, in ``order``.  ``grown``:
    groups that hold a seed.
    """

    followers: Sequence[Sequence[int]]
    epochs: Sequence[int]
    seeds: Sequence[int]
    of: list[int] = field(default_factory=list[int])
    members: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    order: list[int] = field(default_factory=list[int])
    place: dict[int, int] = field(default_factory=dict[int, int])
    grown: dict[int, None] = field(default_factory=dict[int, None])

    def __post_init__(self) -> None:
        nodes = range(len(self.followers))
        self.of, self.order = list(nodes), list(nodes)
        self.members = {n: [n] for n in nodes}
        self.place = {n: n for n in nodes}
        self.grown = dict.fromkeys(self.seeds)

    def join(self, a: int, b: int) -> bool:
        """Make one of the groups of nodes ``a`` and ``b``; False where a path between them leads through a third."""
        first, second = self.of[a], self.of[b]
        if first == second:
            return True
        if self.epochs[a] != self.epochs[b]:
            return False
        if self.place[first] > self.place[second]:
            first, second = second, first
        start, stop = self.place[first], self.place[second]
        behind = self._behind(first, second, stop)
        if behind is None:
            return False
        window = self.order[start + 1 : stop]
        self.members[first] += self.members.pop(second)
        for n in self.members[first]:
            self.of[n] = first
        self.grown.pop(second, None)
        self.grown[first] = None
        before = [g for g in window if g not in behind]
        after = [g for g in window if g in behind]
        self._put(start, [*before, first, *after], stop)
        del self.place[second]
        return True

    def _behind(self, first: int, second: int, stop: int) -> set[int] | None:
        """Groups before place ``stop`` that depend on ``first``; None where ``second`` depends on one of them."""
        found: set[int] = set()
        waiting = [first]
        while waiting:
            group = waiting.pop()
            for n in self.members[group]:
                for m in self.followers[n]:
                    g = self.of[m]
                    if g == second and group != first:
                        return None
                    if g not in (first, second) and g not in found and self.place[g] < stop:
                        found.add(g)
                        waiting.append(g)
        return found

    def _put(self, start: int, groups: Sequence[int], stop: int) -> None:
        """``groups`` into places ``start`` to ``stop``, one fewer than there were: one place stays empty."""
        for k, g in enumerate(groups):
            self.order[start + k] = g
            self.place[g] = start + k
        self.order[stop] = _NOBODY


_NOBODY = -1
"""In the order, where a group stood that has joined another."""


def grouped(
    followers: Sequence[Sequence[int]],
    joinable: Sequence[bool],
    seeds: Sequence[int],
    epochs: Sequence[int],
    siblings: Sequence[tuple[int, int]] = (),
    apart: Collection[tuple[int, int]] = (),
    later: Sequence[int] = (),
) -> list[list[int]]:
    """The groups that hold a seed, each in the order of its nodes.

    ``followers``: of each node those that depend on it; nodes are numbered in a topological order.  ``joinable``: may
    a node be in a group?  ``epochs``: no group holds nodes of two of them.  ``siblings``: pairs to join as well where
    they may be, once all edges have been tried.  ``apart``: edges along which nothing is joined.  ``later``: further
    seeds, of groups that take what the others have left.
    """
    groups = Groups(followers, epochs, seeds=[s for s in seeds if joinable[s]])
    down = [(n, m) for n, after in enumerate(followers) for m in after if joinable[n] and joinable[m]]
    down = [e for e in down if e not in apart]
    down.sort(key=lambda e: (e[1], e[0]))
    up = sorted(down, reverse=True)
    _grow_fully(groups, down, up)
    if _grow(groups, [(n, m) for n, m in siblings if joinable[n] and joinable[m]]):
        _grow_fully(groups, down, up)
    groups.grown |= dict.fromkeys(groups.of[n] for n in later if joinable[n])
    _grow_fully(groups, down, up)
    return sorted(sorted(groups.members[g]) for g in groups.grown)


def _grow_fully(groups: Groups, down: Sequence[tuple[int, int]], up: Sequence[tuple[int, int]]) -> None:
    while _grow(groups, down) or _grow(groups, up):
        pass


def _grow(groups: Groups, pairs: Sequence[tuple[int, int]]) -> bool:
    """Join what can be of the pairs of which one is in a group with a seed; has any been?"""
    joined = False
    for n, m in pairs:
        a, b = groups.of[n], groups.of[m]
        if a != b and (a in groups.grown or b in groups.grown):
            joined = groups.join(n, m) or joined
    return joined
