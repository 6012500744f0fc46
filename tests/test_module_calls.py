"""A module's call comes to its ``forward`` at once, but where somebody stands before it in torch.nn.Module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, fx
from torch.func import functional_call
from torch.nn import functional

from shardfuse.errors import ModuleArgumentError, ModuleInputError
from shardfuse.nn import AddLayerNorm, LayerNorm, RMSNorm, SwiGLU


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = RMSNorm(16), torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def warmed(module: torch.nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        y = module(x)
    return y


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, Model)


def test_a_leaf_of_torch_fx() -> None:
    model, x = Model(), drawn(4, 16)
    wanted = warmed(model, x)
    graph = Leaves().trace(model)
    assert [n.target for n in graph.nodes if n.op == "call_module"] == ["norm", "linear"]
    assert torch.equal(fx.GraphModule(model, graph)(x), wanted)


def test_another_call_in_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, seen = Model(), drawn(4, 16), list[str]()
    wanted = warmed(model, x)
    call: Callable[..., Tensor] = torch.nn.Module.__call__

    def noted(self: torch.nn.Module, *given: Tensor) -> Tensor:
        seen.append(type(self).__name__)
        return call(self, *given)

    monkeypatch.setattr(torch.nn.Module, "__call__", noted)
    assert torch.equal(model(x), wanted)
    assert seen == ["Model", "RMSNorm", "Linear"]


def test_a_subclass_that_has_another_call() -> None:
    class Twice(RMSNorm):
        def _call_impl(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
            return 2 * self.forward(x)

    x = drawn(4, 16)
    assert torch.equal(warmed(Twice(16), x), 2 * RMSNorm(16)(x))


def test_an_instance_that_has_another_forward() -> None:
    module, x = RMSNorm(16), drawn(4, 16)
    warmed(module, x)
    module.forward = lambda given: given + 1
    assert torch.equal(module(x), x + 1)


def test_what_torch_fx_traces_is_refused_with_a_way_out() -> None:
    with pytest.raises(ModuleInputError, match=r"x has type torch.fx.proxy.Proxy, .*: have is_leaf_module of a"):
        fx.symbolic_trace(torch.nn.Sequential(RMSNorm(16)))


def supplied_as_a_parameter(module: torch.nn.Module, name: str, value: Tensor) -> None:
    module._parameters[name] = torch.nn.Parameter(value)


def supplied_as_an_attribute(module: torch.nn.Module, name: str, value: Tensor) -> None:
    delattr(module, name)
    setattr(module, name, value)


def supplied_as_a_buffer(module: torch.nn.Module, name: str, value: Tensor) -> None:
    delattr(module, name)
    module.register_buffer(name, value)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", [LayerNorm, AddLayerNorm])
@pytest.mark.parametrize(
    "supplied", [supplied_as_a_parameter, supplied_as_an_attribute, supplied_as_a_buffer, None], ids=str
)
def test_a_parameter_that_a_norm_comes_to_have_counts(
    supplied: Callable[[torch.nn.Module, str, Tensor], None] | None,
    kind: type[torch.nn.Module],
    name: str,
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    """None: by ``torch.func.functional_call``."""
    module, given, value = kind(16), [drawn(4, 16)] * (1 + (kind is AddLayerNorm)), drawn(16)
    setattr(module, name, None)
    with mode():
        for _ in range(4):
            module(*given)
        if supplied is None:
            found = functional_call(module, {name: value}, tuple(given))
        else:
            supplied(module, name, value)
            found = module(*given)
        other = {"weight": value} if name == "weight" else {"bias": value}
        expected = functional.layer_norm(sum(given).double(), (16,), **{k: v.double() for k, v in other.items()})
        result = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(result.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["timer", "promises"])
def test_a_setting_of_another_kind_is_refused_and_changes_nothing(name: str) -> None:
    module, x = RMSNorm(16), drawn(4, 16)
    wanted = warmed(module, x)
    with pytest.raises(ModuleArgumentError, match=rf"RMSNorm\({name}=5\): expected a \w+ or None"):
        setattr(module, name, 5)
    assert torch.equal(module(x), wanted)


def test_a_profiler_names_modules() -> None:
    model, x = Model(), drawn(4, 16)
    warmed(model, x)
    with torch.profiler.profile(with_stack=True, with_modules=True) as seen:
        model(x)
    names = [event.name for event in seen.events()]
    if not any("nn.Module: Linear" in name for name in names):
        pytest.skip("torch 2.11's profiler shows no modules without a GPU, nor torch's own")
    assert any("nn.Module: RMSNorm" in name for name in names)


def test_a_module_whose_init_was_not_run_is_refused_as_torch_refuses_it() -> None:
    class Forgetful(RMSNorm):
        def __init__(self) -> None:
            pass

    with pytest.raises(AttributeError, match="'Forgetful' object has no attribute '_backward_hooks'"):
        Forgetful()(torch.ones(2, 4))


def test_hooks_of_a_module_that_has_run() -> None:
    module, x, seen = RMSNorm(16), drawn(4, 16), list[str]()
    wanted = warmed(module, x)
    handles = [
        module.register_forward_pre_hook(lambda m, given: seen.append("before")),
        module.register_forward_hook(lambda m, given, y: seen.append("behind")),
        torch.nn.modules.module.register_module_forward_hook(lambda m, given, y: seen.append("anywhere")),
    ]
    assert torch.equal(module(x), wanted)
    assert seen == ["before", "anywhere", "behind"]
    for handle in handles:
        handle.remove()
    assert torch.equal(module(x), wanted)
    assert len(seen) == 3


@pytest.mark.parametrize("module", [RMSNorm(16), SwiGLU(8)], ids=["RMSNorm", "SwiGLU"])
def test_a_product_behind_calls_that_recorded_nothing_is_made_once(
    module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``of_linear`` behind calls on tensors that require no gradient, while gradients are recorded."""
    for p in module.parameters():
        p.requires_grad_(False)
    x, weight = drawn(4, 16).bfloat16(), drawn(16, 16).requires_grad_()
    warmed(module, drawn(4, 16).bfloat16())
    products = list[tuple[int, ...]]()
    linear = torch.nn.functional.linear

    def noted(given: Tensor, *of: Tensor | None) -> Tensor:
        products.append(tuple(given.shape))
        return linear(given, *of)

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    y = module.of_linear(x, weight)
    assert len(products) == 1
    y.sum().backward()
    assert weight.grad is not None
