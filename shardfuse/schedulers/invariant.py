"""invariant: how a program holds a row whose sums are in one order whatever the number of rows.

On an under-occupied grid many threads for each row are fastest, else few: this number is no more than a tenth behind
either.  Times on an H200, as shares of the best for 1, 128 and 8192 rows: LayerNorm of 4096, bfloat16, with 8 warps
1.10, 1.07 and 1.00, with 4 1.26, 1.22 and 1.01, with 16 1.03, 1.02 and 1.24.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..device import Device, InvariantRows
from ..ir.expr import BoundTensor
from .limits import MAX_WARPS, WARP, power_of_two, widest
from .schedule import Launch, Registers, Schedule, Tile
from .segment import Segment
from .space import Space, beside, streamed


def invariant_row(segment: Segment, space: Space, device: Device) -> Schedule | None:
    """A program for each row; ``None`` where rows are held as many rows are: short ones, columns, long chains."""
    n, tuned = space.reduced, device.measured.invariant_rows
    if not (space.is_invariant and space.is_inner) or n <= tuned.short or space.phases > tuned.phases:
        return None
    inputs = streamed(segment, space)
    width = widest(inputs, n, device)
    warps = min(power_of_two(-(-n // (tuned.each * WARP))), MAX_WARPS)
    lanes = warps * WARP * width
    if warps > tuned.eager_warps and _used(n, lanes) < tuned.used <= _used(n, lanes // 2):
        warps //= 2
    block = min(max(warps * WARP * width, power_of_two(-(-n // device.measured.rows.chunks))), power_of_two(n))
    is_eager = _is_eager(segment, space, inputs, warps, tuned)
    return Schedule(Tile(1, block), Registers(eager=is_eager), launch=Launch(warps))


def _used(n: int, block: int) -> float:
    """The part of the lanes of a row's blocks that have an element."""
    return n / (-(-n // block) * block)


def _is_eager(segment: Segment, space: Space, inputs: Sequence[BoundTensor], warps: int, tuned: InvariantRows) -> bool:
    if segment.has_indices or any(map(space.has_x, beside(segment, space))):
        return False
    return warps <= tuned.eager_warps or min((t.dtype.itemsize for t in inputs), default=0) >= tuned.wide_bytes
