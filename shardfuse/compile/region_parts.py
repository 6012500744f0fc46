"""Parts of a region that share no large tensor, where one of them could run long before the other.

before, of the backward of a block whose modulation has one gradient for each of its norms::

    %late = ...                                   # behind the attention's gradient
    %gate = sum(mul(%grad, %saved), [1])          # of two large tensors that are there when the backward begins
    %shift = sum(%late, [1])
    %cat = cat([%gate, %shift])                   # one region: %grad and %saved stay in memory until %late is made

after: ``%gate`` is a region of its own, and ``%cat`` reads it.  Nothing large is read or written twice for that: what
the two parts hand on is small.  A part whose results are as large as what it reads, as a norm of queries beside one of
keys, stays: one op for both is then less for the host.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from torch.fx import Node

SMALL = 16
"""A tensor is small that has less than this part of the bytes of a group's largest."""


def parts_of(
    group: Sequence[Node], place: Mapping[Node, int], heavy: Sequence[int], size: Callable[[Node], int]
) -> list[list[Node]]:
    """The parts of a convex group, each in order; the whole group where no part could run earlier.

    ``place``: of each node of the graph.  ``heavy``: places of kernels that are no region's, in order: what is ready
    before one of them, and waits for what is ready behind it, keeps its inputs in memory meanwhile.  ``size``: bytes.
    """
    ready = _ready(group, place)
    early = _early(group, ready, heavy, size)
    if not early:
        return [list(group)]
    inside = dict.fromkeys(group)
    for n in reversed(group):  # what only early parts read, and below, what is made of nothing else
        readers = {early.get(u) for u in n.users if u in inside}
        if n not in early and len(readers) == 1 and None not in readers and not _is_small_result(n, inside, early):
            early[n] = next(r for r in readers if r is not None)
    for n in group:
        sources = {early.get(a) for a in n.all_input_nodes if a in inside}
        if n not in early and len(sources) == 1 and None not in sources:
            early[n] = next(s for s in sources if s is not None)
    is_tangled = any(a in inside and early.get(a) is not early[n] for n in early for a in n.all_input_nodes)
    if is_tangled:
        return [list(group)]
    parts: dict[Node | None, list[Node]] = {}
    for n in group:
        parts.setdefault(early.get(n), []).append(n)
    return list(parts.values())


def _is_small_result(n: Node, inside: Mapping[Node, None], early: Mapping[Node, Node]) -> bool:
    """Is it made of other parts of the group?"""
    return any(a in inside and a not in early for a in n.all_input_nodes)


def _ready(group: Sequence[Node], place: Mapping[Node, int]) -> dict[Node, int]:
    """Behind which place of the graph each node could be computed."""
    ready: dict[Node, int] = {}
    for n in group:
        ready[n] = max((ready.get(a, place[a]) for a in n.all_input_nodes), default=0)
    return ready


def _early(
    group: Sequence[Node], ready: Mapping[Node, int], heavy: Sequence[int], size: Callable[[Node], int]
) -> dict[Node, Node]:
    """Nodes that large tensors connect, of parts that could run before a kernel that the group waits for: of each the
    first of its part."""
    sizes = {t: size(t) for n in group for t in (n, *n.all_input_nodes)}
    least = max(max(sizes.values(), default=0) // SMALL, 1)
    first: dict[Node, Node] = {}

    def root(n: Node) -> Node:
        while first.setdefault(n, n) is not n:
            n = first[n]
        return n

    for n in group:
        for a in n.all_input_nodes:
            if sizes[a] >= least or n.target is operator.getitem:
                first[root(n)] = root(a)
    members: dict[Node, list[Node]] = {}
    for n in group:
        members.setdefault(root(n), []).append(n)
    wide = {root(t) for t, count in sizes.items() if count >= least}
    last = max(ready[n] for n in group)
    found: dict[Node, Node] = {}
    for r, nodes in members.items():
        own = max(ready[n] for n in nodes)
        k = bisect_right(heavy, own)
        if r in wide and k < len(heavy) and heavy[k] <= last and _frees_memory(nodes, sizes):
            found |= dict.fromkeys(nodes, nodes[0])
    return found


def _frees_memory(nodes: Sequence[Node], sizes: Mapping[Node, int]) -> bool:
    """Does it give at most half of what it reads?  What is as large is held whichever of the two it is."""
    inside = dict.fromkeys(nodes)
    read = {a: sizes[a] for n in nodes for a in n.all_input_nodes if a not in inside}
    given = sum(sizes[n] for n in nodes if any(u not in inside for u in n.users))
    return 2 * given <= sum(read.values())
