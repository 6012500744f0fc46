"""Biases of convolutions are ops of the graph, and of the regions behind them; a backward adds them anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_graphs import graph_of, regions_in
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from benchmarks.model_dry import by_ops
from benchmarks.roundings import assert_near
from shardfuse.compile import report
from shardfuse.compile.backend import patches
from shardfuse.compile.convolution_biases import add_biases
from shardfuse.compile.joint_pass import JointPass

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


def test_on_a_cpu_it_is_done_where_all_regions_are_taken() -> None:
    layer = nn.Conv2d(4, 4, 3)
    gm = graph_of(lambda x, w, b: _as(layer, x, w, b), [torch.randn(1, 4, 6, 6), layer.weight, layer.bias])
    JointPass("auto")(gm.graph)
    JointPass("none")(gm.graph)
    assert convolutions_of(gm.graph)[0].args[2] is not None
    JointPass("all")(gm.graph)
    assert convolutions_of(gm.graph)[0].args[2] is None


@pytest.mark.parametrize("option", ["conv_1x1_as_mm", "max_autotune", "max_autotune_gemm"])
def test_a_convolution_that_may_become_a_product_keeps_its_bias(option: str) -> None:
    for size in (1, 3):
        layer = nn.Conv2d(4, 4, size)
        gm = graph_of(
            lambda x, w, b, layer=layer: _as(layer, x, w, b), [torch.randn(1, 4, 6, 6), layer.weight, layer.bias]
        )
        with config.patch({option: True}):
            assert add_biases(gm.graph, only_gpu=False) == (size > 1)


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


def test_a_backward_adds_the_bias_anew_and_the_sum_is_not_stored() -> None:
    torch.manual_seed(0)
    model, x, dy = NormBehind(), torch.randn(2, 8, 5, 5), torch.randn(2, 5, 5, 8)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found_y = torch.compile(model, backend=by_ops, dynamic=False)(x)
    found_y.backward(dy)
    found = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    model(x).backward(dy)
    eager = {n: p.grad for n, p in model.named_parameters()}
    wide = NormBehind().double()
    wide.load_state_dict({n: p.double() for n, p in model.state_dict().items()})
    wide(x.double()).backward(dy.double())
    for name, p in wide.named_parameters():
        assert p.grad is not None
        assert_near(found[name].flatten(), p.grad.flatten(), eager[name].flatten(), what=name)
    without = nn.functional.conv2d(x, model.convolution.weight, padding=1)
    images = [t for t in kept if t.shape == without.shape and t is not x]
    assert any(torch.allclose(t, without, atol=1e-5) for t in images)
    biased = without + model.convolution.bias[:, None, None]
    assert not any(torch.allclose(t, biased, atol=1e-5) for t in images)


def test_by_inductor_with_a_pass_of_the_caller_s_before() -> None:
    class Counting(CustomGraphPass):
        def __init__(self) -> None:
            self.seen: list[bool] = []

        def __call__(self, graph: Graph) -> None:
            self.seen += [n.args[2] is None for n in convolutions_of(graph)]

        def uuid(self) -> object:
            return b"counting"

    model, x, own = NormBehind(), torch.randn(2, 8, 5, 5), Counting()
    report(clear=True)
    with config.patch(joint_custom_pre_pass=own), torch.no_grad():
        found = torch.compile(model, backend="shardfuse", options=ALL)(x)
        assert_near(found, NormBehind.forward(model.double(), x.double()), model.float()(x))
    assert own.seen == [False]
    assert [dict(r.ops)["var_mean"] for r in report(clear=True).taken] == [1]


def test_its_identity_is_that_of_the_other_pass() -> None:
    """One that finds a graph in torch's cache has both in its key."""
    found = patches(None, ALL)
    assert found["joint_custom_pre_pass"].uuid() == found["post_grad_custom_post_pass"].uuid()
