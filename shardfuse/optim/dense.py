"""Tensors as a kernel can go through them: element after element in memory, all of one list in one order."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

# What is asked of each of a thousand tensors in every step, in the form that costs least.
ADDRESS = cast("Callable[[torch.Tensor], int]", torch.Tensor.data_ptr)
ELEMENTS = cast("Callable[[torch.Tensor], int]", torch.Tensor.numel)
IS_CONTIGUOUS = cast("Callable[[torch.Tensor], bool]", torch.Tensor.is_contiguous)
DTYPE = cast("Callable[[torch.Tensor], torch.dtype]", operator.attrgetter("dtype"))
LAYOUT = cast("Callable[[torch.Tensor], torch.layout]", operator.attrgetter("layout"))
DEVICE = cast("Callable[[torch.Tensor], torch.device]", operator.attrgetter("device"))
GRADIENT = cast("Callable[[torch.Tensor], torch.Tensor | None]", operator.attrgetter("grad"))


def is_whole(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Is none of them missing?"""
    return not any(map(operator.is_, tensors, itertools.repeat(None)))


def devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """Where their elements are, each device once.

    On a rank outside of its mesh a DTensor has none, and is on the CPU whatever the mesh is of.
    """
    listed = list(map(DEVICE, tensors))
    if listed.count(listed[0]) == len(listed):
        return listed[:1]
    held = [device for device, n in zip(listed, map(ELEMENTS, tensors), strict=True) if n]
    return list(dict.fromkeys(held)) or listed[:1]


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(cast("Any", tensor).stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Does it fill a stretch of memory, each element once, in whatever order of its dims?"""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(strides_of(tensor), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own where it is dense, else those of a contiguous tensor of its shape."""
    return strides_of(tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta"))


def has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Are its elements in memory in the order of ``strides``?  Those of dims of one element say nothing."""
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, strides_of(tensor), strides, strict=True))


def repeats(tensor: torch.Tensor) -> bool:
    """Are several of its elements one in memory, as ``expand`` makes them?  Such a tensor can only be read."""
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, strides_of(tensor), strict=True))


def in_order(
    tensor: torch.Tensor, strides: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """``tensor`` itself where it has this type and device, and its elements this order, else a copy that does."""
    device = tensor.device if device is None else device
    if tensor.dtype == dtype and tensor.device == device and has_strides(tensor, strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=dtype, device=device)
    return copy.copy_(tensor)
