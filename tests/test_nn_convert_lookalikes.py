"""convert: norms and GELUs of other libraries' classes, by what they compute, forward and backward."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.roundings import assert_near
from shardfuse import nn as fused
from shardfuse.nn import convert, gated_mlp
from shardfuse.nn.trial import why_other

F = nn.functional


class T5LayerNorm(nn.Module):
    """An RMSNorm, which casts to 16 bits where its weight has them."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        unit = hidden_states * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            unit = unit.to(self.weight.dtype)
        return self.weight * unit


class CohereLayerNorm(T5LayerNorm):
    """Without a bias, computed in float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * x).to(hidden_states.dtype)


class FlowLayerNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps, self.elementwise_affine = 1e-6, True
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + self.eps)
        return x * self.weight + self.bias if self.elementwise_affine else x


class Gemma4RMSNorm(T5LayerNorm):
    """With a switch that says whether there is a weight."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.with_scale = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.pow(x.square().mean(-1, keepdim=True) + self.variance_epsilon, -0.5)
        return (x * self.weight.float() if self.with_scale else x).type_as(hidden_states)


class UnbiasedLayerNorm(FlowLayerNorm):
    """The variance is a sum over one less than there are features."""

    def forward(self, x: Tensor) -> Tensor:
        unit = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + self.eps)
        return unit * self.weight + self.bias


class NewGELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))


class GELUActivation(nn.Module):
    """By a function that is an attribute."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        return self.act(input)


class QuickGELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input * torch.sigmoid(1.702 * input)


class ScaledGELU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input) * self.scale


TAKEN: dict[str, tuple[Callable[[], nn.Module], type[nn.Module]]] = {
    "t5": (partial(T5LayerNorm, 24), fused.RMSNorm),
    "gemma4": (partial(Gemma4RMSNorm, 24), fused.RMSNorm),
    "cohere": (partial(CohereLayerNorm, 24), fused.LayerNorm),
    "flow": (partial(FlowLayerNorm, 24), fused.LayerNorm),
    "gelu": (partial(GELUActivation, F.gelu), fused.GELU),
    "gelu by tanh": (partial(GELUActivation, partial(F.gelu, approximate="tanh")), fused.GELU),
    "new gelu": (NewGELUActivation, fused.GELU),
}


def results(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = module(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], grad.to(y.dtype))]


NORMS = [kind for kind in TAKEN if "gelu" not in kind]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in NORMS), *((kind, torch.bfloat16) for kind in TAKEN)]
)
def test_what_computes_a_norm_or_a_gelu_under_another_name(kind: str, dtype: torch.dtype) -> None:
    """A GELU in float32 is that of ``test_nn_activations``."""
    make, expected = TAKEN[kind]
    theirs = make()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    done = convert(copy.deepcopy(theirs))
    assert type(done.model) is expected, str(done)
    assert list(done.model.state_dict()) == list(theirs.state_dict())
    mine, theirs = done.model.to(dtype), theirs.to(dtype)
    x, grad = torch.randn(5, 7, 24).to(dtype), torch.randn(5, 7, 24).to(dtype)
    wide = copy.deepcopy(mine).double()
    for found, right, own in zip(
        *(
            results(m, *(t.to(d) for t in (x, grad)))
            for m, d in ((mine, dtype), (wide, torch.float64), (theirs, dtype))
        ),
        strict=True,
    ):
        assert_near(found, right, own, terms=right.abs().amax(), signed=False, what=kind)
    assert done.undo()(x).dtype == dtype


class ClippedGELU(nn.Module):
    def __init__(self, most: float) -> None:
        super().__init__()
        self._most = most

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x).clamp(max=self._most)


class NanSafeGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x).nan_to_num()


class NanSafeRMSNorm(T5LayerNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).nan_to_num(0.0, 1e30, -1e30)


LEFT: dict[str, tuple[nn.Module, str]] = {
    "t5 in 16 bits": (T5LayerNorm(8).bfloat16(), "casts float32 inputs to the type of its weight"),
    "unbiased": (UnbiasedLayerNorm(8), "something else than an RMSNorm or LayerNorm"),
    "quick": (QuickGELUActivation(), "something else than a GELU"),
    "clipped far out": (ClippedGELU(1e3), "something else than a GELU: it gives another result of float32 numbers of"),
    "without NaNs": (NanSafeGELU(), "another result of float32 numbers of size 1 and a NaN"),
    "a norm without NaNs": (NanSafeRMSNorm(8), "another result of float32 numbers of size 1 and a NaN"),
    "a scale of 1": (ScaledGELU(), "its forward reads scale, which a GELU"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_only_looks_alike_is_left(kind: str) -> None:
    module, reason = LEFT[kind]
    done = convert(nn.Sequential(module))
    assert not done.replaced
    assert reason in done.left[0].reason


def test_a_norm_of_16_bits_that_keeps_the_inputs_type_is_replaced() -> None:
    """Where float32 comes in, as behind a layer that is kept in float32, float32 goes out."""
    x = torch.randn(3, 8)
    module = CohereLayerNorm(8).bfloat16()
    found = convert(copy.deepcopy(module)).model
    assert type(found) is fused.LayerNorm
    torch.testing.assert_close(found(x), module(x))


@pytest.mark.parametrize("kind", [kind for kind in TAKEN if kind not in NORMS])
def test_a_gelu_is_the_one_that_it_was(kind: str) -> None:
    make, _ = TAKEN[kind]
    x, grad = torch.randn(5, 24), torch.randn(5, 24)
    by_hand = fused.GELU("none" if kind == "gelu" else "tanh")
    for found, wanted in zip(results(convert(make()).model, x, grad), results(by_hand, x, grad), strict=True):
        assert torch.equal(found, wanted)


class Llama4TextMLP(nn.Module):
    """Its activation is called activation_fn, not act_fn."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.activation_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation_fn(self.gate_proj(x)) * self.up_proj(x))


def test_a_gated_mlp_whose_activation_has_another_name() -> None:
    theirs, x = Llama4TextMLP(nn.SiLU()), torch.randn(3, 8)
    done = convert(copy.deepcopy(theirs))
    assert isinstance(done.model, fused.GatedMLP)
    torch.testing.assert_close(done.model(x), theirs(x))
    assert "its activation_fn is neither SiLU nor GELU" in convert(Llama4TextMLP(nn.ReLU())).left[0].reason
    unnamed = Llama4TextMLP(nn.SiLU())
    unnamed.gate, unnamed.activation_fn = unnamed.activation_fn, None
    assert "not a module called act_fn or activation_fn" in convert(unnamed).left[0].reason


class ScaledMLP(Llama4TextMLP):
    def __init__(self, scale: float) -> None:
        super().__init__(nn.SiLU())
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_gated_mlps_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []

    def counted(module: nn.Module, *given: Any) -> str | None:
        tried.append(module)
        return why_other(module, *given)

    monkeypatch.setattr(gated_mlp, "why_other", counted)
    model = nn.Sequential(*(Llama4TextMLP(nn.SiLU()) for _ in range(3)), ScaledMLP(1.0), ScaledMLP(2.0))
    done = convert(model)
    assert [r.name for r in done.replaced] == ["0", "1", "2"]
    assert "its forward reads scale, which a GatedMLP would not follow" in done.left[0].reason
    assert "another result" in done.left[1].reason
    assert len(tried) == 3


class ScaledSiLU(nn.SiLU):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


@pytest.mark.parametrize("most", [7.0, 1e3])
def test_a_gated_mlp_whose_activation_is_clipped_is_left(most: float) -> None:
    class Clipped(Llama4TextMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.activation_fn(self.gate_proj(x)).clamp(max=most) * self.up_proj(x))

    done = convert(nn.Sequential(Clipped(nn.SiLU())))
    assert not done.replaced
    assert "it gives another result" in done.left[0].reason


def test_a_gated_mlp_that_a_caller_may_change_is_left() -> None:
    """Its replacement would go on as before."""
    scaled, by_activation = ScaledMLP(1.0), Llama4TextMLP(ScaledSiLU())
    assert "reads scale," in convert(scaled).left[0].reason
    assert "reads activation_fn.inplace, activation_fn.scale," in convert(by_activation).left[0].reason


class OlderLlamaMLP(Llama4TextMLP):
    """As Hugging Face had it: what it computes follows a number of the model's config, which anyone may set."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.config = SimpleNamespace(pretraining_tp=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.pretraining_tp > 1:
            return torch.stack([super(OlderLlamaMLP, self).forward(part) for part in x.chunk(2)]).sum(0)
        return super().forward(x)


def test_a_gated_mlp_that_follows_a_config_is_left_and_may_be_put_in_by_hand() -> None:
    mlp, x = OlderLlamaMLP(), torch.randn(4, 8)
    (left,) = convert(nn.Sequential(mlp)).left
    assert "reads config, which a GatedMLP would not follow: if nothing changes that, put a GatedMLP" in left.reason
    by_hand = fused.GatedMLP(mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    torch.testing.assert_close(by_hand(x), mlp(x))


NO_AFFINE: dict[str, Callable[[], nn.Module]] = {
    "RMSNorm": lambda: nn.RMSNorm(8, 1e-6, elementwise_affine=False),
    "LayerNorm": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "GroupNorm": lambda: nn.GroupNorm(2, 8, affine=False),
    "BatchNorm1d": lambda: nn.BatchNorm1d(8, affine=False),
}


@pytest.mark.parametrize("is_parameter", [True, False], ids=["a parameter", "a tensor"])
@pytest.mark.parametrize("name", NO_AFFINE)
def test_a_norm_without_affine_that_was_given_a_weight(name: str, is_parameter: bool) -> None:
    made, x = NO_AFFINE[name](), torch.randn(4, 8)
    weight = torch.arange(1.0, 9.0)
    if is_parameter:
        made.weight = nn.Parameter(weight)
    else:
        del made.weight
        made.weight = weight
    wanted = made(x)
    done = convert(made)
    assert done.left[0].reason == "it holds weight"
    assert torch.equal(done.model(x), wanted)
