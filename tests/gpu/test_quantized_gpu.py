"""Results quantised to float8 on a GPU, and matmuls that read them with their scales."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from quantized_check import check
from test_nn_quantized import FUNCTIONS, drawn

from shardfuse.nn import quantized
from shardfuse.nn.quantized import Quantized

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_scales(name: str, scales: str) -> None:
    own, other, *_ = FUNCTIONS[name]
    for shape in ((37, 4096), (513, 384)):
        tensors = [t.cuda() for t in drawn(name, torch.bfloat16, shape)]
        found = own(*tensors, scales=scales)
        made = found if isinstance(found, Quantized) else found[0]
        check(made, other(*[t.double() for t in tensors]), torch.float8_e4m3fn, scales)


@pytest.mark.parametrize("scales", ["row", "block"])
def test_one_kernel(scales: Literal["row", "block"]) -> None:
    """Residual, norm, scales where matmuls read them, and cast."""
    x, r = (torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    quantized.add_rms_norm(x, r, (4096,), weight, scales=scales)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        quantized.add_rms_norm(x, r, (4096,), weight, scales=scales)
        torch.cuda.synchronize()
    assert len([e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]) == 1


@pytest.mark.parametrize("scales", ["row", "block"])
def test_matmuls_take_them(scales: str) -> None:
    """Of 256 columns of 512: off by the roundings of float8 alone, which the product of what it stands for has too."""
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    a, b = quantized.quantize(x, scales=scales), quantized.quantize(weight, scales=scales)
    b_scales = b.scales.t()
    found = torch._scaled_mm(a.values, b.values.t(), a.scales, b_scales, out_dtype=torch.bfloat16)
    wide = [_wide(t, scales) for t in (a, b)]
    expected = wide[0] @ wide[1].T
    terms = wide[0].abs() @ wide[1].abs().T
    # float8 matmuls on this generation add up with 14 bits, so that a sum is off by 2^-13 of its terms
    assert ((found.double() - expected).abs() <= expected.abs() * 2**-8 + terms * 2**-12).all()


def _wide(t: Quantized, scales: str) -> torch.Tensor:
    each = t.scales if scales == "row" else t.scales.repeat_interleave(128, -1)
    return t.values.double() * each.double()
