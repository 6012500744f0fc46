"""The modules of shardfuse.nn on a GPU: results, gradients, dropout, and how many kernels a call takes."""

from __future__ import annotations

import pytest
import torch
from functional_cases import CASES, check
from torch.utils.checkpoint import checkpoint

from shardfuse.nn import BatchNorm2d, DropoutAddNorm, GroupNorm, LinearCrossEntropyLoss, RotaryEmbedding, SwiGLU

pytestmark = pytest.mark.gpu
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CASES)
def test_functions(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_STRICT", "1")
    check(CASES[name], dtype, "cuda")


def test_dropout_is_repeated_and_checkpointed() -> None:
    module = DropoutAddNorm(256, 0.3, device="cuda")
    x, residual = torch.randn(64, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    gradients, totals = [], []
    for run in (module, lambda *t: checkpoint(module, *t, use_reentrant=False)):
        torch.manual_seed(3)
        given = x.clone().requires_grad_()
        normed, total = run(given, residual)
        (normed.square().sum() + total.sum()).backward()
        gradients.append(given.grad)
        totals.append(total.detach())
    assert torch.equal(*gradients)
    assert torch.equal(*totals)
    kept = totals[0] != residual
    assert 0.65 < kept.float().mean().item() < 0.75
    torch.testing.assert_close(totals[0], torch.where(kept, residual + x / 0.7, residual))
    assert not torch.equal(module(x, residual)[1], totals[0])


def kernels(call: object) -> list[str]:
    """Names of the kernels that a call launches, when everything is compiled."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    # the driver's calls are among the events too
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in on_gpu if "Memset" not in name]


def test_one_kernel_forward() -> None:
    """Nothing is copied on the way in: views of a projection, packed gates, and images as they are stored."""
    rotary, gate, norm = RotaryEmbedding(64), SwiGLU(), GroupNorm(8, 32, activation="silu", device="cuda")
    q, k, _ = torch.randn(2, 128, 3, 8, 64, device="cuda").permute(2, 0, 3, 1, 4)
    cos, sin = rotary.tables(torch.arange(128, device="cuda"))
    both = torch.randn(128, 512, device="cuda")
    image = torch.randn(4, 32, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    batch = BatchNorm2d(32, device="cuda").eval()
    with torch.no_grad():
        assert len(kernels(lambda: rotary(q, k, cos, sin))) == 2  # queries and keys of one fusion, a kernel each
        assert len(kernels(lambda: gate(both))) == 1
        assert len(kernels(lambda: norm(image))) <= 2
        assert len(kernels(lambda: batch(image))) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_of_a_linear_layers_loss(dtype: torch.dtype) -> None:
    """Of chunks of 384, 384 and 232 rows, as near to float64 as one chunk's, and a rounding; 3 products a chunk."""
    x, weight = (torch.randn(n, 256, device="cuda", dtype=dtype, requires_grad=True) for n in (1000, 5000))
    bias = torch.randn(5000, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(5000, (1000,), device="cuda")
    target[::7] = -100

    def gradients(rows: int | None, *leaves: torch.Tensor) -> list[torch.Tensor]:
        return list(
            torch.autograd.grad(1000 * LinearCrossEntropyLoss(chunk_rows=rows)(*leaves[:2], target, leaves[2]), leaves)
        )

    wide = gradients(1000, *(t.detach().double().requires_grad_() for t in (x, weight, bias)))
    for got, one, exact in zip(gradients(384, x, weight, bias), gradients(1000, x, weight, bias), wide, strict=True):
        assert got.dtype == dtype
        error, allowed = (got - exact).abs().amax(), (one - exact).abs().amax()
        assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.abs().amax()


def test_logits_are_never_whole() -> None:
    """8192 rows of 32000 classes would be 512 MB in bfloat16: a step takes less than a quarter of that."""
    x = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(32000, (8192,), device="cuda")
    loss = LinearCrossEntropyLoss()
    loss(x, weight, target).backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss(x, weight, target).backward()
    assert torch.cuda.max_memory_allocated() - before < 128 * 2**20
