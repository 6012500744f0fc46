"""Sums of columns that are made first, and walks down columns, of images with their channels innermost, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from block_cases import arranged, channels_last_gradients, drawn
from fusion_check import check

from shardfuse import DataType
from shardfuse.schedulers.schedule import Loop

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "is_walked"),
    [
        ((2, 640, 64, 64), 32, DataType.Half, True),
        ((4, 320, 67, 61), 32, DataType.BFloat16, True),  # lanes that hang over, and a last turn that is short
        ((1, 512, 96, 96), 32, DataType.BFloat16, True),
        ((5, 64, 160, 160), 8, DataType.Float, True),
        ((7, 120, 90, 90), 40, DataType.Half, False),  # not as wide as half a tile
        ((33, 128, 48, 48), 4, DataType.BFloat16, True),
    ],
)
def test_gradients_channels_last(shape: Sequence[int], groups: int, dtype: DataType, *, is_walked: bool) -> None:
    fd = channels_last_gradients(shape, groups, dtype, is_last=True)
    for seed in range(2):
        check(fd, arranged(drawn(shape, dtype, seed), is_last=True), device="cuda")
    kernels = [kernel for segment in fd.fec.last_plan.segments for kernel in segment.kernels]
    assert [kernel.name.split("_")[0] for kernel in kernels[:3]] == ["reduction", "reduction", "pointwise"]
    assert isinstance(kernels[2].schedule.residency, Loop) == is_walked
