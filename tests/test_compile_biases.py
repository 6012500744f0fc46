"""Biases of convolutions are ops of the graph, and of the regions behind them, which store the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_graphs import graph_of, regions_in
from test_compile_cost import Shaped, planned
from torch import Tensor, nn
from torch._inductor import config
from torch.fx import Graph

from benchmarks.roundings import assert_near
from shardfuse.compile import report
from shardfuse.compile.convolution_biases import add_biases

aten: Any = torch.ops.aten
ALL = {"shardfuse.take": "all"}


class NormBehind(nn.Module):
    """A ConvNeXt's: the LayerNorm of what a convolution with a bias gives."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x).permute(0, 2, 3, 1))


def convolutions_of(graph: Graph) -> list[torch.fx.Node]:
    return graph.find_nodes(op="call_function", target=aten.convolution.default)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv1d(3, 5, 3),
        lambda: nn.Conv2d(4, 6, 3, groups=2),
        lambda: nn.Conv3d(2, 3, 1),
        lambda: nn.ConvTranspose2d(3, 5, 3, stride=2),
    ],
)
def test_a_bias_is_added_by_an_op_of_its_own(make: Any) -> None:
    layer = make()
    x = torch.randn(2, layer.in_channels, *[5] * (layer.weight.ndim - 2))
    gm = graph_of(lambda x, w, b: nn.functional.relu(_as(layer, x, w, b)), [x, layer.weight, layer.bias])
    wide = layer.double()(x.double()).relu()
    eager = layer.float()(x).relu()
    assert add_biases(gm.graph, only_gpu=False) == 1
    gm.graph.lint()
    gm.recompile()
    (convolution,) = convolutions_of(gm.graph)
    assert convolution.args[2] is None
    (biased,) = convolution.users
    assert biased.target is aten.add.Tensor
    assert biased.meta["val"].stride() == convolution.meta["val"].stride()
    assert_near(gm(x, layer.weight, layer.bias), wide, eager)
    assert add_biases(gm.graph, only_gpu=False) == 0, "nothing is left to do"


def _as(layer: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_what_is_rounded_once_stays(dtype: torch.dtype) -> None:
    """Its kernels add the bias before they round to 16 bits: another order overflows where this does not."""
    layer = nn.Conv2d(1, 2, 1).to(dtype)
    given = [torch.randn(1, 1, 2, 2, dtype=dtype), layer.weight, layer.bias]
    gm = graph_of(lambda x, w, b: _as(layer, x, w, b), given)
    assert add_biases(gm.graph, only_gpu=True) == 0
    assert add_biases(gm.graph, only_gpu=False) == (dtype is torch.float32)


@pytest.mark.parametrize("option", ["conv_1x1_as_mm", "max_autotune", "max_autotune_gemm"])
@pytest.mark.parametrize(
    ("layer", "stays"),
    [
        (nn.Conv2d(4, 4, 1), True),
        (nn.Conv1d(4, 4, 1), True),
        (nn.Conv2d(4, 4, 3), False),
        (nn.Conv2d(4, 4, 1, stride=2), False),
        (nn.Conv2d(4, 4, 1, padding=1), False),
        (nn.Conv2d(4, 4, 1, groups=2), False),
        (nn.ConvTranspose2d(4, 4, 1), False),
    ],
)
def test_a_convolution_that_may_become_a_product_keeps_its_bias(option: str, layer: Any, stays: bool) -> None:
    x = torch.randn(1, 4, *[6] * (layer.weight.ndim - 2))
    gm = graph_of(lambda x, w, b: _as(layer, x, w, b), [x, layer.weight, layer.bias])
    with config.patch({option: True}):
        assert add_biases(gm.graph, only_gpu=False) == (not stays)


def test_the_region_behind_a_convolution_adds_its_bias() -> None:
    model = NormBehind()
    names = ["convolution.weight", "convolution.bias", "norm.weight", "norm.bias"]

    def f(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    gm = graph_of(f, [torch.randn(2, 8, 5, 5), *(dict(model.named_parameters())[n] for n in names)])
    (region,) = regions_in(gm)
    ops = dict(region.ops)
    assert region.taken
    assert ops["var_mean"] == 1
    assert ops["view"] == 1, "of the bias"


def trained(x: Tensor, dy: Tensor, dtype: torch.dtype, compile: Any = lambda m: m) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = NormBehind().to(dtype)
    compile(model)(x.to(dtype)).backward(dy.to(dtype))
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_eager_torch_s_and_the_bias_is_not_kept_for_them() -> None:
    """The backward reads the sum, as without the pass: it does not ask for the bias, which may be another by then."""
    x, dy = torch.randn(2, 8, 5, 5), torch.randn(2, 5, 5, 8)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend="shardfuse", options=ALL, dynamic=False)

    report(clear=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = trained(x, dy, torch.float32, compiled)
    assert [dict(r.ops)["var_mean"] for r in report(clear=True).taken if r.graph == "forward"] == [1]
    wide, eager = trained(x, dy, torch.float64), trained(x, dy, torch.float32)
    for name, gradient in wide.items():
        assert_near(found[name].flatten(), gradient.flatten(), eager[name].flatten(), what=name)
    torch.manual_seed(0)
    model = NormBehind()
    assert any(t.shape == x.shape and torch.allclose(t, model.convolution(x), atol=1e-5) for t in kept)
    without = nn.functional.conv2d(x, model.convolution.weight, padding=1)
    assert not any(t.shape == x.shape and torch.allclose(t, without, atol=1e-5) for t in kept)


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_bias_may_change_before_a_second_backward(is_seen: bool) -> None:
    """Two losses, and a step on biases between their backwards, which autograd sees or does not."""

    def gradient(compile: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8, affine=False), nn.SiLU())
        first, second = torch.randn(2, 2, 3, 9, 9)
        bias: Any = model[0].bias
        step, run = torch.optim.SGD([bias], lr=0.1), compile(model)
        losses = run(first).square().sum(), run(second).square().sum()
        losses[0].backward()
        if is_seen:
            step.step()
        else:
            bias.data.add_(3.0)
        step.zero_grad()
        losses[1].backward()
        return bias.grad

    found = gradient(lambda m: torch.compile(m, backend="shardfuse", options=ALL, dynamic=False))
    assert torch.allclose(found, gradient(lambda m: m), rtol=1e-3, atol=1e-4)


def test_by_inductor() -> None:
    model, x = NormBehind(), torch.randn(2, 8, 5, 5)
    report(clear=True)
    with torch.no_grad():
        found = torch.compile(model, backend="shardfuse", options=ALL)(x)
        assert_near(found, NormBehind.forward(model.double(), x.double()), model.float()(x))
    assert [dict(r.ops)["var_mean"] for r in report(clear=True).taken] == [1]


def test_norms_of_what_a_convolution_gives_gain() -> None:
    """Of ConvNeXt, 64 x 96 x 56 x 56 with the bias that is stored: Inductor's 96 us; of what is given alone no more."""
    shape, bf16 = (64, 96, 56, 56), torch.bfloat16

    def norm(x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.permute(0, 2, 3, 1).float(), (96,)).bfloat16()

    def behind(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.conv2d(x, weight, groups=96) + bias[:, None, None]
        return y, norm(y)

    image: Shaped = (shape, bf16, (0, 2, 3, 1))
    cost, _ = planned(behind, image, ((96, 1, 1, 1), bf16), ((96,), bf16))
    assert cost.gains, str(cost)
    assert 60 < cost.inductor < 100
    cost, _ = planned(norm, image)
    assert cost.inductor < 35
