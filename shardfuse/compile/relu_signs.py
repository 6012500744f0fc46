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
computes that again from the image, and reads two tensors.  Where the two kernels round apart, an element within a
rounding of zero may pass in one and not in the other: so it is done where all between the image and ``%h`` is computed
in float32 or float64.

It is done for ``%h`` that follows by pointwise ops from one large tensor of its size, which this graph computes; a
concatenation is not one tensor, and the memory of an input may have been written to before the backward reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch.fx import Graph, Node

from .aten_table import is_view
from .node_facts import elements, is_pointwise, is_sized
from .region_parts import SMALL

_CAST: Any = torch.ops.prims.convert_element_type.default
_ALIASES: tuple[Any, ...] = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def take_signs_from_inputs(graph: Graph, *, only_gpu: bool) -> int:
    """Of how many comparisons in a backward it is done.  A graph without gradients stays as it is."""
    tangents = [n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
    backward = _behind(tangents, lambda n: True)
    written = {n.args[0] for n in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    count = 0
    for sign in graph.find_nodes(op="call_function", target=torch.ops.aten.le.Scalar) if tangents else ():
        relu = _unaliased(sign.all_input_nodes[0])
        if sign.args[1:] != (0,) or relu.target is not torch.ops.aten.relu.default or not is_sized(relu):
            continue
        h: Any = relu.args[0]
        source = _only_large_source(h, written) if relu.meta["val"].is_cuda or not only_gpu else None
        if source is not None and _is_read_with(sign, source, h, backward):
            sign.replace_input_with(sign.all_input_nodes[0], h)
            count += 1
    return count


def _unaliased(n: Any) -> Node:
    while n.target in _ALIASES:
        n = n.args[0]
    return n


def _only_large_source(h: Node, written: Set[Any]) -> Node | None:
    """The tensor from which pointwise ops compute ``h``, where all others are small and none is ``written`` to."""
    last = h
    while _is_view(last) or last.target is _CAST:  # neither changes a sign
        last = last.all_input_nodes[0]
    sources: set[Node] = set()
    seen: set[Node] = set()
    waiting = [last]
    while waiting:
        n = waiting.pop()
        if n in seen:
            continue
        seen.add(n)
        is_large = is_sized(n) and elements(n) * SMALL > elements(h)
        if n in written or not is_sized(n) or (is_large and _is_rounded(n)):
            return None
        if _is_recomputed(n):
            waiting += n.all_input_nodes
        elif is_large:
            sources.add(n)
    return _computed_alone(sources, last, h)


def _computed_alone(sources: Set[Node], last: Node, h: Node) -> Node | None:
    """The one of ``sources``, if it is what the graph computes, of the size of ``h``, and not what the ReLU reads."""
    if len(sources) != 1:
        return None
    (source,) = sources
    is_computed = source.op == "call_function" and source.target is not torch.ops.aten.cat.default
    return source if is_computed and source is not last and elements(source) == elements(h) else None


def _is_rounded(n: Node) -> bool:
    """To 16 bits by a pointwise op, which another kernel may leave out."""
    value: torch.Tensor = n.meta["val"]
    return _is_recomputed(n) and not _is_view(n) and value.is_floating_point() and value.dtype.itemsize < 4


def _is_read_with(sign: Node, source: Node, h: Node, backward: Set[Node]) -> bool:
    """Does a pointwise op of the backward read what ``sign`` masks together with what follows from ``source``?"""

    def is_alike(n: Node) -> bool:
        """Elements for elements of ``h``: no mask, and no part."""
        value: Any = n.meta.get("val")
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return n is not h and is_floating and _is_recomputed(n) and is_sized(n) and elements(n) == elements(h)

    return bool(_behind([sign], is_alike) & _behind([source], is_alike) & backward)


def _behind(first: list[Node], takes: Callable[[Node], bool]) -> Set[Node]:
    """What follows from ``first`` through nodes that ``takes`` is true of."""
    found: set[Node] = set()
    waiting = list(first)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and takes(user):
                found.add(user)
                waiting.append(user)
    return found


def _is_recomputed(n: Node) -> bool:
    """May a backward compute it again from its inputs?  Random numbers are saved."""
    return is_pointwise(n) or _is_view(n) or n.target is _CAST


def _is_view(n: Node) -> bool:
    return is_view(n) or n.target in _ALIASES
