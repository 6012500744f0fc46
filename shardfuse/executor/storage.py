# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Storage that a program makes, of the layout that was agreed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch._C._dynamo import guards

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
"""``empty(shape, strides, dtype)``"""


def storage_text(like: torch.Tensor, device: torch.device, names: dict[str, object]) -> str:
    """What makes storage of this layout; what it calls is put in ``names``."""
    dtype = str(like.dtype).removeprefix("torch.")
    names["empty"], names[dtype] = _empty_on(device), like.dtype
    return f"empty({tuple(like.shape)}, {like.stride()}, {dtype})"


def _empty_on(device: torch.device) -> Empty:
    """Memory on ``device``, a GPU being the current one: what Inductor allocates by, two thirds of torch's own time."""
    if device.type == "cuda":
        return cast(Empty, guards._empty_strided_cuda)
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


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
