"""Groups of programs that share rows or columns: which tiles of columns they get."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.compiled_kernels import kernels_of


@pytest.mark.parametrize(
    ("channels", "tiles", "columns"), [(64, 1, 0), (40, 1, 0), (96, 2, 48), (144, 3, 48), (240, 4, 0), (200, 4, 56)]
)
def test_tiles_of_channels_have_equally_many_in_whole_loads(channels: int, tiles: int, columns: int) -> None:
    """As many tiles as without: 240 channels in tiles of 60 would split loads of eight."""
    case = f"{channels}x56x56:bfloat16:channels_last"
    (kernel,) = kernels_of([f"batch_norm_channels_last 96x{case}"])
    schedule = kernel.plan.schedule
    assert (schedule.kept, schedule.columns, schedule.blocks(channels)) == (64, columns, tiles)


def test_tiles_of_float32_have_whole_loads_of_four() -> None:
    (kernel,) = kernels_of(["batch_norm_channels_last 64x44x56x56:float32:channels_last"])
    assert (kernel.plan.schedule.kept, kernel.plan.schedule.columns) == (32, 24)
