"""Sums of blocks of rows on a GPU, where the programs of a group have parts of a row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from block_cases import RandomRows, decomposed_gradients, drawn, group_norm_gradients, with_moments
from fusion_check import check

from shardfuse import DataType

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "is_active"),
    [
        ((32, 50, 40, 40), 1, DataType.Half, True),  # the last member has fewer blocks
        ((32, 50, 40, 40), 1, DataType.Float, False),
        ((4, 640, 32, 32), 32, DataType.Float, True),
        ((2, 320, 64, 64), 32, DataType.BFloat16, True),
        ((16, 64, 128, 128), 4, DataType.Half, True),  # members hold more than 40 elements a thread
        ((160, 8, 64, 64), 1, DataType.Half, False),  # read a row ahead
        ((9, 12, 48, 48), 2, DataType.BFloat16, True),  # blocks of one thread
        ((8, 512, 16, 16), 32, DataType.BFloat16, True),  # a program for each row
        ((4, 256, 8, 8), 32, DataType.Half, True),  # several rows for each program
        ((1, 64, 256, 256), 4, DataType.BFloat16, True),  # the largest groups
    ],
)
def test_gradients_of_group_norms(shape: Sequence[int], groups: int, dtype: DataType, is_active: bool) -> None:
    fd = group_norm_gradients(shape, groups, dtype, is_active=is_active)
    for seed in range(2):  # what is kept between launches is read again
        check(fd, drawn(shape, dtype, seed), device="cuda")


@pytest.mark.parametrize(
    ("shape", "groups", "dtype"),
    [
        ((4, 640, 32, 32), 32, DataType.Float),
        ((2, 320, 64, 64), 32, DataType.BFloat16),
        ((16, 64, 128, 128), 4, DataType.Half),
        ((9, 12, 48, 48), 2, DataType.BFloat16),
        ((8, 512, 16, 16), 32, DataType.Half),
        ((1, 64, 256, 256), 4, DataType.BFloat16),
    ],
)
def test_gradients_as_torch_decomposes_them(shape: Sequence[int], groups: int, dtype: DataType) -> None:
    fd = decomposed_gradients(shape, groups, dtype)
    check(fd, with_moments(drawn(shape, dtype), groups), device="cuda")


@pytest.mark.parametrize("seed", range(24))
def test_random_rows(seed: int) -> None:
    case = RandomRows(seed)
    check(case.fusion(), case.arguments(), device="cuda")
