"""Columns that are reduced in one go, nothing of them being needed again."""

from __future__ import annotations

from collections.abc import Sequence

from ..device import LEAST_COPY, Device
from ..ir.expr import BoundTensor
from .limits import WARPS, power_of_two, vector, widest
from .schedule import Launch, Schedule, Tile
from .space import Space


def run_of(space: Space) -> int:
    """Kept elements side by side in memory."""
    return space.x[-1].extent if space.x else 1


def short_columns(inputs: Sequence[BoundTensor], space: Space, device: Device) -> Schedule:
    """A warp for columns of wide loads; else all threads side by side, a few loads each."""
    tuned = device.measured.reductions
    if any(vector(t.dtype, run_of(space), device) * t.dtype.itemsize <= LEAST_COPY for t in inputs):
        x_block, r_block = tuned.narrow_short_tile
        while x_block > tuned.least_lanes and space.kept < x_block * device.filling:
            x_block, r_block = x_block // 2, r_block * 2
        return Schedule(Tile(min(x_block, power_of_two(space.kept)), r_block), launch=Launch(WARPS))
    width = widest(inputs, space.kept, device)
    return Schedule(Tile(min(tuned.short_lanes * width, power_of_two(space.kept)), tuned.short_rows), launch=Launch(1))
