"""Casts to 8-bit floats in kernels: bit for bit what torch makes of every value, NaN and infinity among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import run
from kernel_cases import FLOAT8, scaled
from segments import Builder, evaluate

from benchmarks.roundings import assert_near
from shardfuse.ir.dtype import DataType


def around(dtype: DataType) -> torch.Tensor:
    """Every number of ``dtype``, the middle of each two, and what lies just beside; beyond the largest too."""
    exact = torch.arange(256, dtype=torch.uint8).view(dtype.torch).float()
    exact = exact[exact.isfinite()].sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    largest = exact.max()
    beyond = torch.tensor([1.0, 1.035, 1.0357, 1.036, 1.07, 1.0714, 1.072, 1.14, 1.15, 1.2, 2.0, 1e30]) * largest
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-38, 1e-45, -1e-45, 3e38])
    points = torch.cat([exact, middle, beyond, -beyond, odd])
    up, down = points.nextafter(torch.tensor(torch.inf)), points.nextafter(torch.tensor(-torch.inf))
    return torch.cat([points, up, down])


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    nans = wanted.float().isnan()
    assert torch.equal(found.float().isnan(), nans)
    assert torch.equal(found.view(torch.uint8)[~nans], wanted.view(torch.uint8)[~nans])


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_number_and_what_lies_beside(dtype: DataType, tmp_path: Path) -> None:
    b, data = Builder(), around(dtype)
    x = b.input(DataType.Float, b.axis(data.numel()))
    (found,) = run(b.segment(b.cast(x, dtype)), {x: data}, tmp_path)
    same_bits(found, data.to(dtype.torch))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_bfloat16(dtype: DataType, tmp_path: Path) -> None:
    b, data = Builder(), torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = b.input(DataType.BFloat16, b.axis(data.numel()))
    (found,) = run(b.segment(b.cast(x, dtype)), {x: data}, tmp_path)
    same_bits(found, data.to(dtype.torch))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_value_that_is_read_again_is_the_rounded_one(dtype: DataType, tmp_path: Path) -> None:
    b, data = Builder(), around(dtype)
    x = b.input(DataType.Float, b.axis(data.numel()))
    narrow = b.cast(x, dtype)
    segment = b.segment(narrow, b.op("mul", b.cast(narrow, DataType.Float), 0.5))
    found, half = run(segment, {x: data}, tmp_path)
    same_bits(found, data.to(dtype.torch))
    assert_near(half, data.to(dtype.torch).double() * 0.5, n=0)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_norm_in_one_kernel(dtype: DataType, tmp_path: Path) -> None:
    segment = scaled(5, 200, dtype)
    x, scale = segment.inputs
    data = torch.randn(5, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    most = torch.finfo(dtype.torch).max
    inputs = {x: data, scale: torch.tensor([most / 2])}
    (found,) = run(segment, inputs, tmp_path)
    wanted = evaluate(segment, inputs)[0].eager
    assert wanted.float().isfinite().any()
    assert (wanted.float().abs() == most).any() or not wanted.float().isfinite().all()
    # a value that lies within rounding of the middle of two may be either of them
    apart = found.view(torch.uint8).int() - wanted.view(torch.uint8).int()
    assert apart.abs().max() <= 1
    assert (apart != 0).float().mean() < 0.01
