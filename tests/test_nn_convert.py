"""convert: what it replaces computes what it did, with the same parameters, and comes back."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from shardfuse import nn as fused
from shardfuse.nn import convert


class LlamaRMSNorm(nn.Module):
    """As Hugging Face's models have it."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)) * (
            1 + self.weight
        )


class MeanRMSNorm(LlamaRMSNorm):
    """It is none."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True))


class BrokenRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no input")


class MLP(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SumMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.GELU())
        self.vectors = nn.Sequential(
            nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6), LlamaRMSNorm(8), GemmaRMSNorm(8), MLP(nn.SiLU()), MLP(nn.GELU())
        )
        self.again = self.vectors[0]
        self.last = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.vectors(self.image(x).mean((2, 3)))))


KINDS = {
    "image.1": fused.BatchNorm2d, "image.2": fused.GroupNorm, "image.3": fused.GELU, "vectors.0": fused.LayerNorm,
    "vectors.1": fused.RMSNorm, "vectors.2": fused.RMSNorm, "vectors.3": fused.RMSNorm,
    "vectors.4": fused.GatedMLP, "vectors.5": fused.GatedMLP, "again": fused.LayerNorm, "last": fused.Softmax,
}  # fmt: skip


def randomised(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    return model


def test_a_model_before_and_after_and_back(caplog: pytest.LogCaptureFixture) -> None:
    model = randomised(Model())
    same = copy.deepcopy(model)
    before, modules = list(model.named_parameters()), dict(model.named_modules())
    state = list(model.state_dict())
    with caplog.at_level(logging.INFO, "shardfuse.nn.convert"):
        done = convert(model)
    assert done.model is model
    assert {r.name: type(r.replacement) for r in done.replaced} == KINDS
    assert model.again is model.vectors[0]
    assert len([r for r in caplog.records if "->" in r.message]) == len(KINDS)
    assert "vectors.2: " in str(done)
    assert model.vectors[3].zero_centered
    after = dict(model.named_parameters())
    assert list(model.state_dict()) == state
    assert all(after[name] is p for name, p in before)
    x = torch.randn(2, 3, 6, 6)
    results = []
    for m in (model, same):
        result = m(x)
        result.square().sum().backward()
        results.append(result)
    torch.testing.assert_close(*results)
    for (name, p), q in zip(model.named_parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.image[1].running_var, same.image[1].running_var)
    model.eval()
    assert done.undo() is model
    assert all(m is modules[name] for name, m in model.named_modules())
    assert not any(m.training for m in model.modules())
    torch.testing.assert_close(model(x), same.eval()(x))


def test_what_is_left_and_why() -> None:
    class OwnLayerNorm(nn.LayerNorm):
        pass

    hooked = nn.LayerNorm(4)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "own": OwnLayerNorm(4), "hooked": hooked, "dims": nn.RMSNorm((3, 4)), "implicit": nn.Softmax(),
            "mean": MeanRMSNorm(4), "broken": BrokenRMSNorm(4), "sum": SumMLP(nn.SiLU()), "relu": MLP(nn.ReLU()),
            "linear": nn.Linear(4, 4), "done": fused.LayerNorm(4),
        }
    )  # fmt: skip
    kept = dict(model.named_modules())
    done = convert(model)
    assert not done.replaced
    reasons = {left.name: left.reason for left in done.left}
    expected = {
        "own": "a class of its own", "hooked": "hooks", "dims": "2 dims", "implicit": "input's dims",
        "mean": "something else", "broken": "no input", "sum": "something else", "relu": "neither SiLU nor GELU",
    }  # fmt: skip
    assert reasons.keys() == expected.keys()
    assert all(part in reasons[name] for name, part in expected.items())
    assert dict(model.named_modules()) == kept


def test_a_model_that_is_replaced_itself_and_one_on_the_meta_device() -> None:
    norm = nn.LayerNorm(4, elementwise_affine=False).eval()
    done = convert(norm)
    assert isinstance(done.model, fused.LayerNorm)
    assert not done.model.training
    assert done.undo() is norm
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(4), LlamaRMSNorm(4), nn.BatchNorm1d(4))
    convert(model)
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    assert torch.equal(model[1].weight, torch.ones(4))
    assert model(torch.randn(3, 4)).isfinite().all()


def test_a_second_conversion_finds_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(4), MLP(nn.SiLU()))
    convert(model)
    done = convert(model)
    assert not done.replaced
    assert not done.left
