"""Kernels whose programs mostly need no mask: the few that do have a branch of their own.

The compiler splits masked loads and stores by what divides the number in the mask, which no wide access may.

*Flat tensors* of a number of elements that no wide load divides: the last program alone has a mask.  Squares of
8191 x 4097, bfloat16, took 125 us on an H200 under a mask, a copy 38::

    if program < elements // 2048:
        T0 = load(T0_ptr + x)
    else:
        T0 = load(T0_ptr + x, x < elements)

*Rows of a window* that end within a block: the last block of each row alone has the mask of where it ends.  Cross
entropy's gradient, written into rows that are padded for a matrix product, reads such rows::

    if program % 15 < 30522 // 2048:
        T0 = load(T0_ptr + b * 30528 + x)
    else:
        T0 = load(T0_ptr + b * 30528 + x, x < 30522, other=0)
"""

from __future__ import annotations

from math import gcd, prod

from ..ir.digits import Axis
from ..ir.layout import local_extent
from .emitter import Emitter
from .sides import Sided
from .tile import X_SIZE
from .window_loads import Bound


def whole_blocks(e: Emitter) -> tuple[str, bool] | None:
    """The test of a program for needing no mask, and whether that is one for the ends of windows.

    ``None`` where all programs are alike, or a mask splits no wide load or store.
    """
    test = _before_last(e)
    if test is not None:
        return test, False
    test = _before_ends(e)
    return None if test is None else (test, True)


def _before_last(e: Emitter) -> str | None:
    """The test of a program for being none of the last; ``None`` where its mask splits no wide load or store."""
    tile, space = e.tile, e.space
    if space.r or space.sides[1] or e.plan.split is not None or not tile.x_masked or tile.x_total < tile.x_block:
        return None
    streamed = (t for t in (*e.plan.segment.loads, *e.plan.segment.outputs) if space.is_streamed(t))
    is_split = any(gcd(tile.x_total, 16) * t.dtype.itemsize < e.plan.device.access_bytes for t in streamed)
    return f"{e.program} < {X_SIZE} // {tile.x_block}" if is_split else None


def _before_ends(e: Emitter) -> str | None:
    """The test of a program for having no element of a row's end; ``None`` where no row ends so that it matters."""
    split = e.schedule.split
    is_apart = e.schedule.members or e.plan.exchange is not None or (split is not None and split.side_by_side > 1)
    is_rows = isinstance(e, Sided) and not e.space.sides[0]
    is_columns = bool(e.space.r) and not e.space.is_inner and not e.space.grouped and e.tile.x_lanes
    if is_apart or e.space.walked or not (is_rows or is_columns):
        return None
    along = e.space.sides[1] if is_rows else e.space.x
    ends: list[int] = []
    for tensor, window in e.tile.windows.items():
        if any(not _is_end(e, bound, along) for bound in window.bounds):
            return None
        ends += [b.stop for b in window.bounds if gcd(b.stop, 16) * tensor.dtype.itemsize < e.plan.device.access_bytes]
    if not ends:
        return None
    last, program = min(b.stop for w in e.tile.windows.values() for b in w.bounds), e.program
    if isinstance(e, Sided):
        block, blocks = e.x_block, -(-e.along // e.x_block)
        return f"{program} % {blocks} < {last // block}" if last >= block and blocks > 1 else None
    program = f"{program} // {e.schedule.parts}" if e.schedule.parts > 1 else program
    return f"{program} < {last // e.tile.x_block}" if last >= e.tile.x_block else None


def _is_end(e: Emitter, bound: Bound, along: Axis) -> bool:
    """Does ``bound`` ask for nothing but a place along ``along`` before some end?"""
    sizes = [local_extent(a, e.tile.coordinates) for a in along]
    places = {a: prod(sizes[k + 1 :]) for k, a in enumerate(along) if sizes[k] > 1}
    moved = {a: n for a, n in bound.strides.items() if n and local_extent(a, e.tile.coordinates) > 1}
    return bound.start <= 0 and moved == places and bound.stop <= prod(sizes)
