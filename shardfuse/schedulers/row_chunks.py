"""How a row that one program holds is cut into chunks of powers of two."""

from __future__ import annotations

from ..device import LEAST_COPY
from .limits import WARP, power_of_two


def least_chunk(itemsize: int, warps: int, block: int) -> int:
    """Elements of the smallest chunk: each thread has what it can copy ahead of the narrowest rows, of ``itemsize``."""
    return min(warps * WARP * max(LEAST_COPY // itemsize, 1), block)


def chunk_widths(total: int, block: int, least: int) -> list[int]:
    """``total`` elements in blocks, the rest in smaller ones: lanes that are masked cost as much as others."""
    return [block] * (total // block) + _cut(total % block, least)


def _cut(rest: int, least: int) -> list[int]:
    """Powers of two that cover ``rest``, the last of them masked where it is more than is left.

    Below ``least`` a chunk is widened if a quarter of it is used: else its registers cost more than the stall.
    """
    if rest <= 0:
        return []
    whole = power_of_two(rest)
    if whole <= least:
        return [least if 4 * rest >= least else whole]
    if 4 * rest > 3 * whole:
        return [whole]
    return [whole // 2, *_cut(rest - whole // 2, least)]
