"""A mask's bytes beside wider elements are loaded in runs of as many, where they follow one another."""

from __future__ import annotations

import re

import pytest
import torch
from fusion_check import check
from interpreted import values

from shardfuse import DataType, FusionDefinition


def masked(shape: list[int], dtype: DataType, axis: int | None, strides: list[bool] | None = None) -> FusionDefinition:
    """What a dropout lets through, and with ``axis`` its sums along it, read again for what is off their mean."""
    with FusionDefinition(backend="triton") as fd:
        x = fd.define_tensor(shape, dtype=dtype)
        mask = fd.define_tensor(shape, dtype=DataType.Bool, contiguity=strides or [True] * len(shape))
        kept = fd.ops.where(mask, fd.ops.cast(x, DataType.Float), 0.0)
        if axis is not None:
            kept = fd.ops.sub(kept, fd.ops.mean(kept, [axis], keepdim=True))
        fd.add_output(kept)
    return fd


def source_of(fd: FusionDefinition, inputs: list[torch.Tensor]) -> str:
    from benchmarks.sm90 import sources_of

    plan = fd.fec.plan(dict(zip(fd.fec.tensors(), [tuple(x.shape) for x in inputs], strict=True)))
    return "\n".join(s.text for s in sources_of(plan, inputs))


def expected(axis: int | None, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = torch.where(mask, x, 0.0)
    return kept if axis is None else kept - kept.mean(axis, keepdim=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "axis", "run"),
    [
        ([6, 64], DataType.BFloat16, 1, "8"),
        ([6, 1024], DataType.BFloat16, 1, "8"),
        ([6, 1000], DataType.Float, 1, "4"),
        ([6, 1003], DataType.Float, 1, "4"),
        ([96, 40], DataType.BFloat16, 0, "8"),
        ([32, 136], DataType.Float, None, "4"),
    ],
)
def test_runs_are_as_long_as_the_others(shape: list[int], dtype: DataType, axis: int | None, run: str) -> None:
    fd = masked(shape, dtype, axis)
    given = [values(*shape, dtype=dtype), values(*shape, seed=1) > 0]
    check(fd, given, reference=lambda x, m: expected(axis, x, m))
    text = source_of(fd, given)
    assert set(re.findall(r"max_contiguous\(.*?, (?:\[1, )?(\d+)\]?\)", text)) == {run}, text


@pytest.mark.parametrize("axis", [0, 1, None])
def test_bytes_that_lie_apart_are_no_run(axis: int | None) -> None:
    shape = [24, 32]
    fd = masked(shape, DataType.BFloat16, axis, [False, False])
    mask = (values(24, 64, seed=1) > 0)[:, ::2]
    given = [values(*shape, dtype=DataType.BFloat16), mask]
    check(fd, given, reference=lambda x, m: expected(axis, x, m))
    assert "max_contiguous" not in source_of(fd, given)


def test_bytes_alone_are_loaded_as_wide_as_can_be() -> None:
    with FusionDefinition(backend="triton") as fd:
        mask = fd.define_tensor([6, 64], dtype=DataType.Bool, contiguity=True)
        fd.add_output(fd.ops.where(mask, 2.0, 1.0))
    given = [values(6, 64) > 0]
    check(fd, given, reference=lambda m: torch.where(m, 2.0, 1.0))
    assert "max_contiguous" not in source_of(fd, given)
