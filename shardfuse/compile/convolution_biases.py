# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Biases of convolutions are ops of the graph, and so of the region that reads what a convolution gives.

before::

    %convolution = aten.convolution(%x, %weight, %bias, ...)
    %var_mean = aten.var_mean(%convolution, [1])

after::

    %convolution = aten.convolution(%x, %weight, None, ...)
    %view = aten.view(%bias, [96, 1, 1])
    %add = aten.add(%convolution, %view)
    %var_mean = aten.var_mean(%add, [1])

Inductor does so too, on a GPU, when it lowers a convolution, behind all passes: what a region of shardfuse's read was
then written by a kernel of its own, which read the image and wrote it again.  In the graph of forward and backward
together the backward may add the bias anew, and then the sum is not stored at all: a LayerNorm behind a convolution,
38 MB, took 96 us in a kernel of Inductor's that stored it, and 30 in one that did not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch.fx import Graph, Node

from .translation import known

aten: Any = torch.ops.aten


def add_biases(graph: Graph, *, only_gpu: bool) -> int:
    """Make biases of convolutions ops of their own; how many."""
    found = [n for n in graph.find_nodes(op="call_function", target=aten.convolution.default) if _is_added(n)]
    convolutions = [n for n in found if n.meta["val"].is_cuda or not only_gpu]
    for n in convolutions:
        _add_bias(graph, n)
    return len(convolutions)


def _is_added(convolution: Node) -> bool:
    """Has it a bias of a known size, which no product adds?"""
    bias = convolution.args[2]
    value = bias.meta.get("val") if isinstance(bias, Node) else None
    if not isinstance(value, torch.Tensor) or known(value.shape[0]) < 1:
        return False
    return value.dtype == convolution.meta["val"].dtype and not _may_be_product(convolution)


def _may_be_product(convolution: Node) -> bool:
    """May Inductor make it a matrix product, whose kernels add biases?"""
    settings: Any = inductor_config
    kernel = convolution.args[1].meta["val"].shape[2:]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    is_asked = settings.conv_1x1_as_mm or settings.max_autotune or settings.max_autotune_gemm
    return bool(is_asked) and math.prod(kernel) == 1


def _add_bias(graph: Graph, convolution: Node) -> None:
    bias: Any = convolution.args[2]
    value = convolution.meta["val"]
    with graph.inserting_after(convolution):
        view = graph.call_function(aten.view.default, (bias, [bias.meta["val"].shape[0]] + [1] * (value.ndim - 2)))
    with graph.inserting_after(view):
        biased = graph.call_function(aten.add.Tensor, (convolution, view))
    convolution.replace_all_uses_with(biased, lambda u: u is not biased, propagate_meta=False)
    convolution.args = (*convolution.args[:2], None, *convolution.args[3:])
    for n in (view, biased):  # what says where it comes from, and whether it is kept for a backward
        n.meta.update({k: v for k, v in convolution.meta.items() if k != "val"})
    view.meta["val"] = bias.meta["val"].view(view.args[1])
    biased.meta["val"] = value
