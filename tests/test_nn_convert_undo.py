"""What undoing a conversion hands back: what was assigned and hooked to the replacements since, not tensors alone."""

from __future__ import annotations

import copy

import pytest
import torch
from test_nn_convert import LlamaRMSNorm
from torch import nn
from torch.nn.utils import parametrize

from shardfuse.errors import ModuleChangedError
from shardfuse.nn import convert


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), LlamaRMSNorm(6), nn.GELU())


def test_settings_hooks_and_attributes_of_the_caller() -> None:
    model = make()
    originals = list(model)
    done, calls = convert(model), []
    assert len(done.replaced) == 4
    model[1].momentum, model[1].track_running_stats, model[1].eps = None, False, 0.5
    model[2].eps, model[2].tag = 0.25, "mine"
    model[3].variance_epsilon = 0.125
    handle = model[2].register_forward_hook(lambda *_: calls.append("after"))
    model[3].register_forward_pre_hook(lambda *_, **__: calls.append("before"), with_kwargs=True)
    x = torch.randn(8, 4)
    with torch.no_grad():
        expected = model(x)
    done.undo()
    assert [*model] == originals
    assert (model[1].momentum, model[1].track_running_stats, model[1].eps) == (None, False, 0.5)
    assert (model[2].eps, model[2].tag, model[3].variance_epsilon) == (0.25, "mine", 0.125)
    calls.clear()
    torch.testing.assert_close(model(x), expected)
    assert calls == ["after", "before"]
    handle.remove()
    model(x)
    assert calls == ["after", "before", "before"]


def test_a_module_that_is_as_it_was_made_gets_nothing() -> None:
    model = make()
    before = [copy.copy(vars(m)) for m in model]
    convert(model).undo()
    assert [list(vars(m)) for m in model] == [list(had) for had in before]
    for m, had in zip(model, before, strict=True):
        assert all(vars(m)[name] is value or vars(m)[name] == value for name, value in had.items())


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_replacement_that_torch_has_made_another_module_of_is_refused() -> None:
    model = make()
    done = convert(model)
    ours = list(model)
    parametrize.register_parametrization(model[2], "weight", Doubled())
    with pytest.raises(ModuleChangedError, match=r"2 is a ParametrizedLayerNorm, where convert made a LayerNorm"):
        done.undo()
    assert [*model] == ours, "nothing is undone then"
    parametrize.remove_parametrizations(model[2], "weight")
    assert type(done.undo()[2]) is nn.LayerNorm
