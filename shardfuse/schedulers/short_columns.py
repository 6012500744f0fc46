"""Columns that are reduced in one go, nothing of them being needed again."""

from __future__ import annotations

from collections.abc import Sequence

from ..device import Device
from ..ir.expr import BoundTensor
from .limits import PROGRAMS_PER_MULTIPROCESSOR, power_of_two, vector
from .schedule import Launch, Schedule, Tile
from .space import Space

NARROW_BYTES = 4
"""What no copy ahead of time is narrower than: of less, many programs with few loads each hide the wait.  The sum over
dim 0 of 16384 x 8191, bfloat16, took 97 us so, with 64 loads a thread 359."""
_COLUMN_LANES = 16
_COLUMN_ROWS = 16
"""Short columns are read by a warp for as many of them as half of its threads load.  The sum over the middle of
32 x 100 x 4096, bfloat16, took 13.4 us so, in a loop 14.9; of 1000 x 33 x 70, float32, 8.3 and 11.8."""
_NARROW_SHORT_TILE = (256, 4)
"""Of loads of few bytes.  The sum over the middle of 3000 x 77 x 333, bfloat16, took 62 us so, in a loop 118."""
_LEAST_LANES = 64
"""To which such a tile is narrowed before multiprocessors idle: over dim 0 of 120 x 3001 6.4 us, 256 wide 19."""
_NARROW_WARPS = 4


def run_of(space: Space) -> int:
    """Kept elements side by side in memory."""
    return space.x[-1].extent if space.x else 1


def short_columns(inputs: Sequence[BoundTensor], space: Space, device: Device) -> Schedule:
    """A warp for columns of wide loads; else all threads side by side, a few loads each."""
    if any(vector(t.dtype, run_of(space), device) * t.dtype.itemsize <= NARROW_BYTES for t in inputs):
        x_block, r_block = _NARROW_SHORT_TILE
        while x_block > _LEAST_LANES and space.kept < x_block * device.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR:
            x_block, r_block = x_block // 2, r_block * 2
        return Schedule(Tile(min(x_block, power_of_two(space.kept)), r_block), launch=Launch(_NARROW_WARPS))
    width = max((vector(t.dtype, space.kept, device) for t in inputs), default=4)
    return Schedule(Tile(min(_COLUMN_LANES * width, power_of_two(space.kept)), _COLUMN_ROWS), launch=Launch(1))
