# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
"""Large tensors that one group of nodes would hand to others in memory, and that each makes anew of what it reads.

before, of the backward of squeeze and excitation, where ``%x`` is what a convolution gave, and ``%gate`` small::

    %act = ...                                  # a batch norm and SiLU of %x
    %sum = sum(mul(%grad, %act), [2, 3])        # one group, which gives %scaled and %sigmoid too
    %scaled = mul(%grad, %gate)
    %sigmoid = sigmoid(norm(%x))
    ...                                         # convolutions of %sum, which give %back
    %sums = sum(mul(add(%scaled, %back), %sigmoid), [0, 2, 3])     # another, which reads %x as well

after: the second group computes ``%scaled`` and ``%sigmoid`` of ``%grad`` and ``%x``.  Nothing large is handed over: of
128 x 144 x 56 x 56 numbers in 16 bits that were 925 MB, where 231 are read now.

Whichever of the two groups becomes a region: where one does not, Inductor makes what it reads anew, in its own kernel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..device.region_costs import BYTES_PER_US, HEAVY, OPS_PER_US
from .aten_collectives import is_start
from .aten_table import aten_ops, is_view, is_widening
from .node_facts import is_fusable, nbytes
from .random_op import is_draw
from .region_parts import SMALL
from .translation import hinted


@dataclass(frozen=True)
class Anew:
    """``read``: what nobody reads from memory, as its readers make it.  ``made``: this, and the nodes of its group that
    it is made of."""

    read: dict[Node, None] = field(default_factory=dict[Node, None])
    made: dict[Node, None] = field(default_factory=dict[Node, None])


def made_anew(groups: Sequence[Sequence[Node]], epochs: Mapping[Node, int]) -> Anew:
    """What saves at least as many bytes as it has, and takes less time than these.

    ``groups``: disjoint, each in the order of the graph.  ``epochs``: of every node.
    """
    of = {n: k for k, group in enumerate(groups) for n in group}
    reads: dict[int | Node, set[Node]] = {k: _read_by(group) for k, group in enumerate(groups)}
    found = Anew()
    for group in groups:
        if any(map(is_start, group)):
            continue
        inside = dict.fromkeys(group)
        least = max(map(nbytes, group)) // SMALL
        for n in group:
            readers = _readers(n, inside)
            if not readers or nbytes(n) <= least or not _is_remade(n):
                continue
            if any(_asks_for_it(u, of, groups) or epochs[u] != epochs[n] for u in readers):
                continue
            chain, leaves = _chain(n, inside, least)
            if any(a in found.read or (a in inside and nbytes(a) > least) for a in leaves):
                continue
            units = dict.fromkeys(of.get(u, u) for u in readers)
            for u in units:
                reads.setdefault(u, _read_by([u]) if isinstance(u, Node) else set())
            if _gains(n, chain, leaves, [reads[u] for u in units]):
                found.read[n] = None
                found.made.update(dict.fromkeys(chain))
                for u in units:
                    reads[u] |= leaves
    return found


def _gains(n: Node, chain: Iterable[Node], leaves: Collection[Node], reads: Sequence[set[Node]]) -> bool:
    """``reads``: of each reader, what it reads besides."""
    own = nbytes(n)
    large = [a for a in leaves if SMALL * nbytes(a) > own]
    saved = own + sum(own - sum(nbytes(a) for a in large if a not in read) for read in reads)
    computed = sum(_elements(m) * _instructions(m) for m in chain) * len(reads)
    return saved >= own and saved / BYTES_PER_US > computed / OPS_PER_US


def _instructions(n: Node) -> int:
    """Of an element."""
    heavy: Mapping[str, int] = HEAVY
    return heavy.get(f"{n.target}.".split(".")[1], 1)


def _elements(n: Node) -> int:
    value = n.meta.get("val")
    return math.prod(map(hinted, value.shape)) if isinstance(value, torch.Tensor) else 0


def _readers(n: Node, inside: Collection[Node]) -> list[Node]:
    """Who reads ``n`` of those that are not ``inside``: itself, a view of it, or a wider copy, which is not stored."""
    found: list[Node] = []
    for u in n.users:
        if u.users and (is_view(u) or (is_widening(u) and u in inside)):
            found += _readers(u, inside)
        elif u not in inside:
            found.append(u)
    return found


def _asks_for_it(reader: Node, of: Mapping[Node, int], groups: Sequence[Sequence[Node]]) -> bool:
    """Does it take ``n`` from memory whatever we do: a kernel that is not fused, the caller, or ranks alike?"""
    if reader in of:
        return any(map(is_start, groups[of[reader]]))
    return not (is_fusable(reader) or reader.target in aten_ops().reductions)


def _is_remade(n: Node) -> bool:
    """Is it computed element by element?"""
    if n.op != "call_function" or n.target is operator.getitem or is_draw(n):
        return False
    is_random = isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags
    is_pointwise = isinstance(n.target, torch._ops.OpOverload) and torch.Tag.pointwise in n.target.tags
    return not is_random and (is_pointwise or is_view(n) or is_widening(n) or n.target in aten_ops().factories)


def _chain(n: Node, inside: Collection[Node], least: int) -> tuple[dict[Node, None], set[Node]]:
    """The nodes of the group that ``n`` is made of, itself among them, and what these read.

    A costly function of a tensor of at most ``least`` bytes, as the sigmoid of a gate is, is read: where it is made
    anew it would be computed for each element of ``n``.
    """
    chain: dict[Node, None] = {}
    leaves: set[Node] = set()
    waiting = [n]
    while waiting:
        m = waiting.pop()
        if m in chain:
            continue
        is_read = nbytes(m) <= least and _instructions(m) > 1
        if m in inside and _is_remade(m) and not is_read:
            chain[m] = None
            waiting += m.all_input_nodes
        else:
            leaves.add(_stored(m, inside))
    return chain, leaves


def _read_by(group: Sequence[Node]) -> set[Node]:
    inside = dict.fromkeys(group)
    return {_stored(a, inside) for n in group for a in n.all_input_nodes if a not in inside}


def _stored(n: Node, inside: Collection[Node]) -> Node:
    """What is in memory, of which ``n`` is a view or a wider copy."""
    while n not in inside and (is_view(n) or is_widening(n)) and isinstance(n.args[0], Node):
        n = n.args[0]
    return n
