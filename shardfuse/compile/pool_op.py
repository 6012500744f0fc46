# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""``shardfuse::max_pool_gradient_v1``: the gradient of a max pool of images in channels-last.

    max_pool_gradient_v1(Tensor gradient, Tensor offsets, SymInt[] size, int[] kernel, int[] stride, int[] padding)

``offsets``: what Inductor keeps of a pool's forward, of each window the place in it of the pixel that it chose.

before::

    %indices = prims._low_memory_max_pool_offsets_to_indices(%offsets, [3, 3], ...)
    %backward = aten.max_pool2d_with_indices_backward(%gradient, %x, [3, 3], [2, 2], [1, 1], [1, 1], False, %indices)

after::

    %backward = getitem(shardfuse.max_pool_gradient_v1(%gradient, %offsets, [128, 64, 112, 112], ...), 0)

Inductor's kernel works the windows of each element out by itself: 102 million elements of a ResNet's stem took it
729 us on an H200, where their bytes take 80.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..executor.written_kernels import has_kernels
from .channels_last import is_image_in_channels_last
from .kernel_files import launcher_of
from .random_op import channels_last_strides
from .region_op import define_op

TILE = 1024
"""Elements of a program: 8 of 16 bits, a load of 16 bytes, for each of 128 threads."""
WARPS = 4
LONGEST = 128
"""Channels of a program at most."""
_BACKWARD: Any = torch.ops.aten.max_pool2d_with_indices_backward.default


def take_pools(graph: Graph, *, only_gpu: bool = True) -> int:
    """Replace gradients of max pools of images in channels-last; how many have been."""
    found = [(n, offsets_of(n)) for n in graph.find_nodes(op="call_function", target=_BACKWARD)]
    taken = [(n, o) for n, o in found if o is not None and not (only_gpu and not n.meta["val"].is_cuda)]
    for n, offsets in taken:
        _replace(graph, n, offsets)
    return len(taken)


def offsets_of(n: Node) -> Node | None:
    """What the windows of a max pool chose, if the op takes its gradient."""
    gradient, x, _, _, _, dilation, ceil_mode, indices = n.args[:8] if len(n.args) == 8 else (None,) * 8
    if not isinstance(indices, Node) or not isinstance(x, Node) or not isinstance(gradient, Node) or ceil_mode:
        return None
    name = indices.target.name() if isinstance(indices.target, torch._ops.OpOverload) else ""
    is_made = "max_pool" in name and name.endswith("offsets_to_indices")
    if not is_made or any(d != 1 for d in _pair(dilation)):
        return None
    offsets = cast(Node, indices.args[0])
    images: list[Any] = [a.meta.get("val") for a in (gradient, offsets, n)]
    if not all(map(is_image_in_channels_last, images)) or any(v.ndim != 4 for v in images):
        return None
    is_taken = images[0].is_floating_point() and images[0].itemsize <= 4 and images[1].dtype is torch.int8
    return offsets if is_taken else None


def _pair(value: object) -> list[int]:
    given = list(cast(Sequence[int], value)) if isinstance(value, list | tuple) else [cast(int, value)]
    return given * 2 if len(given) == 1 else given


def _replace(graph: Graph, n: Node, offsets: Node) -> None:
    kernel, padding = _pair(n.args[2]), _pair(n.args[4])
    stride = _pair(n.args[3]) if n.args[3] else kernel
    size = list(n.meta["val"].shape)
    with graph.inserting_before(n):
        given = (n.args[0], offsets, size, kernel, stride, padding)
        call = graph.call_function(torch.ops.shardfuse.max_pool_gradient_v1.default, given)
        item = graph.call_function(operator.getitem, (call, 0))
    call.meta |= {**n.meta, "val": [n.meta["val"]]}
    item.meta |= n.meta
    indices = cast(Node, n.args[7])
    n.replace_all_uses_with(item, propagate_meta=False)
    graph.erase_node(n)
    if not indices.users:
        graph.erase_node(indices)


def run_pool(
    gradient: torch.Tensor,
    offsets: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
) -> list[torch.Tensor]:
    """A new image in channels-last, of the gradient's type."""
    (out,) = fake_pool(gradient, offsets, size, kernel, stride, padding)
    if not has_kernels(gradient.device):
        return [out.copy_(_added(gradient, offsets.long(), size, kernel, stride, padding))]
    n, c, h, w = size
    channels = min(LONGEST, 1 << (c - 1).bit_length())
    pixels = max(TILE // channels, 1)
    names = ("ALL_CHANNELS", "HEIGHT", "WIDTH", "POOLED_HEIGHT", "POOLED_WIDTH", "KERNEL_H", "KERNEL_W")
    names += ("STRIDE_H", "STRIDE_W", "PADDING_H", "PADDING_W", "PIXELS", "CHANNELS")
    values = (c, h, w, *map(int, gradient.shape[2:]), *kernel, *stride, *padding, pixels, channels)
    types = (("gradient", gradient.dtype), ("offsets", torch.int8), ("out", gradient.dtype))
    grid = n * h * -(-w // pixels) * -(-c // channels)
    constants = tuple(zip(names, values, strict=True))
    launcher_of("max_pool_gradient", constants, types, grid, WARPS, gradient.device)(gradient, offsets, out)
    return [out]


def _added(
    gradient: torch.Tensor,
    offsets: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
) -> torch.Tensor:
    """By torch's ops."""
    n, c, h, w = size
    rows, columns = (torch.arange(k, device=offsets.device) for k in gradient.shape[2:])
    y = offsets // kernel[1] + (rows * stride[0] - padding[0])[:, None]
    x = offsets % kernel[1] + columns * stride[1] - padding[1]
    flat = torch.zeros(n, c, h * w, dtype=torch.float32, device=gradient.device)
    return flat.scatter_add_(2, (y * w + x).flatten(2), gradient.float().flatten(2)).reshape(size)


def fake_pool(
    gradient: torch.Tensor,
    offsets: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
) -> list[torch.Tensor]:
    """What ``run_pool`` gives, without data."""
    strides = channels_last_strides(size)
    return [torch.empty_strided(size, strides, dtype=gradient.dtype, device=gradient.device)]


define_op(
    "max_pool_gradient_v1",
    "Tensor gradient, Tensor offsets, SymInt[] size, int[] kernel, int[] stride, int[] padding",
    run_pool,
    fake_pool,
)
