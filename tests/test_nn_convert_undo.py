"""What undoing a conversion hands back: what was assigned and hooked to the replacements since, not tensors alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from test_nn_convert import LlamaRMSNorm
from torch import nn
from torch.nn.utils import parametrize, prune

from shardfuse.errors import ModuleChangedError
from shardfuse.nn import SyncBatchNorm, convert


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


def test_a_sync_batch_norm_is_replaced_where_calls_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks have batches of one size: nothing else would notice others."""
    done = convert(nn.Sequential(nn.SyncBatchNorm(4)))
    assert not done.replaced
    assert done.left[0].reason.startswith("ranks may have batches of different sizes")
    monkeypatch.setattr("shardfuse.nn.conversion.own_ledgers", object)
    given = nn.SyncBatchNorm(4, momentum=0.25)
    made = convert(nn.Sequential(given)).model[0]
    assert isinstance(made, SyncBatchNorm)
    assert (made.momentum, made.process_group) == (0.25, given.process_group)


def test_what_was_set_to_none_comes_back_as_none() -> None:
    model = make().eval()
    done = convert(model)
    model[2].bias = None
    model[1].running_mean = model[1].running_var = model[1].num_batches_tracked = None
    x = torch.randn(8, 4)
    expected = model(x)
    done.undo()
    assert model[2].bias is model[1].running_mean is None
    torch.testing.assert_close(model(x), expected)


def test_attributes_that_are_no_numbers_and_hooks_that_call_their_module() -> None:
    model = make()
    model[2].tag = np.ones(3)
    done, called = convert(model), []
    model[2].tag = np.zeros(3)
    model[2].register_load_state_dict_pre_hook(lambda module, *_: called.append(module))
    done.undo()
    del done
    assert not model[2].tag.any()
    model.load_state_dict(model.state_dict())
    assert called == [model[2]]


def test_pruning_is_taken_off_first() -> None:
    model = make()
    done = convert(model)
    prune.random_unstructured(model[2], "weight", 0.5)
    with pytest.raises(ModuleChangedError, match="2 is a LayerNorm without the parameter weight"):
        done.undo()
    prune.remove(model[2], "weight")
    x = torch.randn(8, 4)
    expected = model(x)
    torch.testing.assert_close(done.undo()(x), expected)
