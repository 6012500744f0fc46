# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
"""Images are in channels-last between convolutions: copies to another order of memory are left out.

before, of a group norm, which torch takes of contiguous images on a GPU (``%x`` is what a convolution gave)::

    %clone = aten.clone(%x, memory_format=torch.contiguous_format)
    %view = aten.reshape(%clone, [16, 32, 10, 4096])
    %var_mean = aten.var_mean(%view, [2, 3])
    ...
    %convolution_1 = aten.convolution(%silu, %weight, ...)

after, where all between are in the order of ``%x``::

    %view = aten.reshape(%x, [16, 32, 10, 4096])
    %var_mean = aten.var_mean(%view, [2, 3])
    ...
    %convolution_1 = aten.convolution(%silu, %weight, ...)

A convolution that reads one operand in channels-last copies the other into that order, in its forward and again in its
backward, and a kernel that reads one order and writes another takes three to five times as long as its bytes.  What a
tensor holds does not follow from its order, so that a copy into another is left out where everything that reads it
computes each element by itself, reduces, or is a convolution.  Random numbers follow from the place of an element in
the tensor, not in memory: those that a dropout draws are drawn in the order in which they are read (``random_op``).

Contiguous images are turned first, where their convolutions take channels-last (``convolution_layouts``).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from .convolution_layouts import turn_convolutions
from .memory_orders import Values, commit, follow, given_to_caller, is_image_in_channels_last, source_of, with_bases
from .node_facts import is_mutation
from .translation import known

aten: Any = torch.ops.aten


def keep_channels_last(graph: Graph, *, only_gpu: bool = True) -> int:
    """Leave out copies between orders of memory; how many have been, or have been moved to where they are smaller.

    The nodes' metadata say the new strides.
    """
    output = next(iter(graph.find_nodes(op="output")))
    asked = {n: n.meta["val"] for n in given_to_caller(output) if isinstance(n.meta.get("val"), torch.Tensor)}
    turned = turn_convolutions(graph, only_gpu=only_gpu)
    written = {a for n in graph.nodes if is_mutation(n) for a in n.all_input_nodes}
    images = [n for n in graph.nodes if _is_copy_of_image(n) and not (only_gpu and not n.meta["val"].is_cuda)]
    copies = [n for n in images if written.isdisjoint(with_bases(source_of(n)))]
    values: Values = {}
    gone: list[Node] = []
    for copy in copies:
        found = follow(copy, {**values, copy: values.get(source_of(copy), source_of(copy).meta["val"])})
        if found is not None:
            values, gone = found, [*gone, copy]
    commit(graph, values, gone)
    if turned + len(gone):
        _give_strides(graph, output, asked)
    return turned + len(gone)


def _give_strides(graph: Graph, output: Node, asked: Mapping[Node, Any]) -> None:
    """Give gradients of weights of one pixel the strides that they had: with images in channels-last cuDNN has others.

    Strides of axes of one element say nothing, and no metadata has them, but DistributedDataParallel compares a
    gradient's with its weight's.
    """
    for n in given_to_caller(output):
        if n in asked and _is_gradient_of_one_pixel(n):
            with graph.inserting_before(output):
                view = graph.call_function(aten.as_strided.default, (n, list(asked[n].shape), list(asked[n].stride())))
            view.meta["val"] = asked[n]
            output.replace_input_with(n, view)


def _is_gradient_of_one_pixel(n: Node) -> bool:
    if n.target is not operator.getitem or n.args[1] != 1:
        return False
    shape = n.meta["val"].shape
    return source_of(n).target is aten.convolution_backward.default and all(known(k) == 1 for k in shape[2:])


def _is_copy_of_image(n: Node) -> bool:
    source = n.args[0] if n.target is aten.clone.default else None
    if not isinstance(source, Node) or not is_image_in_channels_last(source.meta.get("val")):
        return False
    return not is_image_in_channels_last(n.meta.get("val"))
