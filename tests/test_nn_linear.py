"""Linear layers of mixed precision: results and gradients against float64, and what is left to torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse import nn
from shardfuse.nn.functional import linear

SHAPE = (3, 5, 24)


def drawn(dtype: torch.dtype, wide: torch.dtype, *, bias: bool) -> list[Tensor]:
    x, weight = torch.randn(SHAPE), torch.randn(16, SHAPE[-1])
    tensors = [x.to(dtype), weight.to(wide), *([torch.randn(16).to(wide)] if bias else [])]
    return [t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
def test_results_and_gradients(dtype: torch.dtype, wide: torch.dtype, bias: bool) -> None:
    tensors = drawn(dtype, wide, bias=bias)
    given = torch.randn(3, 5, 16).to(dtype)
    y = linear(*tensors)
    found = [y, *torch.autograd.grad(y, tensors, given)]
    rounded = [t.detach().to(dtype).double().requires_grad_() for t in tensors]  # multiplied in x's dtype
    reference = functional.linear(*rounded)
    expected = [reference, *torch.autograd.grad(reference, rounded, given.double())]
    magnitudes = [t.detach().abs().requires_grad_() for t in rounded]
    sizes = functional.linear(*magnitudes)
    terms = [sizes, *torch.autograd.grad(sizes, magnitudes, given.double().abs())]
    # A weight's gradient is what a matmul in x's dtype gives on a CPU, one rounding to that more than on a GPU.
    dtypes = [dtype, dtype, *[dtype] * (len(tensors) - 1)]
    for k, (f, e, t, d) in enumerate(zip(found, expected, terms, dtypes, strict=True)):
        assert f.dtype is (dtype if k < 2 else wide)
        assert_near(f.to(d), e.detach(), n=2, rows=None, terms=t.detach(), what=f"tensor {k}")


def test_the_weight_is_cast_once_and_kept() -> None:
    """Forward and backward read one copy: no cast is in the backward's graph but the gradient's."""
    x, weight = drawn(torch.bfloat16, torch.float32, bias=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
        linear(x, weight).sum().backward()
    casts = [e for e in seen.events() if e.name == "aten::_to_copy"]
    assert len(casts) == 2, "the weight's, and its gradient's"


def test_second_derivatives_are_those_of_torch() -> None:
    """They go through the weight in its own dtype."""
    tensors = drawn(torch.float64, torch.float64, bias=True)
    assert torch.autograd.gradgradcheck(linear, tensors)
    assert torch.autograd.gradcheck(linear, tensors)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_asked_for(needs: tuple[bool, ...]) -> None:
    tensors = drawn(torch.float64, torch.float64, bias=True)
    given = [t.detach().clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    linear(*given).sum().backward()
    functional.linear(*tensors).sum().backward()
    for t, g, need in zip(tensors, given, needs, strict=True):
        assert (g.grad is not None) == need
        if need:
            torch.testing.assert_close(g.grad, t.grad, rtol=1e-14, atol=1e-14)


def test_autocast_is_torch_s() -> None:
    x, weight, bias = drawn(torch.float32, torch.float32, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = linear(x, weight, bias), functional.linear(x, weight, bias)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_transforms_and_vectors_are_torch_s() -> None:
    x, weight = (t.detach() for t in drawn(torch.float64, torch.float64, bias=False))
    found = torch.func.grad(lambda w: linear(x, w).square().sum())(weight)
    expected = torch.func.grad(lambda w: functional.linear(x, w).square().sum())(weight)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    one = x[0, 0].clone().requires_grad_()
    assert torch.equal(linear(one, weight), functional.linear(one, weight))


def test_compiled_whole() -> None:
    x, weight = drawn(torch.bfloat16, torch.float32, bias=False)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(x, weight).float().sum(), (x, weight)) for f in (linear, compiled)]
    for own, other in zip(*grads, strict=True):
        assert_near(own, other.double(), other, n=1)


def test_a_module_is_torch_s() -> None:
    """Arguments, parameters and state dict; and numbers."""
    own, other = nn.Linear(24, 16, dtype=torch.float64), torch.nn.Linear(24, 16, dtype=torch.float64)
    other.load_state_dict(own.state_dict())
    x = torch.randn(SHAPE, dtype=torch.float64)
    torch.testing.assert_close(own(x), other(x), rtol=1e-14, atol=1e-14)
    assert repr(own) == repr(other)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight = drawn(torch.bfloat16, torch.float32, bias=False)
    with pytest.raises(RuntimeError, match="shapes"):
        linear(x[..., :-1], weight)
