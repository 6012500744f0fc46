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
then written by a kernel of its own, which read the image and wrote it again.  What the backward reads is the sum, as it
is without this pass: the region stores it.
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
    found = graph.find_nodes(op="call_function", target=aten.convolution.default)
    convolutions = [n for n in found if _has_bias(n) and _is_added_behind(n, only_gpu=only_gpu)]
    for n in convolutions:
        _add_bias(graph, n)
    return len(convolutions)


def _has_bias(convolution: Node) -> bool:
    """Of a known size: Inductor leaves out one of no channels."""
    bias = convolution.args[2]
    value = bias.meta.get("val") if isinstance(bias, Node) else None
    return isinstance(value, torch.Tensor) and known(value.shape[0]) > 0


def _is_added_behind(convolution: Node, *, only_gpu: bool) -> bool:
    """Is the bias added to what was rounded to the result's dtype?

    Not by a matrix product, which Inductor may make of a convolution; nor, of 16 bits, by kernels for a CPU.
    """
    value: Any = convolution.meta["val"]
    if _may_be_product(convolution):
        return False
    return value.is_cuda or not (only_gpu or value.dtype in (torch.bfloat16, torch.float16))


def _may_be_product(convolution: Node) -> bool:
    """By what Inductor asks of a convolution of one pixel."""
    _, weight, _, stride, padding, dilation, is_transposed, output_padding, groups = convolution.args
    settings: Any = inductor_config
    is_asked = settings.conv_1x1_as_mm or settings.max_autotune or settings.max_autotune_gemm
    sizes: Any = (*weight.meta["val"].shape[2:], *stride, *dilation)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess, reportOptionalIterable, reportGeneralTypeIssues]
    pads: Any = (*padding, *output_padding)  # pyright: ignore[reportOptionalIterable, reportGeneralTypeIssues]
    return bool(is_asked) and math.prod(map(known, sizes)) == 1 and not (any(pads) or is_transposed or groups != 1)


def _add_bias(graph: Graph, convolution: Node) -> None:
    bias: Any = convolution.args[2]
    value: Any = convolution.meta["val"]
    with graph.inserting_after(convolution):
        view = graph.call_function(aten.view.default, (bias, [bias.meta["val"].shape[0]] + [1] * (value.ndim - 2)))
    with graph.inserting_after(view):
        biased = graph.call_function(aten.add.Tensor, (convolution, view))
    convolution.replace_all_uses_with(biased, lambda u: u is not biased, propagate_meta=False)
    convolution.args = (*convolution.args[:2], None, *convolution.args[3:])
    for n in (view, biased):  # where in the caller's program it comes from
        n.meta.update({k: v for k, v in convolution.meta.items() if k not in ("val", "tensor_meta")})
    view.meta["val"] = bias.meta["val"].view(view.args[1])
    with value.fake_mode:
        biased.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
