# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
"""How many floating-point operations a matrix product, a convolution or an attention of a graph takes.

They follow from shapes alone.  Attention counts all pairs of queries and keys, also where a mask leaves out half of
them, and may have fewer heads of keys and values than of queries, as grouped-query attention has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from .node_facts import is_sized
from .translation import hinted

Count = Callable[[Any, Sequence[Any]], float]
"""Of a node and all arguments of its op, by their places."""
BACKWARD_PRODUCTS = 2.5
"""Attention's backward computes the scores again, and has two products for each of the forward's two."""


def flops_of(node: Node) -> float:
    """0 of any other op, and where the sizes of the call do not tell a tensor's sizes."""
    count = _COUNTS.get(getattr(node.target, "overloadpacket", None))
    if count is None or not all(map(is_sized, (node, *node.all_input_nodes))):
        return 0.0
    names = [a.name for a in cast(torch._ops.OpOverload, node.target)._schema.arguments]
    return count(node, [*node.args, *(node.kwargs.get(name) for name in names[len(node.args) :])])


def _shape(node: Any) -> Sequence[int]:
    """With numbers in place of symbols: what is computed here is no fact that the graph then holds for."""
    return tuple(map(hinted, node.meta["val"].shape))


def _matrices(left: int) -> Count:
    """``left``: the place of the left operand."""
    return lambda node, given: 2.0 * math.prod(_shape(node)) * _shape(given[left])[-1]


def _convolution(node: Any, given: Sequence[Any]) -> float:
    return _convolved(given[0], _shape(given[1]), node, bool(given[6]))


def _convolution_backward(node: Any, given: Sequence[Any]) -> float:
    """As many again for each gradient that is wanted, of the image and of the weight."""
    gradient, image, weight = given[:3]
    return sum(given[10][:2]) * _convolved(image, _shape(weight), gradient, bool(given[7]))


def _convolved(image: Any, weight: Sequence[int], result: Any, is_transposed: bool) -> float:
    """Each element of the result, of a transposed convolution each of the image, meets a filter once."""
    return 2.0 * math.prod(_shape(image if is_transposed else result)) * math.prod(weight[1:])


def _attention(query: int, products: float) -> Count:
    """Of shapes [batch, heads, length, size of a head].  ``query``: its place; those of key and value follow."""

    def count(node: Any, given: Sequence[Any]) -> float:
        q, k, v = map(_shape, given[query : query + 3])
        return products * 2.0 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])

    return count


def _packed_attention(query: int, longest: int, products: float) -> Count:
    """Of shapes [..., length, heads, size of a head].  ``longest``: the place of the number of keys of the longest
    sequence; where it is None all sequences are as long as the tensor."""

    def count(node: Any, given: Sequence[Any]) -> float:
        q, k, v = map(_shape, given[query : query + 3])
        length = given[longest].meta["val"] if isinstance(given[longest], Node) else given[longest]
        keys = k[-3] if length is None else hinted(length)
        return products * 2.0 * math.prod(q[:-1]) * keys * (q[-1] + v[-1])

    return count


def _counts() -> dict[object, Count]:
    aten: Any = torch.ops.aten
    found: dict[object, Count] = {op: _matrices(0) for op in (aten.mm, aten.bmm, aten._scaled_mm, aten._int_mm)}
    found |= {op: _matrices(1) for op in (aten.addmm, aten.baddbmm)}
    found |= {aten.convolution: _convolution, aten.convolution_backward: _convolution_backward}
    for kind in ("efficient", "flash", "cudnn"):
        name = f"_scaled_dot_product_{kind}_attention"
        found[getattr(aten, name)] = _attention(0, 1)
        found[getattr(aten, f"{name}_backward")] = _attention(1, BACKWARD_PRODUCTS)
    for op, longest in ((aten._flash_attention_forward, 6), (aten._efficient_attention_forward, 7)):
        found[op] = _packed_attention(0, longest, 1)
    for op in (aten._flash_attention_backward, aten._efficient_attention_backward):
        found[op] = _packed_attention(1, 9, BACKWARD_PRODUCTS)
    return found


_COUNTS = _counts()
