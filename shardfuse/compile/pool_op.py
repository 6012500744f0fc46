# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""Max pools of images in channels-last, and their gradients, as ops of their own.

    max_pool_v1(Tensor x, int[] kernel, int[] stride, int[] padding)                -> pooled, offsets
    max_pool_gradient_v1(Tensor gradient, Tensor offsets, SymInt[] size, int[] kernel, int[] stride, int[] padding)

``offsets``: of each window the place in it of the pixel that it chose, as Inductor keeps it of a pool's forward.

before::

    %pooled, %offsets = prims._low_memory_max_pool_with_offsets(%x, [3, 3], [2, 2], [1, 1], [1, 1], False)

    %indices = prims._low_memory_max_pool_offsets_to_indices(%offsets, [3, 3], ...)
    %backward = aten.max_pool2d_with_indices_backward(%gradient, %x, [3, 3], [2, 2], [1, 1], [1, 1], False, %indices)

after::

    %pooled, %offsets = shardfuse.max_pool_v1(%x, [3, 3], [2, 2], [1, 1])

    %backward = getitem(shardfuse.max_pool_gradient_v1(%gradient, %offsets, [128, 64, 112, 112], ...), 0)

Inductor's kernel works the windows of each element out by itself: of 102 million elements of a ResNet's stem the pool
took it 185 us on an H200, and the gradient 727, where their bytes take 65 and 80.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..device.region_costs import HOST_US, LEAST_US, POOL_GAIN_US, POOL_GRADIENT_GAIN_US
from ..executor.written_kernels import has_kernels
from .kernel_files import launcher_of
from .memory_orders import is_image_in_channels_last
from .random_op import channels_last_strides
from .region_op import define_op
from .translation import known, tensor_of

TILE = 512
"""Elements of a program: 8 of 16 bits, a load of 16 bytes, for each of 64 threads.  The pool and the gradient of 128
images of 64 x 112 x 112 took 119 and 105 us on an H200; twice as many elements of twice as many threads 152 and 112."""
WARPS = 2
LONGEST = 128
"""Channels of a program at most."""
_BACKWARD: Any = torch.ops.aten.max_pool2d_with_indices_backward.default


def take_pools(graph: Graph, *, only_gains: bool = True, is_host_hidden: bool = False) -> int:
    """Replace max pools of images in channels-last and their gradients; how many have been.

    ``only_gains``: on a GPU alone, and where that is expected to gain.  ``is_host_hidden``: a call of an op costs
    nothing on the host.
    """
    pools = [n for n in graph.nodes if _is_pool(n)]
    found = [(n, offsets_of(n)) for n in graph.find_nodes(op="call_function", target=_BACKWARD)]
    gradients = [(n, o) for n, o in found if o is not None]
    if only_gains:
        least = LEAST_US + (0.0 if is_host_hidden else HOST_US)
        pools = [n for n in pools if _gives_offsets(n) and _gain_us(tensor_of(_image_of(n)), POOL_GAIN_US) >= least]
        gradients = [(n, o) for n, o in gradients if _gain_us(tensor_of(n), POOL_GRADIENT_GAIN_US) >= least]
    for n in pools:
        _replace_pool(graph, n)
    for n, offsets in gradients:
        _replace(graph, n, offsets)
    return len(pools) + len(gradients)


def _gain_us(image: torch.Tensor, of_a_million: float) -> float:
    return of_a_million * math.prod(map(known, image.shape)) / 1e6 if image.is_cuda else 0.0


def _is_pool(n: Node) -> bool:
    """A max pool of which the values and the offsets alone are read."""
    name = n.target.name() if isinstance(n.target, torch._ops.OpOverload) else ""
    if not ("max_pool" in name and name.endswith("with_offsets")) or len(n.args) != 6 or n.kwargs:
        return False
    x, _, _, _, dilation, ceil_mode = n.args
    value: Any = cast(Node, x).meta.get("val")
    if ceil_mode or any(d != 1 for d in _pair(dilation)) or not is_image_in_channels_last(value):
        return False
    is_taken = value.ndim == 4 and value.numel() > 0 and value.is_floating_point() and value.itemsize <= 4
    return is_taken and all(u.target is operator.getitem for u in n.users)


def _gives_offsets(pool: Node) -> bool:
    """Does a gradient read which pixels were chosen?  Without, Inductor's kernel computes less than this one, and is
    no slower: 36 us where 42 are, 32 x 64 x 112 x 112 of float32."""
    return any(u.args[1] == 1 and bool(u.users) for u in pool.users)


def _image_of(pool: Node) -> Node:
    return cast(Node, pool.args[0])


def _replace_pool(graph: Graph, n: Node) -> None:
    kernel, stride, padding = _window(*n.args[1:4])
    with graph.inserting_before(n):
        call = graph.call_function(torch.ops.shardfuse.max_pool_v1.default, (n.args[0], kernel, stride, padding))
    pooled, offsets = n.meta["val"]
    laid_out = [_in_channels_last(v) for v in (pooled, offsets)]
    call.meta |= {**n.meta, "val": laid_out}
    for u in n.users:
        u.meta["val"] = laid_out[cast(int, u.args[1])]
    n.replace_all_uses_with(call, propagate_meta=False)
    graph.erase_node(n)


def _in_channels_last(value: torch.Tensor) -> torch.Tensor:
    with cast(Any, value).fake_mode:
        strides = channels_last_strides(value.shape)
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _window(kernel: object, stride: object, padding: object) -> tuple[list[int], list[int], list[int]]:
    """Of both axes; a pool without a stride moves by its size."""
    size = _pair(kernel)
    return size, _pair(stride) if stride else size, _pair(padding)


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
    is_taken = is_taken and all(v.numel() > 0 for v in images)
    return offsets if is_taken else None


def _pair(value: object) -> list[int]:
    given = list(cast(Sequence[int], value)) if isinstance(value, list | tuple) else [cast(int, value)]
    return given * 2 if len(given) == 1 else given


def _replace(graph: Graph, n: Node, offsets: Node) -> None:
    kernel, stride, padding = _window(*n.args[2:5])
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


def run_pool(x: torch.Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> list[torch.Tensor]:
    """What was chosen, and its offsets, int8: new images in channels-last."""
    pooled, offsets = fake_pool(x, kernel, stride, padding)
    x = x.contiguous(memory_format=torch.channels_last)
    if not has_kernels(x.device):
        import_module("torch._inductor.inductor_prims")  # which defines the op

        plain = torch.ops.prims._low_memory_max_pool_with_offsets.default(x, kernel, stride, padding, [1, 1], False)
        return [a.copy_(b) for a, b in zip((pooled, offsets), plain, strict=True)]
    cells, channels = _tile(x.shape[1])
    constants = _constants(x.shape, pooled.shape[2:], kernel, stride, padding, cells, channels, x.dtype)
    types = (("image", x.dtype), ("pooled", x.dtype), ("offsets", torch.int8))
    n, c, h, w = pooled.shape
    grid = n * h * -(-w // cells) * -(-c // channels)
    launcher_of("max_pool", constants, types, grid, WARPS, x.device)(x, pooled, offsets)
    return [pooled, offsets]


def fake_pool(x: torch.Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> list[torch.Tensor]:
    """What ``run_pool`` gives, without data."""
    sides = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    size = [*x.shape[:2], *sides]
    strides = channels_last_strides(size)
    return [torch.empty_strided(size, strides, dtype=t, device=x.device) for t in (x.dtype, torch.int8)]


def _tile(c: int) -> tuple[int, int]:
    """Pixels and channels of a program."""
    channels = min(LONGEST, 1 << (c - 1).bit_length())
    return max(TILE // channels, 1), channels


def _constants(
    image: Sequence[int],
    pooled: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    cells: int,
    channels: int,
    dtype: torch.dtype,
) -> tuple[tuple[str, int], ...]:
    names = ("ALL_CHANNELS", "HEIGHT", "WIDTH", "POOLED_HEIGHT", "POOLED_WIDTH", "KERNEL_H", "KERNEL_W")
    names += ("STRIDE_H", "STRIDE_W", "PADDING_H", "PADDING_W", "CELLS", "CHANNELS", "WIDE")
    values = (*image[1:], *map(int, pooled), *kernel, *stride, *padding, cells, channels, 16 // dtype.itemsize)
    return tuple(zip(names, values, strict=True))


def run_gradient(
    gradient: torch.Tensor,
    offsets: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
) -> list[torch.Tensor]:
    """A new image in channels-last, of the gradient's type."""
    (out,) = fake_gradient(gradient, offsets, size, kernel, stride, padding)
    gradient, offsets = (t.contiguous(memory_format=torch.channels_last) for t in (gradient, offsets))
    if not has_kernels(gradient.device):
        return [out.copy_(_added(gradient, offsets.long(), size, kernel, stride, padding))]
    n, c, h, w = size
    cells, channels = _tile(c)
    constants = _constants(size, gradient.shape[2:], kernel, stride, padding, cells, channels, gradient.dtype)
    types = (("gradient", gradient.dtype), ("offsets", torch.int8), ("out", gradient.dtype))
    down, across = -(-h // stride[0]), -(-w // stride[1])
    grid = n * down * -(-across // cells) * -(-c // channels)
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


def fake_gradient(
    gradient: torch.Tensor,
    offsets: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
) -> list[torch.Tensor]:
    """What ``run_gradient`` gives, without data."""
    strides = channels_last_strides(size)
    return [torch.empty_strided(size, strides, dtype=gradient.dtype, device=gradient.device)]


define_op(
    "max_pool_gradient_v1",
    "Tensor gradient, Tensor offsets, SymInt[] size, int[] kernel, int[] stride, int[] padding",
    run_gradient,
    fake_gradient,
)
define_op("max_pool_v1", "Tensor x, int[] kernel, int[] stride, int[] padding", run_pool, fake_pool)
