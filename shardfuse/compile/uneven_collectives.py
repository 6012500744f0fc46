# pyright: reportUnknownMemberType=false
"""Collectives of shards that differ in size, as DTensor writes them.

A collective's tensors are of one size on all ranks, so DTensor pads a short shard before it gathers it and cuts what
was gathered, on all ranks alike; before a reduce-scatter it pads the parts, on all ranks alike, and cuts what a short
rank gets.  A rank whose shard is long has no op in the places where others pad or cut: its graph would allow a region
there that theirs do not.  What all ranks have tells of both: the cut behind the gather, the padding before the
reduce-scatter.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .aten_collectives import is_gather, is_scatter, is_wait
from .aten_table import is_view
from .node_facts import PARTS, shape_of

_aten: Any = torch.ops.aten
_MOVES = (
    operator.getitem,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.cat.default,
    _aten.clone.default,
    torch.ops.prims.convert_element_type.default,
)
"""What moves elements and drops none, beside views."""
_PADS = (_aten.constant_pad_nd.default, _aten.full.default)
"""A part that is empty is padded to zeros alone, which torch may write as such."""
_CHOICES = (_aten.index.Tensor, _aten.index_select.default)
"""What puts rows together that were cut in strides."""


def why_uneven(start: Node) -> str | None:
    """Why the ranks of ``start``, a collective, may have shards of several sizes; None where nothing says so."""
    if is_gather(start):
        cut = _first(start, forward=True)
        return None if cut is None else f"{cut.name} takes a part of what it gathers: shards may differ in size"
    pad = _first(start, forward=False) if is_scatter(start) else None
    return None if pad is None else f"{pad.name} pads what it sums: shards may differ in size"


def _first(start: Node, *, forward: bool) -> Node | None:
    """The first cut behind a gather, or the first padding before a sum, with nothing but moves in between."""
    waiting, seen = [start], {start}
    while waiting:
        n = waiting.pop(0)
        for near in list(n.users) if forward else n.all_input_nodes:
            if near in seen:
                continue
            seen.add(near)
            if _cuts(near) if forward else near.target in _PADS:
                return near
            if near.target in _MOVES or is_wait(near) or is_view(near):
                waiting.append(near)
    return None


def _cuts(n: Node) -> bool:
    """Does it drop rows, or choose them?  A slice of the whole drops none."""
    if n.target in _CHOICES:
        return True
    if n.target not in PARTS:
        return False
    source = n.args[0]
    return not isinstance(source, Node) or shape_of(source) != shape_of(n)
