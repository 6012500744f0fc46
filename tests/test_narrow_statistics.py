"""Means and variances of half and bfloat16 are float32 between input and result, unsharded and sharded."""

from __future__ import annotations

import itertools

import pytest
import torch
from narrow_cases import NARROW, STATISTICS, VALUES, assert_rounded_once, run_statistic

from shardfuse import DataType, FusionDefinition
from shardfuse.errors import OperandError


@pytest.mark.parametrize("name", STATISTICS)
def test_one_rounding(name: str) -> None:
    for values, dtype in itertools.product(VALUES, NARROW):
        run_statistic(name, values, dtype, "torch", cut=[(1, 2), (1, 3), (0, 2)])


def test_planted_roundings_are_seen() -> None:
    """The bound fails for what was computed in 16 bits between."""
    for dtype in NARROW:
        x = VALUES["large mean"].to(dtype)
        mean = x.sum(1).to(dtype) / x.shape[1]
        with pytest.raises(AssertionError, match="float64 has"):
            assert_rounded_once("a sum that was rounded", mean, x.double().mean(1))
        off = x - x.mean(1, keepdim=True)
        with pytest.raises(AssertionError, match="float64 has"):
            assert_rounded_once("distances that were rounded", (off * off).mean(1), x.double().var(1, correction=0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_means_of_integers_are_float32(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2 if dtype is torch.bool else 200, (3, 1000), generator=torch.Generator().manual_seed(0))
    x = x.to(dtype)
    with FusionDefinition(backend="torch") as fd:
        fd.add_output(fd.ops.mean(fd.from_pytorch(x), [1]))
    (found,) = fd.execute([x])
    assert found.dtype == torch.float32
    assert_rounded_once(f"mean of {dtype}", found, x.double().mean(1))


def test_a_mean_in_integers_is_refused() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 8], dtype=DataType.Int)
        with pytest.raises(OperandError, match="dtype"):
            fd.ops.mean(x, [1], dtype=DataType.Int)
        fd.add_output(x)
