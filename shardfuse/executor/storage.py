"""Storage that a program makes, of the layout that was agreed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def storage_like(like: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    shape, strides, dtype = tuple(like.shape), like.stride(), like.dtype
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def stored(
    result: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...] | None, inputs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """``result`` with these strides, in storage that no input has."""
    result = result.expand(shape)
    strides = strides or torch.empty(shape, device="meta").stride()
    shared = any(result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in inputs)
    if result.stride() == strides and not shared:
        return result
    return torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)
