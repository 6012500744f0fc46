"""Rows of a window that end within a block: the last block alone has the mask of where they end.

    if program_id % 15 < 30522 // 2048:
        T0 = load(T0_ptr + b * 30528 + x)
    else:
        T0 = load(T0_ptr + b * 30528 + x, x < 30522, other=0)

The compiler splits masked loads by what divides the number in the mask, which no wide load may.  Cross entropy's
gradient, written into rows that are padded for a matrix product, reads such rows.
"""

from __future__ import annotations

from math import gcd, prod

from ..ir.digits import Axis
from ..ir.layout import local_extent
from .emitter import Emitter
from .sides import Sided
from .window_loads import Bound


def where_whole(e: Emitter) -> str | None:
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
    last, program = min(b.stop for w in e.tile.windows.values() for b in w.bounds), "tl.program_id(0)"
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
