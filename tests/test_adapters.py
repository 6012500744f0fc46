"""Adapters against stubs that ask of them what the hosts' extension points ask."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch

from shardfuse import nn
from shardfuse.adapters import hub_layers, megatron_norms

DIM = 24


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    """A module of a host that is not installed."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def rows(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_norm(found: torch.nn.Module, own: torch.nn.Module) -> None:
    """Results and gradients of both, the second in float64."""
    x, dy = rows(1).requires_grad_(), rows(2)
    wide = x.detach().double().requires_grad_()
    y, right = found(x), own.double()(wide)
    y.backward(dy)
    right.backward(dy.double())
    torch.testing.assert_close(y.double(), right, atol=4e-6, rtol=4e-6)
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=4e-6, rtol=4e-6)


# --- torchtitan --------------------------------------------------------------------------------------------


class Configurable:
    """Of torchtitan: a nested ``Config`` builds the class that it stands in."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self) -> Any:
            return self.owner(self)

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config.owner = cls


class TitanRMSNorm(torch.nn.RMSNorm, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        normalized_shape: int
        eps: float = 1e-5
        elementwise_affine: bool = True

    def __init__(self, config: Any) -> None:
        super().__init__(config.normalized_shape, eps=config.eps, elementwise_affine=config.elementwise_affine)


class TitanLayerNorm(torch.nn.LayerNorm, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        normalized_shape: int
        eps: float = 1e-5
        elementwise_affine: bool = True

    def __init__(self, config: Any) -> None:
        super().__init__(config.normalized_shape, eps=config.eps, elementwise_affine=config.elementwise_affine)


def derive(source: Any, target: Any, **deltas: object) -> Any:
    names = {f.name for f in fields(target)}
    assert set(deltas) <= names
    return target(**{**{f.name: getattr(source, f.name) for f in fields(source) if f.name in names}, **deltas})


@dataclass
class Titan:
    """What was registered: the factory of each configuration's class."""

    factories: dict[type, Callable[[Any], Any]] = field(default_factory=dict)

    def override(self, *, target: type, exact: bool = False, description: str = "") -> Any:
        assert exact, "a norm of another form is not claimed"
        return lambda factory: self.factories.setdefault(target, factory)

    def override_named(self, name: str, *, target: type, exact: bool = False, description: str = "") -> Any:
        assert name.startswith("shardfuse")
        return self.override(target=target, exact=exact, description=description)


@pytest.fixture(params=["override", "override_named"])
def titan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Titan]:
    host = Titan()
    stub(monkeypatch, "torchtitan")
    stub(monkeypatch, "torchtitan.config", derive=derive, override=getattr(host, request.param))
    for name in ("torchtitan.models", "torchtitan.models.common"):
        stub(monkeypatch, name)
    stub(monkeypatch, "torchtitan.models.common.nn_modules", RMSNorm=TitanRMSNorm, LayerNorm=TitanLayerNorm)
    sys.modules.pop("shardfuse.adapters.torchtitan_norms", None)
    importlib.import_module("shardfuse.adapters.torchtitan_norms")
    yield host
    sys.modules.pop("shardfuse.adapters.torchtitan_norms", None)


def test_torchtitan_builds_norms_of_shardfuse(titan: Titan, caplog: pytest.LogCaptureFixture) -> None:
    for theirs in (TitanRMSNorm, TitanLayerNorm):
        cfg = theirs.Config(normalized_shape=DIM, eps=1e-3)
        with caplog.at_level(logging.INFO, "shardfuse.adapters"):
            made = titan.factories[theirs.Config](cfg).build()
        assert type(made).__name__ == f"Shardfuse{theirs.__name__.removeprefix('Titan')}"
        assert type(made).__name__ in caplog.text
        own = cfg.build()
        torch.nn.init.normal_(made.weight)
        own.load_state_dict(made.state_dict())
        check_norm(made, own)
        assert "shardfuse" in type(made).__module__
        bare = titan.factories[theirs.Config](theirs.Config(normalized_shape=DIM, elementwise_affine=False)).build()
        check_norm(bare, theirs.Config(normalized_shape=DIM, elementwise_affine=False).build())


# --- the hub's library --------------------------------------------------------------------------------------


class LlamaRMSNorm(torch.nn.Module):
    kernel_layer_name = "RMSNorm"

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, DIM))
        self.variance_epsilon = 1e-3

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def kernelize(model: torch.nn.Module, mapping: dict[str, dict[str, Any]], device: str) -> torch.nn.Module:
    """As ``kernels`` does it, with what it asks of a layer."""
    for module in model.modules():
        repository = mapping.get(getattr(module, "kernel_layer_name", ""), {}).get(device)
        if repository is None:
            continue
        hash(repository)
        layer = repository.load()
        assert layer.__init__ is torch.nn.Module.__init__, "a layer has no constructor"
        members = {name for name, _ in inspect.getmembers(layer)} - {n for n, _ in inspect.getmembers(torch.nn.Module)}
        assert members <= {"can_torch_compile", "has_backward"}
        own, theirs = (inspect.signature(c.forward).parameters.values() for c in (layer, type(module)))
        assert [p.kind for p in own] == [p.kind for p in theirs]
        assert layer.can_torch_compile
        assert layer.has_backward
        module.forward = MethodType(layer.forward, module)
    return model


def test_layers_of_the_hub_are_shardfuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    registered: dict[str, Any] = {}
    stub(monkeypatch, "kernels", register_kernel_mapping=registered.update)
    with caplog.at_level(logging.INFO, "shardfuse.adapters"):
        hub_layers.register("cpu")
        model = kernelize(torch.nn.Sequential(LlamaRMSNorm()), registered, "cpu")
    assert "registered on cpu: RMSNorm" in caplog.text
    assert "layers named RMSNorm run shardfuse.adapters.hub_layers.RMSNorm" in caplog.text
    check_norm(model, torch.nn.Sequential(LlamaRMSNorm()))
    assert not kernelize(torch.nn.Sequential(LlamaRMSNorm()), hub_layers.mapping("cuda"), "cpu")[0].__dict__.get(
        "forward"
    ), "another device keeps its own"
    assert model(rows().bfloat16()).dtype == LlamaRMSNorm()(rows().bfloat16()).dtype == torch.float32
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows()), LlamaRMSNorm()(rows()), atol=1e-6, rtol=1e-5)


# --- Megatron ----------------------------------------------------------------------------------------------


@dataclass
class TransformerConfig:
    normalization: str = "RMSNorm"
    layernorm_zero_centered_gamma: bool = False
    sequence_parallel: bool = False
    memory_efficient_layer_norm: bool = False
    use_cpu_initialization: bool = True
    params_dtype: torch.dtype = torch.float32


class TheirNorm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()


class SpecProvider:
    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return TheirNorm


@pytest.fixture
def undo() -> Iterator[Callable[[], None]]:
    put_back = megatron_norms.patch(SpecProvider)
    yield put_back
    put_back()


def test_a_spec_provider_makes_norms_of_shardfuse(undo: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardfuse.adapters"):
        build = SpecProvider().layer_norm(rms_norm=True)
        made = build(config=TransformerConfig(sequence_parallel=True), hidden_size=DIM, eps=1e-3)
    assert isinstance(made, nn.RMSNorm)
    assert made.weight.sequence_parallel is True
    assert "SpecProvider: RMSNorm" in caplog.text
    check_norm(made, torch.nn.RMSNorm(DIM, 1e-3))
    centred = build(config=TransformerConfig(layernorm_zero_centered_gamma=True), hidden_size=DIM, eps=1e-3)
    assert not centred.weight.detach().any()
    check_norm(centred, torch.nn.RMSNorm(DIM, 1e-3))
    layer = SpecProvider().layer_norm()(config=TransformerConfig("LayerNorm"), hidden_size=DIM, eps=1e-3)
    check_norm(layer, torch.nn.LayerNorm(DIM, 1e-3))
    undo()
    assert SpecProvider().layer_norm() is TheirNorm


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (TransformerConfig("L2Norm"), "it is a L2Norm"),
        (TransformerConfig("LayerNorm", layernorm_zero_centered_gamma=True), "its weight begins at 0"),
        (TransformerConfig(memory_efficient_layer_norm=True), "it keeps its output"),
    ],
)
def test_what_shardfuse_has_no_norm_for_is_theirs(
    config: TransformerConfig, why: str, undo: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shardfuse.adapters"):
        assert type(SpecProvider().layer_norm()(config=config, hidden_size=DIM, eps=1e-5)) is TheirNorm
    assert why in caplog.text
    assert SpecProvider().layer_norm(has_residual=True) is TheirNorm
