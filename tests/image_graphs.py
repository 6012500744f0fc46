"""Graphs of convolutions and norms, for tests of orders in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compile_graphs import listed
from torch.fx import GraphModule, Node

from shardfuse.compile.memory_orders import is_image_in_channels_last

F = torch.nn.functional
CONVOLUTION = torch.ops.aten.convolution.default


def numbers(*shape: int, seed: int = 0, last: bool = False) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return x.to(memory_format=torch.channels_last) if last else x


def group_norm(x: torch.Tensor, groups: int) -> torch.Tensor:
    """As on a GPU: of a contiguous image, by its groups."""
    y = x.contiguous().reshape(len(x), groups, x.shape[1] // groups, -1)
    var, mean = torch.var_mean(y, [2, 3], correction=0, keepdim=True)
    return ((y - mean) * torch.rsqrt(var + 1e-5)).reshape(x.shape)


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss, and what its backward reads."""
    y = F.conv2d(x, w, padding=1)
    z = F.silu(group_norm(y, 4))
    return F.conv2d(z, v, padding=1).pow(2).mean(), z


def visible(gm: GraphModule, *places: int) -> GraphModule:
    """Of its results only these are the caller's."""
    (output,) = gm.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(places)
    return gm


def run_alike(gm: GraphModule, f: Callable[..., tuple[torch.Tensor, ...]], given: list[torch.Tensor]) -> None:
    gm.graph.lint()
    gm.recompile()
    torch.manual_seed(0)
    found = listed(gm(*given))
    torch.manual_seed(0)
    for mine, expected in zip(found, f(*given), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-5, atol=2e-5)


def blocks_inputs(*, last: bool) -> list[torch.Tensor]:
    return [numbers(2, 3, 6, 6, last=last), numbers(8, 3, 3, 3, last=last), numbers(8, 8, 3, 3, seed=1, last=last)]


def images_read(gm: GraphModule) -> list[bool]:
    """Of each convolution, is its image in channels-last?"""
    read = [n.args[0] for n in gm.graph.find_nodes(op="call_function", target=CONVOLUTION)]
    return [is_image_in_channels_last(n.meta["val"]) for n in read if isinstance(n, Node)]
