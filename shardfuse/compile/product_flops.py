# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""How many floating-point operations a matrix product, a convolution or an attention of a graph takes.

They follow from shapes alone.  Attention counts all pairs of queries and keys, also where a mask leaves out half of
them, and may have fewer heads of keys and values than of queries, as grouped-query attention has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from .node_facts import is_sized
from .translation import hinted

Count = Callable[[Node], float]
BACKWARD_PRODUCTS = 2.5
"""Attention's backward computes the scores again, and has two products for each of the forward's two."""


def flops_of(node: Node) -> float:
    """0 of any other op, and where the sizes of the call do not tell a tensor's sizes."""
    count = _COUNTS.get(getattr(node.target, "overloadpacket", None))
    if count is None or not all(map(is_sized, (node, *node.all_input_nodes))):
        return 0.0
    return count(node)


def _shape(node: Any) -> Sequence[int]:
    """With numbers in place of symbols: what is computed here is no fact that the graph then holds for."""
    return tuple(map(hinted, node.meta["val"].shape))


def _matrices(left: int) -> Count:
    """``left``: the place of the left operand."""

    def count(node: Node) -> float:
        return 2.0 * math.prod(_shape(node)) * _shape(node.args[left])[-1]

    return count


def _convolution(node: Node) -> float:
    image, weight = node.args[:2]
    return _convolved(image, _shape(weight), node, bool(node.args[6]))


def _convolution_backward(node: Node) -> float:
    """As many again for each gradient that is wanted, of the image and of the weight."""
    gradient, image, weight = node.args[:3]
    wanted: Any = node.args[10]
    return sum(wanted[:2]) * _convolved(image, _shape(weight), gradient, bool(node.args[7]))


def _convolved(image: Any, weight: Sequence[int], result: Any, is_transposed: bool) -> float:
    """Each element of the result, of a transposed convolution each of the image, meets a filter once."""
    return 2.0 * math.prod(_shape(image if is_transposed else result)) * math.prod(weight[1:])


def _attention(node: Node) -> float:
    return _attended(*map(_shape, node.args[:3]))


def _attention_backward(node: Node) -> float:
    return BACKWARD_PRODUCTS * _attended(*map(_shape, node.args[1:4]))


def _attended(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> float:
    """Of shapes [batch, heads, length, size of a head]."""
    return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _counts() -> dict[object, Count]:
    aten: Any = torch.ops.aten
    found: dict[object, Count] = {op: _matrices(0) for op in (aten.mm, aten.bmm, aten._scaled_mm)}
    found |= {op: _matrices(1) for op in (aten.addmm, aten.baddbmm)}
    found |= {aten.convolution: _convolution, aten.convolution_backward: _convolution_backward}
    for kind in ("efficient", "flash", "cudnn"):
        name = f"_scaled_dot_product_{kind}_attention"
        found |= {getattr(aten, name): _attention, getattr(aten, f"{name}_backward"): _attention_backward}
    return found


_COUNTS = _counts()
