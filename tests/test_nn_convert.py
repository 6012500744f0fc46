"""convert: what it replaces computes what it did, with the same parameters, and comes back."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable

import numpy as np
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
        unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (unit * (1 + self.weight.float())).type_as(x)


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


def test_what_is_put_back_has_the_tensors_that_the_replacement_has_by_then() -> None:
    """A move to another dtype makes new buffers; loading with assign=True and to_empty() make new parameters."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4))
    done = convert(model)
    model.double()
    model(torch.randn(8, 4, dtype=torch.float64))
    model.load_state_dict({**model.state_dict(), "1.weight": torch.full((4,), 3.0)}, assign=True)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    done.undo()
    assert all(torch.equal(t, state[name]) and t.dtype == state[name].dtype for name, t in model.state_dict().items())
    assert state["0.running_mean"].dtype == torch.float64
    assert state["0.num_batches_tracked"] == 1
    with torch.device("meta"):
        done = convert(nn.Sequential(nn.LayerNorm(4)))
    done.model.to_empty(device="cpu")
    assert not done.undo()[0].weight.is_meta


def test_what_is_replaced_does_not_follow_from_the_defaults_of_the_caller() -> None:
    def found() -> list[type[nn.Module]]:
        return [type(r.replacement) for r in convert(nn.Sequential(LlamaRMSNorm(4), MLP(nn.SiLU()))).replaced]

    usual = found()
    assert len(usual) == 2
    with torch.device("meta"):
        assert found() == usual
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert found() == usual
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert found() == usual
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_second_conversion_finds_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(4), MLP(nn.SiLU()))
    convert(model)
    done = convert(model)
    assert not done.replaced
    assert not done.left


class DropoutMLP(MLP):
    def __init__(self, act: nn.Module, dropout: nn.Module | None) -> None:
        super().__init__(act)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        gated = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        gated = nn.functional.dropout(gated, 0.5, self.training) if self.dropout is None else self.dropout(gated)
        return self.down_proj(gated)


class OtherRMSNorm(LlamaRMSNorm):
    """An RMSNorm but for ``change``: what becomes of (module, x, the inverse of its root mean square)."""

    def __init__(self, change: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__(8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.change(self, x, torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon))


def noisy(module: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    return (x + torch.randn_like(x) * module.training) * scale.to(x.dtype) * module.weight


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


class ScaledRMSNorm(LlamaRMSNorm):
    """By a number that the caller may change later."""

    scale: float

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


LEFT: dict[str, tuple[nn.Module, str]] = {
    "dropout, a function": (DropoutMLP(nn.SiLU(), None), "in training"),
    "dropout, a child": (DropoutMLP(nn.SiLU(), nn.Dropout(0.5)), "dropout"),
    "dropout of nothing": (DropoutMLP(nn.GELU(), nn.Dropout(0.0)), "dropout"),
    "noise in training": (OtherRMSNorm(noisy), "in training"),
    "noise, made in evaluation": (OtherRMSNorm(noisy).eval(), "in training"),
    "detached": (OtherRMSNorm(lambda m, x, r: x * r.detach().to(x.dtype) * m.weight), "another gradient"),
    "float32 result": (OtherRMSNorm(lambda m, x, r: x * r * m.weight.float()), "it gives torch.float32"),
    "clamped": (OtherRMSNorm(lambda m, x, r: x.clamp(-20, 20) * r.to(x.dtype) * m.weight), "another result"),
    "other dims": (
        OtherRMSNorm(lambda m, x, r: (x * r.to(x.dtype) if x.ndim < 4 else x.flip(1)) * m.weight), "in 4 dims",
    ),
    "one row": (
        OtherRMSNorm(lambda m, x, r: x * r.to(x.dtype) * m.weight * (2 if x.shape[-2] == 1 else 1)), "another result",
    ),
    "a scale of 1": (ScaledRMSNorm(8), "its forward reads scale, which"),
    "a gate": (GatedRMSNorm(8), "one tensor alone"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_computes_something_else_at_times_is_left(case: str) -> None:
    torch.manual_seed(0)
    made, reason = LEFT[case]
    module = copy.deepcopy(made)
    state = torch.get_rng_state()
    done = convert(nn.Sequential(module))
    assert torch.equal(torch.get_rng_state(), state)
    assert not done.replaced or [r.name for r in done.replaced] == ["0.act_fn"]
    assert reason in next(left.reason for left in done.left if left.name == "0")
    assert done.model[0] is module


def test_what_a_norm_holds_beside_its_own_is_not_lost() -> None:
    with_child, with_buffer, with_forward = nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm1d(8)
    with_child.lora = nn.Linear(8, 8)
    with_buffer.register_buffer("count", torch.zeros(2))
    with_forward.forward = lambda x, inner=with_forward.forward: inner(x) * 2
    with_state_hook, marked, gated = nn.LayerNorm(8), nn.LayerNorm(8), MLP(nn.SiLU())
    with_state_hook.register_state_dict_post_hook(lambda *_: None)
    marked.no_weight_decay = gated.config = "a mark"
    model = nn.Sequential(with_child, with_buffer, with_forward, with_state_hook, marked, gated)
    keys = list(model.state_dict())
    done = convert(model)
    assert [r.name for r in done.replaced] == ["4", "5"]
    parts = ["holds lora", "holds count", "forward has been replaced", "hooks"]
    assert all(part in left.reason for left, part in zip(done.left, parts, strict=True))
    assert list(model.state_dict()) == keys
    assert model[4].no_weight_decay == model[5].config == "a mark"


def test_modules_take_their_input_by_the_name_that_torchs_have() -> None:
    x = torch.randn(3, 4)
    for name in ("LayerNorm", "BatchNorm1d", "GELU"):
        module, theirs = (getattr(m, name)(*() if name == "GELU" else (4,)) for m in (fused, nn))
        torch.testing.assert_close(module(input=x), theirs(input=x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        fused.GELU()(other=x)


def test_a_replacement_takes_its_input_by_the_name_that_it_had() -> None:
    class NamedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states)

    class NamedMLP(MLP):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states)

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for module, name in (
        (NamedRMSNorm(8), "hidden_states"),
        (NamedMLP(nn.SiLU()), "hidden_states"),
        (nn.GELU(), "input"),
    ):
        found = convert(copy.deepcopy(module)).model
        assert type(found) is not type(module)
        torch.testing.assert_close(found(**{name: x}), module(x))


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm(eps=": lambda: nn.LayerNorm(8, eps=torch.tensor(1e-5)),
    "LayerNorm(normalized_shape=(0,))": lambda: nn.LayerNorm(0),
    "BatchNorm1d(momentum=1.5)": lambda: nn.BatchNorm1d(8, momentum=1.5),
    "GELU(approximate='sigmoid')": lambda: nn.GELU("sigmoid"),
    "RMSNorm(eps=-0.5)": lambda: nn.RMSNorm(8, eps=-0.5),
}
"""By how the refusal begins."""


@pytest.mark.parametrize("refusal", REFUSED)
def test_what_torch_takes_and_the_replacement_refuses_is_left_with_the_refusal(refusal: str) -> None:
    module = REFUSED[refusal]()
    done = convert(nn.Sequential(nn.GELU(), module, nn.Softmax(-1)))
    assert [r.name for r in done.replaced] == ["0", "2"]
    assert done.model[1] is module
    (left,) = done.left
    assert left.name == "1"
    assert left.reason.startswith(f"it is refused: {refusal}")


def test_numbers_of_numpy_in_torchs_modules() -> None:
    x, n = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), np.int64(8)
    model = nn.Sequential(
        nn.LayerNorm(n, eps=np.float32(1e-5)), nn.RMSNorm(n), nn.GroupNorm(np.int64(2), n), nn.BatchNorm1d(n),
        nn.Softmax(np.int64(1)),
    )  # fmt: skip
    wanted = copy.deepcopy(model)(x)
    done = convert(model)
    assert len(done.replaced) == len(model), str(done)
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("affine", [True, False])
def test_an_rms_norm_without_eps_takes_torchs_in_each_call(affine: bool) -> None:
    """Torch takes that of the input's dtype, whatever the weight's was when the module was converted."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 1e-4
    module = nn.RMSNorm(8, elementwise_affine=affine)
    found = convert(copy.deepcopy(module)).model
    assert found.eps is None
    torch._dynamo.reset()
    again = torch.compile(found, backend="eager", fullgraph=True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        wanted = module.to(dtype)(x.to(dtype))
        torch.testing.assert_close(found.to(dtype)(x.to(dtype)), wanted)
        torch.testing.assert_close(again(x.to(dtype)), wanted)
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(found))(x.half()), found(x.half()))
