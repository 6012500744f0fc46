"""invariant: how a program holds a row whose sums are in one order whatever the number of rows.

Of few rows the fastest program has many threads for each, of many rows few: one that is no more than a tenth behind
either.  Times on an H200, as shares of the best for 1, 128 and 8192 rows: LayerNorm of 4096, bfloat16, with 8 warps
1.10, 1.07 and 1.00, with 4 1.26, 1.22 and 1.01, with 16 1.03, 1.02 and 1.24.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..device import Device
from ..ir.expr import BoundTensor
from .limits import MAX_CHUNKS, MAX_WARPS, WARP, power_of_two, vector
from .schedule import Launch, Registers, Schedule, Tile
from .segment import Segment
from .space import Space, beside, streamed

_EACH = 16
"""Elements of a row that a thread holds."""
_SHORT = 512
"""Elements of a row up to which a warp takes it whole, with others: few rows or many take as long."""
_EAGER_WARPS = 4
"""Up to which all loads come first.  LayerNorm of 8192 x 4096, bfloat16, 8 warps, took 45 us so, else 37; of 2048
columns, 4 warps, 23.5 and 22.2, but of a single row 5.3 and 6.0.  Words of 32 bits leave fewer loads: float32 took 68
us so, else 69, and of a single row 5.5 and 6.2."""
_WIDE_BYTES = 4
_USED = 0.8
"""Of the lanes, below which half as many warps are taken.  Softmax of 8192 x 5120, bfloat16, took 65 us with 16 warps,
0.63 of whose lanes had an element; without the promise 45."""
_PHASES = 4
"""Reductions that follow one another, and one, up to which a row has so many threads."""


def invariant_row(segment: Segment, space: Space, device: Device) -> Schedule | None:
    """A program for each row; ``None`` where rows are held as many rows are: short ones, columns, long chains."""
    n = space.reduced
    if not (space.is_invariant and space.is_inner) or n <= _SHORT or space.phases > _PHASES:
        return None
    inputs = streamed(segment, space)
    width = max((vector(t.dtype, n, device) for t in inputs), default=4)
    warps = min(power_of_two(-(-n // (_EACH * WARP))), MAX_WARPS)
    if warps > _EAGER_WARPS and _used(n, warps * WARP * width) < _USED <= _used(n, warps * WARP * width // 2):
        warps //= 2
    block = min(max(warps * WARP * width, power_of_two(-(-n // MAX_CHUNKS))), power_of_two(n))
    is_eager = _is_eager(segment, space, inputs, warps)
    return Schedule(Tile(1, block), Registers(eager=is_eager), launch=Launch(warps))


def _used(n: int, block: int) -> float:
    """The part of the lanes of a row's blocks that have an element."""
    return n / (-(-n // block) * block)


def _is_eager(segment: Segment, space: Space, inputs: Sequence[BoundTensor], warps: int) -> bool:
    if segment.has_indices or any(map(space.has_x, beside(segment, space))):
        return False
    return warps <= _EAGER_WARPS or min((t.dtype.itemsize for t in inputs), default=0) >= _WIDE_BYTES
