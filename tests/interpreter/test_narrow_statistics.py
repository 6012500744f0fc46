"""Generated kernels keep float32 between 16-bit input and 16-bit statistics, unsharded and sharded."""

from __future__ import annotations

import itertools

import pytest
from narrow_cases import NARROW, STATISTICS, run_statistic


@pytest.mark.parametrize("name", STATISTICS)
def test_one_rounding(name: str) -> None:
    for values, dtype in itertools.product(("sum beyond half", "large mean", "squares beyond half", "many"), NARROW):
        run_statistic(name, values, dtype, "triton", cut=[(1, 2)])
