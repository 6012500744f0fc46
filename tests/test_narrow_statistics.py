"""Means and variances of half and bfloat16 are float32 between input and result, unsharded and sharded."""

from __future__ import annotations

import itertools

import pytest
import torch
from dtensor_cases import make_mesh
from narrow_cases import NARROW, STATISTICS, VALUES, assert_rounded_once, run_statistic
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Partial

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
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


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_average_of_partial_values_is_rounded_once(ranks: int, dtype: torch.dtype) -> None:
    """Each rank's value fits the type, their sum does not."""
    g = torch.Generator().manual_seed(0)
    values = (torch.randn(ranks, 6, 8, generator=g, dtype=torch.float64) * 300 + 60000).to(dtype)

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((size,))
        for shard in (False, True):
            with FusionDefinition() as fd:
                x = fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.from_torch(dtype))
                y = fd.ops.neg(x)
                fd.add_output(y)
                if shard:
                    y.set_device_mesh(DeviceMesh(list(range(size))))
                    y.outer_split(0, size, uneven=True)
                    y.axis(0).parallelize(ParallelType.mesh_x)
            (found,) = fd.execute([DTensor.from_local(values[rank], mesh, [Partial("avg")], run_check=False)])
            assert isinstance(found, DTensor)
            assert_rounded_once("average", found.full_tensor(), -values.double().mean(0))

    run_ranks(ranks, run)
