# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
"""Rematerialisation: large tensors that one group of nodes would store for others, which compute them themselves.

before, of the backward of squeeze and excitation, where ``%x`` is what a convolution gave, and ``%gate`` small::

    %act = ...                                  # a batch norm and SiLU of %x
    %sum = sum(mul(%grad, %act), [2, 3])        # one group, which gives %scaled and %sigmoid too
    %scaled = mul(%grad, %gate)
    %sigmoid = sigmoid(norm(%x))
    ...                                         # convolutions of %sum, which give %back
    %sums = sum(mul(add(%scaled, %back), %sigmoid), [0, 2, 3])     # another, which reads %x as well

after: the second group computes ``%scaled`` and ``%sigmoid`` of ``%grad`` and ``%x``.  Nothing large is handed over: of
128 x 144 x 56 x 56 numbers in 16 bits that were 925 MB, where 231 are read now.

All that compute such a tensor must be regions that are taken, so that they compute the same: Inductor rounds numbers of
16 bits only where it stores them, a region at each op.  What is compared for equality is handed over, as an element and
the largest of its row are, which kernels that contract products and sums in other ways would tell apart.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..device.region_costs import BYTES_PER_US, HEAVY, OPS_PER_US
from .aten_collectives import is_start
from .aten_table import aten_ops, is_view, is_widening
from .node_facts import PARTS, elements, is_fusable, is_pointwise, nbytes, op_name
from .random_op import is_draw
from .region_parts import SMALL
from .translation import is_same_size, tensor_of

_REFUSED = frozenset(
    (*PARTS, *(getattr(getattr(torch.ops.aten, op), kind) for op in ("eq", "ne") for kind in ("Tensor", "Scalar")))
)
"""Parts of a tensor, which would be computed from all of it, and what kernels must agree on to the last bit."""


@dataclass(frozen=True)
class Rematerialised:
    """``results``: tensors that each group which reads them computes, with these groups, the tensor's own first.
    ``nodes``: these tensors, and the nodes of their groups that they are computed from."""

    results: dict[Node, tuple[int, ...]] = field(default_factory=dict[Node, tuple[int, ...]])
    nodes: dict[Node, None] = field(default_factory=dict[Node, None])


def rematerialised_in(
    groups: Sequence[Sequence[Node]], epochs: Mapping[Node, int], stored: Collection[Node] = frozenset()
) -> Rematerialised:
    """Tensors whose rematerialisation saves at least their own bytes, and takes less time than these.

    ``groups``: disjoint, each in the order of the graph.  ``epochs``: of every node.  ``stored``: handed over in any
    case.
    """
    of = {n: k for k, group in enumerate(groups) for n in group}
    alike = [any(map(is_start, group)) for group in groups]  # ranks decide on these alike
    reads = [_read_by(group) for group in groups]
    found, wanted = Rematerialised(), set(stored)
    for k, group in enumerate(groups):
        inside = dict.fromkeys(group)
        least = max(map(nbytes, group)) // SMALL
        for n in group:
            if alike[k] or nbytes(n) <= least or n in wanted or not _is_elementwise(n):
                continue
            readers = _readers(n, inside)
            units = list(dict.fromkeys(of[u] for u in readers if u in of))
            if not units or any(u not in of or epochs[u] != epochs[n] for u in readers) or any(alike[u] for u in units):
                continue  # something else reads it, or what it is made of has changed by then
            chain, leaves = _chain(n, inside, least, found)
            lost = [a for a in leaves if not _is_in_memory(a, inside, of)]
            if any(a in found.results for a in leaves) or any(nbytes(a) > least for a in lost):
                continue  # it would be computed from what is not stored
            if any(m.target in _REFUSED for m in (*chain, *readers)) or not _tells_sizes(leaves, n):
                continue
            if _gains(n, chain, leaves, [reads[u] for u in units]):
                found.results[n] = (k, *units)
                found.nodes.update(dict.fromkeys(chain))
                wanted |= leaves
                for u in units:
                    reads[u] |= leaves
    return found


def _gains(n: Node, chain: Iterable[Node], leaves: Collection[Node], reads: Sequence[set[Node]]) -> bool:
    """Are bytes and time saved?  ``reads``: for each group that reads ``n``, its other inputs."""
    own = nbytes(n)
    large = [a for a in leaves if SMALL * nbytes(a) > own]
    saved = own + sum(own - sum(nbytes(a) for a in large if a not in read) for read in reads)
    computed = sum(elements(m) * _instructions(m) for m in chain) * len(reads)
    return saved >= own and saved / BYTES_PER_US > computed / OPS_PER_US


def _instructions(n: Node) -> int:
    """Instructions for one element."""
    heavy: Mapping[str, int] = HEAVY
    return heavy.get(op_name(n), 1)


def _readers(n: Node, inside: Collection[Node]) -> list[Node]:
    """Who reads ``n`` of those that are not ``inside``: itself, a view of it, or a wider copy, which is not stored.  A
    part of it is a reader by itself."""
    found: list[Node] = []
    for u in n.users:
        is_whole = is_view(u) and u.target not in PARTS
        if u.users and (is_whole or (is_widening(u) and u in inside)):
            found += _readers(u, inside)
        elif u not in inside or u.target in PARTS:
            found.append(u)
    return found


def _tells_sizes(leaves: Collection[Node], n: Node) -> bool:
    """Are symbols among the sizes of ``n`` sizes of what it is made of too?  A region takes them from its inputs."""
    have = [size for a in leaves if isinstance(a.meta.get("val"), torch.Tensor) for size in tensor_of(a).shape]
    wanted = [size for size in tensor_of(n).shape if isinstance(size, torch.SymInt)]
    return all(any(is_same_size(own, size) for own in have) for size in wanted)


def _is_elementwise(n: Node) -> bool:
    """Is it computed element by element?"""
    if n.op != "call_function" or n.target is operator.getitem or is_draw(n):
        return False
    is_random = isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags
    return not is_random and (is_pointwise(n) or is_view(n) or is_widening(n) or n.target in aten_ops().factories)


def _chain(n: Node, inside: Collection[Node], least: int, found: Rematerialised) -> tuple[dict[Node, None], set[Node]]:
    """The nodes of the group that ``n`` is made of, itself among them, and what these read.

    What others read of the group is read here too.  So is a costly function of a tensor of at most ``least`` bytes, as
    the sigmoid of a gate is: rematerialised, it would be computed for each element of ``n``.
    """
    chain: dict[Node, None] = {}
    leaves: set[Node] = set()
    waiting = [n]
    while waiting:
        m = waiting.pop()
        if m in chain:
            continue
        is_stored = m not in (n, *found.results) and m in inside and bool(_readers(m, inside))
        is_read = is_stored or (nbytes(m) <= least and _instructions(m) > 1)
        if m in inside and _is_elementwise(m) and not is_read:
            chain[m] = None
            waiting += m.all_input_nodes
        else:
            leaves.add(_stored(m, inside))
    return chain, leaves


def _is_in_memory(leaf: Node, inside: Collection[Node], of: Mapping[Node, int]) -> bool:
    """Is it stored whether or not something is rematerialised from it?"""
    return bool(_readers(leaf, inside)) if leaf in inside else leaf in of or not is_fusable(leaf)


def _read_by(group: Sequence[Node]) -> set[Node]:
    inside = dict.fromkeys(group)
    return {_stored(a, inside) for n in group for a in n.all_input_nodes if a not in inside}


def _stored(n: Node, inside: Collection[Node]) -> Node:
    """What is in memory, of which ``n`` is a view or a wider copy."""
    while n not in inside and n.target not in PARTS and (is_view(n) or is_widening(n)) and isinstance(n.args[0], Node):
        n = n.args[0]
    return n
