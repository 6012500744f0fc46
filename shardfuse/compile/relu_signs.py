# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
"""The gradient of a ReLU takes the sign from what the ReLU reads, where its kernel reads that anyway.

before, in the joint graph of a forward and its backward, behind a batch norm of an image::

    %h = ...                                       # (%image - mean) * rstd * weight + bias
    %relu = aten.relu(%h)
    %le = aten.le(%relu, 0)                        # in the backward
    %masked = aten.where(%le, 0, %gradient)
    %mul = aten.mul(%masked, %image - mean)        # the gradient of the weight, then summed

The kernel of the gradients reads the image, the gradient and the result of the ReLU, which a convolution needs, and
here gives a sign alone: three passes over memory.

after: ``aten.le(%h, 0)``.  A ReLU's result is at most zero exactly where what it reads is, NaN included; the kernel
computes that again from the image, and reads two tensors.

It is done for ``%h`` that follows from one large tensor by pointwise ops.  A concatenation is not one tensor.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch.fx import Graph, Node

from .aten_table import is_view
from .node_facts import elements, is_sized

SMALL = 16
"""A tensor of a sixteenth of the elements or fewer, as a vector of weights, costs no pass over memory."""


def take_signs_from_inputs(graph: Graph, *, only_gpu: bool) -> int:
    """Of how many ReLUs the gradient takes the sign from what the ReLU reads, from now on."""
    count = 0
    for sign in graph.find_nodes(op="call_function", target=torch.ops.aten.le.Scalar):
        read, bound = sign.args
        relu = _unaliased(read)
        if bound != 0 or relu.target is not torch.ops.aten.relu.default:
            continue
        value = relu.meta.get("val")
        if only_gpu and not (isinstance(value, torch.Tensor) and value.is_cuda):
            continue
        h: Any = relu.args[0]
        source = _only_large_source(h)
        if source not in (None, h) and not _behind(sign).isdisjoint(_behind(source, without=h)):
            sign.replace_input_with(read, h)
            count += 1
    return count


def _unaliased(n: Any) -> Node:
    while n.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        n = n.args[0]
    return n


def _only_large_source(h: Node) -> Node | None:
    """The tensor from which pointwise ops compute ``h``, where all others are small."""
    large: Node | None = None
    seen: set[Node] = set()
    waiting = [h]
    while waiting:
        n = waiting.pop()
        if not is_sized(n):
            return None
        if n in seen or elements(n) * SMALL <= elements(h):
            continue
        seen.add(n)
        if _is_recomputed(n):
            waiting += n.all_input_nodes
        elif large is None and n.target is not torch.ops.aten.cat.default:
            large = n
        else:
            return None
    return large


def _behind(n: Node, without: Node | None = None) -> Set[Node]:
    """What pointwise ops compute from ``n``, without what follows from ``without``."""
    found: set[Node] = set()
    waiting = [n]
    while waiting:
        for user in waiting.pop().users:
            if user is not without and user not in found and _is_recomputed(user):
                found.add(user)
                waiting.append(user)
    return found


def _is_recomputed(n: Node) -> bool:
    """May a backward compute it again from its inputs?  Random numbers are saved."""
    is_pointwise = isinstance(n.target, torch._ops.OpOverload) and torch.Tag.pointwise in n.target.tags
    return is_pointwise or is_view(n) or n.target is torch.ops.prims.convert_element_type.default
