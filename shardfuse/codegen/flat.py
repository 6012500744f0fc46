"""A flat walk of a number of elements that no wide load divides: its last program alone has a mask.

    x = program * 2048 + lanes
    if program < elements // 2048:
        T0 = load(T0_ptr + x)
    else:
        T0 = load(T0_ptr + x, x < elements)

The compiler splits masked loads by what divides ``elements``: squares of 8191 x 4097, bfloat16, took 125 us on an H200
under a mask, a copy 38.
"""

from __future__ import annotations

from math import gcd

from .cut_rows import in_branches
from .emitter import Emitter


def is_last_masked(e: Emitter) -> bool:
    """Is it a flat walk whose mask would split loads or stores that can be wide?"""
    tile, space = e.tile, e.space
    if space.r or space.sides[1] or e.plan.split is not None or not tile.x_masked or tile.x_total < tile.x_block:
        return False
    streamed = (t for t in (*e.plan.segment.loads, *e.plan.segment.outputs) if space.is_streamed(t))
    return any(gcd(tile.x_total, 16) * t.dtype.itemsize < e.plan.device.access_bytes for t in streamed)


def last_masked(whole: Emitter, masked: list[str], size: str) -> list[str]:
    """``masked`` for the last program, what ``whole`` has written for the others."""
    return in_branches(f"tl.program_id(0) < {size} // {whole.tile.x_block}", whole, masked)
