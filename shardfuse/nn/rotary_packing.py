"""Queries, keys and values that are one tensor: as a rotary embedding takes its heads apart, and puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from .shaping import Reshaped, Shaping


def count(packed: tuple[int, int]) -> int:
    """Heads of queries, keys and values."""
    return packed[0] + 2 * packed[1]


def heads_before(x: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """[batch, sequence, heads, head_dim], or the first two the other way round -> as attention takes it."""
    return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)


def _heads_behind(x: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """The way back."""
    return x.transpose(1, 2) if batch_first else x.permute(2, 0, 1, 3)


@lru_cache(maxsize=256)
def packing(packed: tuple[int, int], head_dim: int, batch_first: bool) -> Shaping:
    """[batch, sequence, features] <-> heads behind the sequence; the three -> [batch, heads, sequence, head_dim]."""
    sizes = [*packed, packed[1]]
    by_head = Reshaped(enter=lambda x: x.view(*x.shape[:-1], count(packed), head_dim), leave=lambda x: x.flatten(-2))
    behind = Reshaped(enter=partial(_heads_behind, batch_first=batch_first))

    def parts(turned: torch.Tensor) -> Sequence[torch.Tensor]:
        """In two ops of torch's, the second of which makes no views as autograd has them."""
        return torch.unsafe_split_with_sizes(heads_before(turned, batch_first), sizes, 1)

    return Shaping((by_head,), (behind,) * 3, parts=parts)
