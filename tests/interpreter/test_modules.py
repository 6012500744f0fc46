"""The kernels of every function of shardfuse.nn.functional, forward and backward, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from activation_sweep import SWEEPS, check_sweep
from functional_cases import CASES, check

from benchmarks.roundings import assert_near
from shardfuse.nn import RotaryEmbedding, SwiGLU


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about lanes that are masked
@pytest.mark.parametrize("name", CASES)
def test_kernels_of_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_STRICT", "1")  # a kernel that fails is an error, not a call of torch
    for dtype in (torch.float32, torch.bfloat16):
        check(CASES[name], dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp of large numbers is infinite
@pytest.mark.parametrize("name", SWEEPS)
def test_activations_at_every_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_STRICT", "1")
    for dtype in (torch.float32, torch.bfloat16):
        check_sweep(name, dtype, 64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_in_one(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write both halves of the gradient where they belong; the second and third call look nothing up."""
    monkeypatch.setenv("SHARDFUSE_STRICT", "1")
    module = SwiGLU(24, bias=bias)
    generator = torch.Generator().manual_seed(0)
    if module.gate_bias is not None and module.up_bias is not None:
        with torch.no_grad():
            module.gate_bias.copy_(torch.randn(24, generator=generator))
            module.up_bias.copy_(torch.randn(24, generator=generator))
    for _ in range(3):
        x, dy = torch.randn(2, 5, 48, generator=generator), torch.randn(2, 5, 24, generator=generator)
        module.zero_grad()
        own, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        biases = [b.detach().double().requires_grad_() for b in module.parameters()]
        gate, up = wide.chunk(2, -1)
        if biases:
            gate, up = gate + biases[0], up + biases[1]
        expected, found = torch.nn.functional.silu(gate) * up, module(own)
        expected.backward(dy.double())
        found.backward(dy)
        assert_near(found.detach(), expected.detach(), n=8)
        assert own.grad is not None
        assert wide.grad is not None
        assert_near(own.grad, wide.grad, n=8, terms=wide.grad.abs() + 1)
        for b, w in zip(module.parameters(), biases, strict=True):
            assert b.grad is not None
            assert w.grad is not None
            assert_near(b.grad, w.grad, n=8, terms=w.grad.abs() + 10)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_packed_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel turns queries and keys and copies values, and one turns their three gradients back into one."""
    monkeypatch.setenv("SHARDFUSE_STRICT", "1")
    module, generator = RotaryEmbedding(8, packed=(2, 1)), torch.Generator().manual_seed(0)
    cos, sin = module.tables(torch.arange(3))
    for _ in range(2):
        x = torch.randn(2, 3, 32, generator=generator)
        own, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        query, key, value = wide.unflatten(-1, (4, 8)).split([2, 1, 1], 2)
        turned = []
        for t in (query, key):
            a, b = t.chunk(2, -1)
            c, s = cos.double()[:, None], sin.double()[:, None]
            turned.append(torch.cat((a * c - b * s, b * c + a * s), -1))
        expected = [t.transpose(1, 2) for t in (*turned, value)]
        gradients = [torch.randn(t.shape, generator=generator) for t in expected]
        found = module(own, cos=cos, sin=sin)
        torch.autograd.backward(found, gradients)
        torch.autograd.backward(expected, [g.double() for g in gradients])
        for result, right in zip(found, expected, strict=True):
            assert_near(result.detach(), right.detach(), n=4, terms=right.detach().abs() + 1)
        assert own.grad is not None
        assert wide.grad is not None
        assert_near(own.grad, wide.grad, n=4, terms=wide.grad.abs() + 1)
    (bound,) = module._bound.values()
    for fusion in bound.op.fusions:
        assert ", 1 kernels, 0 collectives" in str(fusion.explain())
