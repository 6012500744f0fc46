"""Elements that are moved or compared: torch lacks that for some types, which stand as others meanwhile."""

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


_ORDER = {
    torch.bool: torch.uint8,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu), torch.float32),
}
"""Of dtypes that torch does not compare, one that has their order and holds their values."""

_LOWEST = torch.iinfo(torch.int64).min
"""Signed numbers have the order of unsigned ones once the top bit is flipped."""


def comparable(x: torch.Tensor) -> torch.Tensor:
    """Elements in the order of ``x``'s, in a dtype that torch compares."""
    return x.view(torch.int64) ^ _LOWEST if x.dtype == torch.uint64 else x.to(_ORDER.get(x.dtype, x.dtype))


def compared(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements of ``dtype`` that `comparable` made ``x`` of."""
    return (x ^ _LOWEST).view(dtype) if dtype == torch.uint64 else x.to(dtype)


def moved(move: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``move(x)``, of which each element is one of x's, on bits of the same width where torch may not have it for x."""
    bits = _MOVED_AS.get(x.dtype)
    return move(x) if bits is None else move(x.view(bits)).view(x.dtype)


def moved_into(
    move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """``move(x, y)``, of which each element is one of theirs, as `moved`; they have one dtype."""
    return moved(lambda x: move(x, y.view(x.dtype)), x)
