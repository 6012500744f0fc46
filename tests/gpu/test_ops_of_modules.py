"""The ops of modules in graphs that Inductor compiles for a GPU, and what a call takes the host."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfuse import DeviceMesh
from shardfuse.nn import AddRMSNorm, RMSNorm

pytestmark = pytest.mark.gpu
HIDDEN = 1024


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 64, HIDDEN, generator=generator).to("cuda", torch.bfloat16) for _ in range(4)]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_module_on_a_mesh_compiled(mode: str | None) -> None:
    """Bit by bit what it gives eagerly, call after call, also within CUDA graphs."""
    torch._dynamo.reset()
    norm = AddRMSNorm(
        HIDDEN, bias=True, mesh=DeviceMesh([0]), input=Partial(), residual=Shard(1), output=Replicate(), device="cuda"
    )
    compiled = torch.compile(norm, fullgraph=True, mode=mode)
    x, residual, *gradients = tensors()
    for call in range(4):
        found = []
        for run in (norm, compiled):
            norm.zero_grad()
            leaves = [(t * (1 + call)).requires_grad_() for t in (x, residual)]
            results = run(*leaves)
            torch.autograd.backward(results, gradients)
            found.append([t.detach().clone() for t in (*results, *(t.grad for t in (*leaves, *norm.parameters())))])
        for got, want in zip(found[1], found[0], strict=True):
            assert torch.equal(got, want)


def test_a_plain_module_compiled() -> None:
    """What it decomposes into rounds once: at most one rounding from the fusion."""
    torch._dynamo.reset()
    norm, x = RMSNorm(HIDDEN, device="cuda"), tensors()[0]
    got, want = torch.compile(norm, fullgraph=True)(x), norm(x)
    apart = (got.double() - want.double()).abs()
    assert (apart <= torch.finfo(torch.bfloat16).eps * want.double().abs().clamp_min(1e-3)).all()


def test_what_a_call_takes_beyond_its_fusion() -> None:
    """Printed, not held to a limit: the host's time of a call without gradients, less that of its fusion."""
    norm = AddRMSNorm(HIDDEN, mesh=DeviceMesh([0]), input=Partial(), output=Replicate(), device="cuda")
    x, residual = tensors()[:2]
    fusion, inputs = norm.op(x, residual).forward, [x[None], norm.weight.detach(), residual]
    took = {}
    with torch.no_grad():
        for name, run in (("module", lambda: norm(x, residual)), ("fusion", lambda: fusion.execute(inputs))):
            times = []
            for _ in range(20):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(50):
                    run()
                times.append((time.perf_counter() - began) / 50 * 1e6)
            took[name] = min(times)
    print(f"module {took['module']:.1f} us, its fusion {took['fusion']:.1f} us")
    assert torch.isfinite(norm(x, residual)[0]).all()
