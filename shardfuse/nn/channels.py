"""Images whose channels come last in memory: norms over channels read them as they are stored."""

from __future__ import annotations

from dataclasses import replace

import torch

from .placement import TensorPlacement


def is_channels_last(x: torch.Tensor) -> bool:
    """Are [batch, channels, ...] of four or five dims stored with the channels last?"""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_last = x.ndim in formats and x.is_contiguous(memory_format=formats[x.ndim])
    return is_last and not x.is_contiguous()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """[batch, channels, ...] as [batch, ..., channels], a view."""
    return x.permute(0, *range(2, x.ndim), 1)


def channels_second(x: torch.Tensor) -> torch.Tensor:
    """[batch, ..., channels] as [batch, channels, ...], a view."""
    return x.permute(0, x.ndim - 1, *range(1, x.ndim - 1))


def placement_of_channels_last(placement: TensorPlacement, ndim: int) -> TensorPlacement:
    """Where a tensor of [batch, channels, ...] lives, in the dims of ``channels_last``."""
    moved = {0: 0, 1: ndim - 1, **{k: k - 1 for k in range(2, ndim)}}
    return replace(placement, shards=tuple(None if d is None else moved[d] for d in placement.shards))
