"""Sums along rows and down columns in one walk, against torch in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted import close, run, values
from kernel_cases import layer_norm_backward, rms_norm_backward
from segments import Builder, scheduler_of

from shardfuse.ir.dtype import DataType
from shardfuse.schedulers import mix_order
from shardfuse.schedulers.limits import H200
from shardfuse.schedulers.plan import Params
from shardfuse.schedulers.segment import Segment

BF16, FLOAT = DataType.BFloat16, DataType.Float
EPS = 1e-5


def rms_gradients(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    unit, scaled = x * rstd, dy * w
    return (scaled - unit * (scaled * unit).mean(-1, keepdim=True)) * rstd, (dy * unit).sum(0)


def layer_gradients(x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
    x = x.double().requires_grad_()
    unit = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + EPS)
    (dx,) = torch.autograd.grad(unit, x, dy.double() * w.double())
    return [dx, (dy.double() * unit.detach()).sum(tuple(rows)), dy.double().sum(tuple(rows))]


def given(segment: Segment, *data: torch.Tensor) -> dict[object, torch.Tensor]:
    return dict(zip(segment.inputs, data, strict=True))


def ordered(segment: Segment, named: dict[str, torch.Tensor]) -> dict[object, torch.Tensor]:
    return {t: named[t.name] for t in segment.inputs}


def small(params: Params, rng: random.Random) -> Params:
    """Few programs, so that each walks; blocks that cut the row unevenly."""
    return replace(
        params, x_block=1 << rng.randrange(4), r_block=1 << rng.randrange(4, 8), splits=rng.choice([1, 2, 3, 7])
    )


SHAPES = [(5, 300), (33, 130), (40, 64), (2, 1000), (130, 17), (7, 384), (1001, 3)]


@pytest.mark.parametrize("dtype", [BF16, DataType.Half, FLOAT, DataType.Double])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rms_norm_backward(tmp_path: Path, rows: int, columns: int, dtype: DataType) -> None:
    segment = rms_norm_backward(rows, columns, dtype)
    assert scheduler_of(segment) is mix_order
    x, dy, w = values(rows, columns, dtype=dtype), values(rows, columns, dtype=dtype, seed=1), values(columns, dtype=dtype, seed=2)
    rstd = values(rows, 1, dtype=dtype, seed=3).to(dtype.compute.torch)
    data = ordered(segment, {"T0": x, "T1": dy, "T2": w, "T3": rstd})
    wanted = rms_gradients(x.double(), dy.double(), w.double(), rstd.double())
    proposed = mix_order.propose(segment, H200)
    for params in (proposed, small(proposed, random.Random(rows * columns))):
        for found, right in zip(run(segment, data, tmp_path, params=params), wanted, strict=True):
            close(found, right)
