"""Linear layers of mixed precision on a GPU: the weight's gradient is not rounded to the input's dtype."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse.nn.functional import linear, rms_norm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_s_gradient_is_float32(dtype: torch.dtype) -> None:
    x = torch.randn(3, 85, 512, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(384, 512, device="cuda", requires_grad=True)
    given = torch.randn(3, 85, 384, device="cuda").to(dtype)
    of_x, of_weight = torch.autograd.grad(linear(x, weight), (x, weight), given)
    rows, wide = given.double().flatten(0, 1), x.detach().double().flatten(0, 1)
    terms = rows.abs().t() @ wide.abs()
    assert_near(of_weight, rows.t() @ wide, n=2, rows=None, terms=terms)
    assert not torch.equal(of_weight, of_weight.to(dtype).float())
    cast = weight.detach().to(dtype).double()
    assert_near(of_x.flatten(0, 1), rows @ cast, n=2, rows=None, terms=rows.abs() @ cast.abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_eps_that_is_left_out_is_torch_s(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 512, device="cuda") * 1e-3).to(dtype)
    eager = functional.rms_norm(x, (512,))
    assert_near(rms_norm(x, (512,)), eager.double(), eager, n=2)
