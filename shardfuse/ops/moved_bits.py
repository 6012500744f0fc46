"""Elements that are moved and not computed with: torch lacks that for some types, which are moved as others."""

from __future__ import annotations

from collections.abc import Callable

import torch

_MOVED_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


def moved(move: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``move(x)``, of which each element is one of x's, on bits of the same width where torch may not have it for x."""
    bits = _MOVED_AS.get(x.dtype)
    return move(x) if bits is None else move(x.view(bits)).view(x.dtype)
