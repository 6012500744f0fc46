# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false
"""Convolutions of contiguous images get channels-last, and everything between them, before regions are planned.

before, where Inductor or cuDNN turns what convolutions read and give::

    %convolution = aten.convolution(%x, %weight, ...)
    %var_mean = aten.var_mean(%convolution, [0, 2, 3])
    ...
    %convolution_1 = aten.convolution(%relu, %weight_1, ...)

after, with ``%convolution`` to ``%relu`` in channels-last::

    %clone = aten.clone(%x, memory_format=torch.channels_last)
    %clone_1 = aten.clone(%weight, memory_format=torch.channels_last)
    %clone_2 = aten.clone(%weight_1, memory_format=torch.channels_last)
    %convolution = aten.convolution(%clone, %clone_1, ...)
    ...

Inductor optimises layouts when it lowers a graph, behind this pass: convolutions then read and give channels-last,
whatever the graph says of them.  A region that was planned for contiguous images would be called with these, and its
results be turned: the training step of a ResNet-18, 256 images of 224 x 224, took 26.3 ms on an H200, and 12.6 where
the graph says what is.  What asks for contiguous images behind them, as the caller does of a result, gets a copy.
Where that cannot be, as of results that share memory, images stay what they are, and Inductor keeps their regions.

Where Inductor does not, kernels of 16 bits are still for channels-last, and cuDNN turns image, weight and result at
each call.  Such convolutions are turned where that makes far fewer copies: a kernel that computes an image of one order
and stores it in another is slower than cuDNN's copies are (``TURNING_COPIES``).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._guards import TracingContext
from torch.fx import Graph, Node

from ..device.region_costs import TURNING_COPIES
from .memory_orders import (
    CONVOLUTIONS,
    Askers,
    commit,
    follow,
    in_channels_last,
    is_dense,
    is_image,
    is_image_in_channels_last,
    source_of,
)
from .node_facts import nbytes

aten: Any = torch.ops.aten


def turn_convolutions(graph: Graph, *, only_gpu: bool) -> int:
    """How many weights and images are copied into channels-last."""
    found = _contiguous_convolutions(graph, only_gpu=only_gpu)
    is_forced = any(map(_is_flat, found)) and inductor_turns(graph)
    convolutions = [n for n in found if (is_forced and _is_flat(n)) or cudnn_turns(n)]
    if not convolutions or _makes_views_anew():
        return 0
    weights = [cast(Node, n.args[1]) for n in convolutions]
    images = [cast(Node, n.args[0]) for n in convolutions]
    made = [_turned(graph, n) for n in dict.fromkeys((*weights, *images)) if _is_contiguous(n)]
    if not made:  # weights of one pixel, and an image of one channel
        return 0
    askers: Askers = {}
    values = follow(min(made), {n: n.meta["val"] for n in made}, askers)
    alike = [n for n in made if values and is_image_in_channels_last(values.get(source_of(n)))]
    asked = {a for read in askers.values() for a in read}
    copied = [n for n in (*made, *asked) if n not in alike]
    if values is None or not (is_forced or TURNING_COPIES * _bytes(copied) < _bytes([*convolutions, *images])):
        _take_back(graph, made)
        return 0
    _give_back(graph, askers)
    commit(graph, values, alike)
    return len(made) - len(alike)


def read_in_other_orders(graph: Graph, *, only_gpu: bool) -> set[Node]:
    """What is computed of images that the graph says are contiguous, and Inductor makes channels-last."""
    images = {n for n in _contiguous_convolutions(graph, only_gpu=only_gpu) if _is_flat(n)}
    if not images or not inductor_turns(graph):
        return set()
    readers = set(images)
    for n in graph.nodes:
        if n.op == "call_function" and not images.isdisjoint(n.all_input_nodes):
            readers.add(n)
            if is_image(n.meta.get("val")):
                images.add(n)
    return readers


def inductor_turns(graph: Graph) -> bool:
    """Will Inductor's lowering optimise the layouts of ``graph``?  It asks other questions of inference."""
    from torch._inductor.graph import GraphLowering

    module = graph.owning_module
    inputs = graph.find_nodes(op="placeholder")
    is_inference = not any(n.name.startswith(("primals", "tangents")) for n in inputs)
    return module is not None and GraphLowering.decide_layout_opt(module, is_inference=is_inference)


def cudnn_turns(convolution: Node) -> bool:
    """Does cuDNN turn what a convolution reads and gives?"""
    value: Any = convolution.meta["val"]
    is_narrow = value.dtype in (torch.bfloat16, torch.float16)
    return bool(is_narrow and value.is_cuda and convolution.args[8] == 1)


def _contiguous_convolutions(graph: Graph, *, only_gpu: bool) -> list[Node]:
    """Those of which the graph says that what they give is contiguous."""
    found = graph.find_nodes(op="call_function", target=aten.convolution.default)
    return [n for n in found if _is_contiguous(n) and (n.meta["val"].is_cuda or not only_gpu)]


def _makes_views_anew() -> bool:
    """Does the caller of the graph make views of its results, of which the graph does not tell?"""
    context = TracingContext.try_get()
    known: Any = context.fw_metadata if context is not None else None
    return known is not None and known.num_intermediate_bases > 0


def _is_flat(convolution: Node) -> bool:
    """Is it of images, not of volumes, whose layouts Inductor leaves?"""
    return convolution.meta["val"].ndim == 4


def _bytes(nodes: list[Node]) -> int:
    return sum(map(nbytes, nodes))


def _is_contiguous(n: Node) -> bool:
    value: Any = n.meta.get("val")
    return is_image(value) and value.is_contiguous() and not is_dense(value)


def _turned(graph: Graph, n: Node) -> Node:
    """A copy of ``n`` in channels-last behind it, for convolutions."""
    value = n.meta["val"]
    order = torch.channels_last if value.ndim == 4 else torch.channels_last_3d
    with graph.inserting_after(n):
        copy = graph.call_function(aten.clone.default, (n,), {"memory_format": order})
    copy.meta["val"] = in_channels_last(value)
    n.replace_all_uses_with(copy, lambda u: u.target in CONVOLUTIONS, propagate_meta=False)
    return copy


def _take_back(graph: Graph, made: list[Node]) -> None:
    for n in made:
        n.replace_all_uses_with(source_of(n), propagate_meta=False)
        graph.erase_node(n)


def _give_back(graph: Graph, askers: Askers) -> None:
    """Give each of ``askers`` a copy of what it reads, in the order that it had."""
    copies: dict[Node, Node] = {}
    for asker, read in askers.items():
        for n in read:
            if n not in copies:
                value: Any = n.meta["val"]
                with graph.inserting_before(asker):
                    order = torch.ops.prims.inductor_force_stride_order.default
                    copies[n] = graph.call_function(order, (n, list(value.stride())))
                copies[n].meta["val"] = value
            asker.replace_input_with(n, copies[n])
