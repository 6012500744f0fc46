# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What a region's border costs: tensors that Inductor would not have stored, had it all of the graph."""

from __future__ import annotations

import operator
from typing import cast

from torch.fx import Node

from .aten_table import is_view, is_widening
from .node_facts import is_fusable, nbytes
from .regions import Region


def border_bytes(region: Region) -> int:
    """Written by one side and read by the other, what would stay in registers if Inductor had all.

    What is read behind a matrix product that rests on it, as a residual is, Inductor stores as well.  Of an input that
    others read, too, it saves the reading.
    """
    moved = 0
    for n in region.inputs:
        made = made_by(n)
        if is_fusable(made) and not _is_read_behind(region, made):
            is_own = all(u in region.nodes or u in region.again or is_view(u) for u in made.users)
            moved += (2 if is_own else 1) * nbytes(n)
    far = _behind_others(region)
    for n in region.outputs:
        readers = [u for u in n.users if u not in region.nodes and not _is_rematerialised(u, region)]
        near = [u for u in readers if is_fusable(u) and u not in far]
        if near:
            moved += (2 if len(near) == len(readers) else 1) * nbytes(n)
    return moved


def _is_rematerialised(n: Node, region: Region) -> bool:
    """Is it computed by the regions that read it, so that nothing reads it outside?"""
    return n in region.outside and not (is_view(n) or is_widening(n))


def made_by(n: Node) -> Node:
    """What computes the elements of ``n``, which may be a view of it."""
    while is_view(n):
        n = cast(Node, n.args[0])
    return n


def _is_read_behind(region: Region, source: Node) -> bool:
    """Does ``region`` also wait for something that is no pointwise op and rests on ``source``?"""
    inside = dict.fromkeys((*region.nodes, *region.again))
    held = {source: False}  # of what rests on it: does a path to it lead through another kernel?
    n, last = source, max(region.nodes)
    while n < last:
        n = n.next
        behind = [a for a in n.all_input_nodes if a in held]
        if not behind:
            continue
        is_far = any(held[a] for a in behind)
        if n in inside:
            if is_far:
                return True
            continue
        held[n] = is_far or not (is_fusable(n) or is_view(n))
    return False


def _behind_others(region: Region) -> dict[Node, None]:
    """Readers of what the region gives that also wait for something that is no pointwise op and rests on the region."""
    readers = {u: None for n in region.outputs for u in n.users if u not in region.nodes}
    held: dict[Node, bool] = {}  # of what rests on the region: does a path to it lead through another kernel?
    inside = dict.fromkeys((*region.nodes, *region.outside))
    found: dict[Node, None] = {}
    n = region.nodes[0]
    last = max(readers, default=n)
    while n < last:
        n = n.next
        if n in inside:
            continue
        read = n.all_input_nodes
        behind = [a for a in read if a in held]
        if not behind and not any(a in inside for a in read):
            continue
        is_far = any(held[a] for a in behind)
        if is_far and n in readers:
            found[n] = None
        held[n] = is_far or not (is_fusable(n) or is_view(n) or n.target is operator.getitem)
    return found
