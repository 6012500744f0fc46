"""How near to float64 a result that is quantised to float8 has to be, and its scales."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.roundings import assert_near
from shardfuse.nn.quantized import Quantized

STEPS = 0.51
"""Half a step of float8 between neighbours, and what float32 moves a value before it is rounded."""


def step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of the float8 numbers around ``x``, float64."""
    info = torch.finfo(dtype)
    mantissa = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}[dtype]
    exponent = torch.frexp(x.abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.ones_like(x), exponent - mantissa)


def check(found: Quantized, exact: Tensor, dtype: torch.dtype, scales: str | Tensor) -> None:
    """``exact``: float64.  Values are compared after the division by the scale that was found."""
    blocks = exact.unflatten(-1, (-1, 128)) if scales == "block" else exact
    values = found.values.double().view(blocks.shape)
    scale = found.scales.double().unsqueeze(-1) if scales == "block" else found.scales.double()
    largest = torch.finfo(dtype).max
    if not isinstance(scales, Tensor):
        wanted = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
        assert_near(
            found.scales.reshape(wanted.shape), wanted, n=8, rows=None
        )  # of float32: a norm's, and its division
    assert found.values.dtype is dtype
    assert found.scales.dtype is torch.float32
    assert found.values.shape == exact.shape
    expected = (blocks / scale).clamp(-largest, largest)
    off = (values - expected).abs() / step(expected, dtype)
    assert (off <= STEPS).all(), f"off by {off.max():.3f} steps"  # also of a rank that has no rows
