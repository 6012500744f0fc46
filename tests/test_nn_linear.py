"""Linear layers of mixed precision: results and gradients against float64, and what is left to torch."""

from __future__ import annotations

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import R
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse import nn
from shardfuse.errors import ModuleInputError, PlacementError, SecondDerivativeError
from shardfuse.nn.functional import embedding, linear

SHAPE = (3, 5, 24)
ROWS, COLUMNS = 16, 24


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


def test_second_derivatives_are_refused() -> None:
    """First ones of create_graph=True are right."""
    tensors = drawn(torch.float32, torch.float64, bias=True)
    plain = torch.autograd.grad(linear(*tensors).sum(), tensors)
    first = torch.autograd.grad(linear(*tensors).sum(), tensors, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, first, strict=True))
    with pytest.raises(SecondDerivativeError):
        first[1].sum().backward()


def test_a_second_derivative_of_the_other_tensor_is_refused() -> None:
    """The gradient of x is made of the weight, that of the weight of x, or of a copy of it without gaps."""
    _, weight = drawn(torch.float32, torch.float64, bias=False)
    x = torch.randn(3, weight.shape[1], 5).transpose(1, 2).requires_grad_()
    for of, by in ((x, weight), (weight, x)):
        (first,) = torch.autograd.grad(linear(x, weight).sum(), of, create_graph=True)
        with pytest.raises(SecondDerivativeError):
            torch.autograd.grad(first.square().sum(), by, allow_unused=True)


def test_only_what_is_read_is_kept() -> None:
    """By the gradients that are asked for: a frozen weight's layer keeps no input."""
    for frozen, count in (("weight", COLUMNS * ROWS), ("input", 15 * COLUMNS)):
        x, weight = drawn(torch.bfloat16, torch.float32, bias=False)
        (weight if frozen == "weight" else x).requires_grad_(False)
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            y = linear(x, weight)
        assert kept == [count]
        with torch.no_grad():
            (x if frozen == "weight" else weight).add_(1)  # read by no gradient
        y.sum().backward()


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_asked_for(needs: tuple[bool, ...]) -> None:
    tensors = drawn(torch.float32, torch.float64, bias=True)
    given = [t.detach().clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    linear(*given).sum().backward()
    functional.linear(*[t.double() for t in tensors]).sum().backward()
    for t, g, need in zip(tensors, given, needs, strict=True):
        assert (g.grad is not None) == need
        if need:
            assert_near(g.grad.float(), t.grad.double(), n=2, rows=None, terms=sizes(g))


def sizes(tensor: Tensor) -> Tensor:
    """What a gradient's terms add up to at most: at most 72 of numbers below 5."""
    return torch.full(tensor.shape, 360.0, dtype=torch.float64)


def test_autocast_is_torch_s() -> None:
    x, weight, bias = drawn(torch.float32, torch.float32, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = linear(x, weight, bias), functional.linear(x, weight, bias)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_transforms_and_vectors_are_torch_s() -> None:
    x, weight = (t.detach() for t in drawn(torch.float32, torch.float64, bias=False))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x, w.float())

    found, expected = (torch.func.grad(lambda w, f=f: f(x, w).square().sum())(weight) for f in (linear, plain))
    assert torch.equal(found, expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        parts = [torch.autograd.forward_ad.unpack_dual(f(dual, weight.requires_grad_())) for f in (linear, plain)]
        assert torch.equal(parts[0].tangent, parts[1].tangent)
    one = x[0, 0].clone().requires_grad_()
    assert torch.equal(linear(one, weight), plain(one, weight))
    assert linear(x.to("meta"), weight.to("meta")).shape == (3, 5, 16)
    for empty in (weight[:0], weight):
        rows = x if empty.numel() == 0 else x[:0]
        linear(rows.requires_grad_(), empty).sum().backward()


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_torch_refuses_are_refused(dtype: torch.dtype) -> None:
    x, weight = drawn(torch.bfloat16, torch.float32, bias=False)
    with pytest.raises(ModuleInputError, match=rf"weight has dtype torch\.float32, expected {dtype}, that of input"):
        linear(x.detach().to(dtype), weight)
    with pytest.raises(ModuleInputError, match=rf"weight has dtype {dtype}, expected torch\.bfloat16, that of input"):
        linear(x, weight.detach().to(dtype))


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
    with pytest.raises(ModuleInputError, match="input has shape"):
        linear(x[..., :-1], weight)


def test_a_dtensor_among_plain_tensors_is_named_with_what_helps() -> None:
    """As in torch's own functions, all of them are DTensors, or none is."""

    def refuse(rank: int, size: int) -> None:
        mesh = make_mesh([size])
        x, table = (distribute(numbers(shape, 0), mesh, [R]) for shape in ((4, 6), (5, 6)))
        said = (
            "{}=R does not fit {}, of which {} is a plain tensor: make {} a DTensor too, by "
            "torch.distributed.tensor.distribute_tensor, or pass {}.to_local()"
        )
        layer, rows = nn.Linear(6, 3), torch.tensor([0, 4])
        with pytest.raises(PlacementError) as refused:
            layer(x)
        assert str(refused.value) == said.format("input", "linear", "weight", "weight", "input")
        with pytest.raises(PlacementError) as refused:
            embedding(rows, table, torch.bfloat16)
        assert str(refused.value) == said.format("weight", "embedding", "input", "input", "weight")
        assert torch.equal(layer(x.to_local()), functional.linear(x.to_local(), layer.weight, layer.bias))
        found = embedding(distribute(rows, mesh, [R]), table, torch.bfloat16)
        assert torch.equal(found.to_local(), table.to_local()[rows].bfloat16())
        with pytest.raises(ModuleInputError, match=r"linear: input has shape \(4, 6\), expected \[..., 4\]"):
            linear(x, distribute(numbers((3, 4), 0), mesh, [R]))

    run_ranks(2, refuse)
