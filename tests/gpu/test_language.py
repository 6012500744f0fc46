"""Random numbers drawn in kernels, inputs that kernels write over, attention's backward by torch's flash kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch_answers import assert_beside, assert_like

from benchmarks.roundings import assert_near
from shardfuse import DataType, FusionDefinition
from shardfuse.executor.options import Backend

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def drawn(kind: str, dtype: DataType, backend: Backend) -> torch.Tensor:
    """Of a seed and an offset that are said; under another input, so that a kernel draws."""
    with FusionDefinition(backend=backend) as fd:
        x = fd.define_tensor([300, 1000], contiguity=True, dtype=dtype)
        seed, offset = fd.define_scalar(7, DataType.Int), fd.define_scalar(40, DataType.Int)
        a, b = fd.define_scalar(-1.0, DataType.Double), fd.define_scalar(2.0, DataType.Double)
        op = fd.ops.uniform if kind == "uniform" else fd.ops.normal
        numbers = op(a, b, shape=[300, 1000], rng_seed=seed, rng_offset=offset, dtype=dtype)
        fd.add_output(fd.ops.add(x, numbers))
    (out,) = fd.execute([torch.zeros(300, 1000, dtype=dtype.torch, device=DEVICE)])
    if backend == "triton":
        assert fd.explain().kernels == 1
    return out


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16, DataType.Half, DataType.Double])
def test_uniform_numbers_are_those_of_torch_calls(dtype: DataType) -> None:
    assert torch.equal(drawn("uniform", dtype, "triton"), drawn("uniform", dtype, "torch"))


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.Double])
def test_normal_numbers_are_close_to_those_of_torch_calls(dtype: DataType) -> None:
    """A logarithm, a root and a cosine, of 2 x and -1: 4 roundings, and those of numbers as large as the largest."""
    eager = drawn("normal", dtype, "torch")
    assert_near(drawn("normal", dtype, "triton"), eager.double(), n=4, terms=eager.abs().amax().expand_as(eager))


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_and_its_backward(is_causal: bool) -> None:
    with FusionDefinition() as fd:
        q, k, v, grad = (fd.define_tensor([2, 4, 128, 64], contiguity=True, dtype=DataType.BFloat16) for _ in range(4))
        p, causal = fd.define_scalar(0.0, DataType.Double), fd.define_scalar(is_causal, DataType.Bool)
        out, lse, seed, offset = fd.ops.sdpfa_fwd(q, k, v, dropout_p=p, is_causal=causal)
        grads = fd.ops.sdpfa_bwd(grad, q, k, v, out, lse, p, causal, seed, offset)
        for t in (out, *grads):
            fd.add_output(t)
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(2, 4, 128, 64, generator=generator).bfloat16().to(DEVICE) for _ in range(4)]
    found = fd.execute(inputs)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = functional.scaled_dot_product_attention(*leaves, is_causal=is_causal)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    assert_like(found, attention, *inputs)


def test_attention_drops_the_same_weights_backward() -> None:
    """With an identity for the values and the gradient, the output and the values' gradient are the weights kept."""
    with FusionDefinition() as fd:
        q, k, v, grad = (fd.define_tensor([2, 4, 64, 64], contiguity=True, dtype=DataType.BFloat16) for _ in range(4))
        out, lse, seed, offset = fd.ops.sdpfa_fwd(q, k, v, dropout_p=0.3)
        fd.add_output(out)
        fd.add_output(fd.ops.sdpfa_bwd(grad, q, k, v, out, lse, 0.3, None, seed, offset)[2])
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, 4, 64, 64, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    one = torch.eye(64, device=DEVICE).bfloat16().expand(2, 4, 64, 64).contiguous()
    found: list[torch.Tensor] = []
    for start in (3, 3, None):
        if start is not None:
            torch.cuda.manual_seed(start)
        kept, transposed = fd.execute([q, k, one, one])
        assert torch.equal(kept == 0, transposed.mT == 0), "one mask, forward and backward"
        assert_beside(kept, transposed.mT)  # each probability rounded to bfloat16 twice
        assert 0.25 < (kept == 0).double().mean() < 0.35
        found.append(kept)
    assert torch.equal(found[0], found[1]), "one seed, one mask"
    assert ((found[1] == 0) != (found[2] == 0)).double().mean() > 0.3, "and another for the next call"


@pytest.mark.parametrize(("rows", "columns"), [(4096, 1024), (1000, 5140), (256, 65536), (64, 262144)])
def test_the_stream_that_a_norm_adds_to_is_written_over(rows: int, columns: int) -> None:
    """Bitwise what two tensors give: no thread reads what another has written, 50 times."""
    with FusionDefinition() as fd, FusionDefinition() as apart:
        for each in (fd, apart):
            x, stream = (each.define_tensor([-1, columns], dtype=DataType.BFloat16, contiguity=True) for _ in range(2))
            total = each.ops.add(x, stream)
            mean = each.ops.mean(each.ops.mul(total, total), [1], keepdim=True)
            each.add_output(total, stream if each is fd else None)
            each.add_output(each.ops.mul(total, each.ops.rsqrt(each.ops.add(mean, 1e-6))))
    generator = torch.Generator().manual_seed(1)
    x, given = (torch.randn(rows, columns, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    expected = apart.execute([x, given])
    for _ in range(50):
        stream = given.clone()
        (normed,) = fd.execute([x, stream])
        assert torch.equal(stream, expected[0])
        assert torch.equal(normed, expected[1])
    assert fd.last_trace().count("copy_all(") == fd.explain().copies == 0
