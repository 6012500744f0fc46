"""Modules on half and bfloat16: float32 between what comes in and what comes out, which is rounded once."""

from __future__ import annotations

import pytest
import torch
from narrow_cases import NARROW, assert_rounded_once
from torch import Tensor
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse.ir.dtype import DataType
from shardfuse.nn import (
    AddLayerNorm,
    AddRMSNorm,
    CrossEntropyLoss,
    DropoutAddNorm,
    RMSNorm,
    SwiGLU,
    gated,
)


def numbers(dtype: torch.dtype, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """On the dtype's grid."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).to(dtype)


def check_swiglu(dtype: torch.dtype, *, bias: bool) -> None:
    gate, up = (numbers(dtype, 6, 512, seed=k, scale=3).requires_grad_() for k in (0, 1))
    gradient = numbers(dtype, 6, 512, seed=2)
    module = SwiGLU(512, bias=bias, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (gate, up)]
    a, b = wide
    if bias:
        for k, p in enumerate(module.parameters()):
            p.data.copy_(numbers(dtype, 512, seed=3 + k))
        assert module.gate_bias is not None
        assert module.up_bias is not None
        a, b = a + module.gate_bias.detach().double(), b + module.up_bias.detach().double()
    found, want = module(gate, up), functional.silu(a) * b
    found.backward(gradient)
    want.backward(gradient.double())
    assert gate.grad is not None
    assert up.grad is not None
    slope = wide[0].grad, wide[1].grad
    assert slope[0] is not None
    assert slope[1] is not None
    assert_rounded_once("SwiGLU", found.detach(), want.detach(), want.detach() + b.detach())
    assert_rounded_once(
        "the gate's gradient", gate.grad, slope[0], gradient.double() * b.detach() * (1 + a.detach().abs())
    )
    assert_rounded_once("up's gradient", up.grad, slope[1], gradient.double() * a.detach())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_swiglu(dtype: torch.dtype, bias: bool) -> None:
    check_swiglu(dtype, bias=bias)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_swiglu_in_16_bits_is_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that nothing caught: every op of the fusion rounds to the type of gate and up."""
    monkeypatch.setattr(gated.GatedSpec, "compute", property(lambda spec: spec.dtype))
    gated.gated_op.cache_clear()
    try:
        with pytest.raises(AssertionError, match="float64 has"):
            check_swiglu(dtype, bias=False)
    finally:
        gated.gated_op.cache_clear()


def test_where_a_swiglu_would_overflow_half() -> None:
    """silu(gate) is beyond half, its product with up is not."""
    gate, up = torch.full((2, 8), 60000.0).half(), torch.full((2, 8), 0.5).half()
    bias = SwiGLU(8, bias=True, dtype=torch.float16)
    assert bias.gate_bias is not None
    bias.gate_bias.data.fill_(60000.0)
    assert_rounded_once("SwiGLU", bias(gate, up).detach(), torch.full((2, 8), 60000.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", NARROW)
def test_rms_norm(dtype: torch.dtype) -> None:
    """Squares beyond half, and a hidden axis of which 16 bits would count no more than a part."""
    x = numbers(dtype, 5, 4096, seed=0, scale=700)
    module = RMSNorm(4096, dtype=dtype)
    module.weight.data.copy_(numbers(dtype, 4096, seed=1))
    want = functional.rms_norm(x.double(), (4096,), module.weight.detach().double(), module.eps)
    assert_rounded_once("RMSNorm", module(x).detach(), want)


@pytest.mark.parametrize("dtype", NARROW)
def test_cross_entropy(dtype: torch.dtype) -> None:
    """The loss is float32; the gradient of each logit is rounded once."""
    logits = numbers(dtype, 16, 1000, seed=0, scale=4).requires_grad_()
    target = torch.randint(0, 1000, (16,), generator=torch.Generator().manual_seed(1))
    wide = logits.detach().double().requires_grad_()
    loss, want = CrossEntropyLoss()(logits, target), functional.cross_entropy(wide, target)
    loss.backward()
    want.backward()
    assert_near(loss.detach(), want.detach(), n=2)
    assert logits.grad is not None
    assert wide.grad is not None
    assert_rounded_once("gradient of the logits", logits.grad, wide.grad, 1 / 16)
    assert DataType.from_torch(logits.grad.dtype).is_low_precision


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
@pytest.mark.parametrize("make", [AddRMSNorm, AddLayerNorm, DropoutAddNorm])
def test_a_residual_that_is_narrower_than_what_is_added(
    make: type[AddRMSNorm | AddLayerNorm | DropoutAddNorm], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """The new residual is rounded to the residual's dtype, and what the backward reads of the sum is not."""
    wide, narrow = dtypes
    x, residual = numbers(wide, 16, 64, seed=0), numbers(narrow, 16, 64, seed=1)
    weight, gradient = numbers(wide, 64, seed=2), numbers(wide, 16, 64, seed=3)
    module = make(64, dtype=wide).eval()
    module.weight.data.copy_(weight)
    is_rms = make is AddRMSNorm
    result: list[list[Tensor]] = []
    for dtype in (torch.float64, wide):
        a, b, w = (t.to(dtype, copy=True).requires_grad_() for t in (x, residual, weight))
        norm = functional.rms_norm if is_rms else functional.layer_norm
        norm(a + b, (64,), weight=w, eps=module.eps).backward(gradient.to(dtype))
        result.append([t.grad for t in (a, b, w)])
    x.requires_grad_()
    residual.requires_grad_()
    normed, total = module(x, residual)
    assert total.dtype == narrow
    torch.autograd.backward([normed, total], [gradient, torch.zeros_like(total)])
    for name, found, want, eager in zip(
        ("x", "weight"), (x.grad, module.weight.grad), result[0][::2], result[1][::2], strict=True
    ):
        assert_near(found, want, eager, n=4, terms=want.abs() + gradient.double().abs().sum(0), what=name)
    assert_near(residual.grad, result[0][1], what="residual")
