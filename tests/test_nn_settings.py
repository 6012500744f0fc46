"""A setting that is assigned to a module counts from the next call on, or is refused and changes nothing."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from shardfuse import DeviceMesh, nn
from shardfuse.errors import ModuleArgumentError, ModuleInputError, PlacementError, ShardfuseError
from shardfuse.nn import quantized

functional = torch.nn.functional


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def layer(size: int) -> torch.nn.Linear:
    return torch.nn.Linear(size, size)


MAKE: dict[str, Callable[..., torch.nn.Module]] = {
    "RMSNorm": partial(nn.RMSNorm, hidden_size=6),
    "AddRMSNorm": partial(nn.AddRMSNorm, hidden_size=6),
    "quantized.AddRMSNorm": partial(quantized.AddRMSNorm, hidden_size=6),
    "LayerNorm": partial(nn.LayerNorm, normalized_shape=6),
    "AddLayerNorm": partial(nn.AddLayerNorm, normalized_shape=6),
    "DropoutAddNorm": partial(nn.DropoutAddNorm, normalized_shape=6),
    "GroupNorm": partial(nn.GroupNorm, num_groups=2, num_channels=6),
    "BatchNorm2d": partial(nn.BatchNorm2d, num_features=6),
    "SyncBatchNorm": partial(nn.SyncBatchNorm, num_features=6),
    "Softmax": nn.Softmax,
    "LogSoftmax": nn.LogSoftmax,
    "GELU": nn.GELU,
    "GeGLU": nn.GeGLU,
    "SwiGLU": partial(nn.SwiGLU, features=6),
    "RotaryEmbedding": partial(nn.RotaryEmbedding, head_dim=8),
    "RotaryEmbedding, packed": partial(nn.RotaryEmbedding, head_dim=8, packed=(2, 1)),
    "CrossEntropyLoss": nn.CrossEntropyLoss,
    "LogProb": nn.LogProb,
    "LinearCrossEntropyLoss": nn.LinearCrossEntropyLoss,
}
VALUES: list[Any] = [
    *(-1, -1.0, 0, 0.5, 1, 2, 6, 2**70, None, float("nan"), float("inf"), "x", True, False, [], (2, 3), [2, 3]),
    *(torch.tensor(0.1), np.float32(0.25), np.int64(2), torch.float16),
]
OWN: dict[tuple[str, str], str] = {
    ("GroupNorm", "num_channels"): "whether groups divide it is asked in a call, before which these may be assigned",
    ("RotaryEmbedding", "head_dim"): "rotary_dim stays what it is, and may be more than that",
    ("RotaryEmbedding, packed", "head_dim"): "rotary_dim stays what it is, and may be more than that",
}
"""Settings of which another argument follows where the module is made, and does not where one is assigned."""
SETTINGS = [
    (name, setting)
    for name, make in MAKE.items()
    for setting in inspect.signature(getattr(make, "func", make).__init__).parameters
    if setting in dir(make()) and "bias" not in setting and setting != "parameters" and (name, setting) not in OWN
]


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_what_is_assigned_is_what_the_module_would_be_made_with(name: str, setting: str) -> None:
    """Of the same values the same ones are refused, and the others kept alike."""
    for value in VALUES:
        module = MAKE[name]()
        before = getattr(module, setting)
        try:
            wanted = getattr(MAKE[name](**{setting: value}), setting)
        except ShardfuseError:
            with pytest.raises(ModuleArgumentError, match=r"\((\w+)="):
                setattr(module, setting, value)
            assert getattr(module, setting) == before
            continue
        setattr(module, setting, value)
        assert repr(getattr(module, setting)) == repr(wanted), value


def test_all_settings_are_looked_at() -> None:
    assert {setting for _, setting in SETTINGS} >= {
        *("eps", "momentum", "base", "rotary_dim", "packed", "normalized_shape", "hidden_size", "num_features", "p"),
        *("track_running_stats", "zero_centered", "chunk_rows", "temperature", "mesh", "process_group"),
    }


def test_settings_that_a_class_has_of_another_are_fixed() -> None:
    module = nn.LogProb()
    with pytest.raises(ModuleArgumentError, match=r"LogProb\(reduction='sum'\): expected 'none', as of every LogProb"):
        module.reduction = "sum"
    module.reduction = "none"


def test_a_rotary_embedding_takes_its_constructors_defaults() -> None:
    q = drawn(1, 2, 4, 8)
    module = nn.RotaryEmbedding(8, rotary_dim=4)
    module(q)
    module.rotary_dim = None
    assert module.rotary_dim == 8
    torch.testing.assert_close(module(q), nn.RotaryEmbedding(8)(q))
    module.base = 100
    torch.testing.assert_close(module(q), nn.RotaryEmbedding(8, 100.0)(q))
    with pytest.raises(ModuleArgumentError, match=r"RotaryEmbedding\(base=-1.0\): expected a number above 0"):
        module.base = -1.0
    torch.testing.assert_close(module(q), nn.RotaryEmbedding(8, 100.0)(q))
    module.packed = [2, 1]
    both = drawn(1, 4, 4 * 8)
    for found, wanted in zip(module(both), nn.RotaryEmbedding(8, 100.0, packed=(2, 1))(both), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("is_called", [True, False], ids=["called", "not called"])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.AddLayerNorm, nn.DropoutAddNorm])
def test_another_normalized_shape_is_that_of_the_next_call(kind: type[torch.nn.Module], is_called: bool) -> None:
    module = kind(8, elementwise_affine=False).eval()
    given = [drawn(3, 4, 8)] * (1 if kind is nn.LayerNorm else 2)
    if is_called:
        module(*given)
    for shape in ([4, 8], (8,), (3, 4, 8)):
        module.normalized_shape = shape
        assert module.normalized_shape == tuple(shape)
        assert repr(module).startswith(f"{kind.__name__}({tuple(shape)}, ")
        for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            found = same(*given)
            normed = found if isinstance(found, Tensor) else found[0]
            torch.testing.assert_close(normed, functional.layer_norm(sum(given), shape))
    for shape in ((0,), (), None, "8", (8.0,)):
        with pytest.raises(ModuleArgumentError, match="normalized_shape="):
            module.normalized_shape = shape
    assert module.normalized_shape == (3, 4, 8)


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.AddRMSNorm])
@pytest.mark.parametrize("name", ["normalized_shape", "hidden_size"])
def test_another_size_of_an_rms_norm(kind: type[torch.nn.Module], name: str) -> None:
    module, count = kind(8, elementwise_affine=False), 1 if kind is nn.RMSNorm else 2
    module(*[drawn(3, 8)] * count)
    setattr(module, name, [4])
    assert module.hidden_size == 4
    assert module.normalized_shape == (4,)
    found = module(*[drawn(3, 4)] * count)
    normed = found if isinstance(found, Tensor) else found[0]
    torch.testing.assert_close(normed, functional.rms_norm(drawn(3, 4) * count, (4,), eps=1e-6))
    with pytest.raises(ModuleInputError, match="4 along dim -1"):
        module(*[drawn(3, 8)] * count)
    with pytest.raises(ModuleArgumentError, match=rf"{kind.__name__}\(hidden_size=\(3, 4\)\): expected one size"):
        setattr(module, name, (3, 4))
    assert module.normalized_shape == (4,)


def test_a_weight_of_the_shape_before_is_refused_in_a_call() -> None:
    """As by torch; one of the new shape is taken."""
    module, x = nn.LayerNorm(8), drawn(4, 8)
    module(x)
    module.normalized_shape = (4, 8)
    with pytest.raises(ModuleInputError, match=r"weight has shape \(8,\), expected"):
        module(x)
    module.weight, module.bias = (torch.nn.Parameter(drawn(4, 8)) for _ in range(2))
    torch.testing.assert_close(module(x), functional.layer_norm(x, (4, 8), module.weight, module.bias))


def test_other_numbers_of_channels_are_noticed() -> None:
    x = drawn(3, 12, 2)
    for module, name in ((nn.BatchNorm1d(6), "num_features"), (nn.GroupNorm(3, 6), "num_channels")):
        module(x[:, :6])
        setattr(module, name, 12)
        with pytest.raises(ModuleInputError, match=r"12 along dim 1|expected \(12,\)"):
            module(x[:, :6])
        module.weight, module.bias = (torch.nn.Parameter(torch.ones(12)) for _ in range(2))
        if name == "num_features":
            module.running_mean, module.running_var = torch.zeros(12), torch.ones(12)
            wanted = functional.batch_norm(x, None, None, module.weight, module.bias, training=True)
        else:
            wanted = functional.group_norm(x, 3, module.weight, module.bias)
        torch.testing.assert_close(module(x), wanted)


def test_numbers_of_numpy_are_taken_as_torch_takes_them() -> None:
    x = drawn(4, 8)
    for name, arguments in (
        ("LayerNorm", (np.int64(8), np.float32(0.5))),
        ("LayerNorm", ((np.int64(4), 8),)),
        ("RMSNorm", (np.int64(8), np.float64(0.5))),
        ("GroupNorm", (np.int64(2), np.int64(8))),
        ("BatchNorm1d", (np.int64(8), np.float32(0.5), np.float32(0.25))),
        ("Softmax", (np.int64(0),)),
    ):
        module, theirs = (getattr(kind, name)(*arguments) for kind in (nn, torch.nn))
        torch.testing.assert_close(module(x), theirs(x))
        torch.testing.assert_close(torch.compile(module, backend="eager")(x), theirs(x))
    module = nn.LayerNorm(8)
    module.eps = np.float32(0.5)
    assert type(module.eps) is float
    torch.testing.assert_close(module(x), functional.layer_norm(x, (8,), eps=0.5))


def test_on_a_mesh_another_shape_is_refused_where_it_does_not_fit_the_placements() -> None:
    mesh, x = DeviceMesh([0]), drawn(4, 8)
    module = nn.LayerNorm(8, elementwise_affine=False, mesh=mesh, input=Shard(-1))
    wanted = module(x)
    with pytest.raises(PlacementError, match="a norm over 2 dims"):
        module.normalized_shape = (4, 8)
    assert torch.equal(module(x), wanted)
    rows = nn.LayerNorm(8, elementwise_affine=False, mesh=mesh, input=Shard(0))
    rows(x)
    rows.normalized_shape = (4, 8)
    torch.testing.assert_close(rows(x[None]), functional.layer_norm(x[None], (4, 8)))


def test_groups_and_channels_are_assigned_one_after_the_other() -> None:
    """Neither fits the other in between, which a call asks."""
    norm = nn.GroupNorm(4, 8, affine=False)
    norm.num_channels = 6
    x = torch.randn(2, 6, 3, 3)
    with pytest.raises(ModuleArgumentError, match=r"num_channels=6\): expected a multiple of 4 groups"):
        norm(x)
    norm.num_groups = 3
    torch.testing.assert_close(norm(x), torch.nn.functional.group_norm(x, 3), rtol=1e-6, atol=1e-6)


def test_a_setting_is_assigned_in_a_compiled_function() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def step(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
        norm.momentum = 0.25
        return norm(x)

    norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 3, 3)
    step(norm, x)
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, 0.25 * x.mean([0, 2, 3]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.LinearCrossEntropyLoss])
@pytest.mark.parametrize("name", ["weight", "size_average", "reduce"])
def test_options_of_torchs_losses_are_refused_where_they_are_assigned(kind: type[torch.nn.Module], name: str) -> None:
    """They had no effect, and torch's loss weighs by a weight that is assigned."""
    loss = kind()
    for value in (drawn(4), torch.nn.Parameter(drawn(4)), True):
        with pytest.raises(ModuleArgumentError, match=rf"{kind.__name__}\({name}=.*\): expected None"):
            setattr(loss, name, value)
    setattr(loss, name, None)
    assert not loss.state_dict()


def test_a_loss_has_no_weights_of_classes() -> None:
    loss, logits, target = nn.CrossEntropyLoss(), drawn(3, 4), torch.tensor([0, 3, 1])
    with pytest.raises(ModuleArgumentError, match=r"CrossEntropyLoss\(weight=.*\): expected None"):
        loss.register_buffer("weight", drawn(4))
    for same in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert same.weight is None
        torch.testing.assert_close(same(logits, target), functional.cross_entropy(logits, target))


def test_a_loss_with_a_forward_of_its_own_may_have_a_weight() -> None:
    class Weighted(nn.CrossEntropyLoss):
        def __init__(self, weight: Tensor) -> None:
            super().__init__(reduction="none")
            self.weight, self.reduce = torch.nn.Parameter(weight), sum

        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            return self.reduce(super().forward(logits, target) * self.weight[target]) / self.weight[target].sum()

    weight, logits, target = drawn(4).abs(), drawn(3, 4), torch.tensor([0, 3, 1])
    torch.testing.assert_close(
        Weighted(weight)(logits, target).detach(), functional.cross_entropy(logits, target, weight)
    )


TORCHS = {
    "RMSNorm": ((4,), (3, 4)),
    "LayerNorm": ((4,), (3, 4)),
    "GroupNorm": ((2, 4), (3, 4, 2)),
    "BatchNorm1d": ((4,), (3, 4)),
    "BatchNorm2d": ((4,), (3, 4, 2, 2)),
    "SyncBatchNorm": ((4,), (3, 4, 2)),
    "Softmax": ((1,), (3, 4)),
    "LogSoftmax": ((1,), (3, 4)),
    "GELU": ((), (3, 4)),
    "CrossEntropyLoss": ((), (3, 4)),
    "Linear": ((4, 4), (3, 4)),
}
"""Of torch's modules the arguments and the shape of an input."""
ASSIGNED: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    0.5,
    4,
    (4,),
    (3, 4),
    "sum",
    "none",
    "tanh",
    0.01 + torch.arange(4.0),
]


def outcome(module: torch.nn.Module, x: Tensor) -> list[Tensor] | None:
    """The result and the state behind it; None where the call is refused."""
    target = (torch.tensor([3, 0, 1]),) if "Entropy" in type(module).__name__ else ()
    try:
        return [module(x, *target), *(t.double() for t in module.state_dict().values())]
    except Exception:  # noqa: BLE001 - anybody's
        return None


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", TORCHS)
def test_no_attribute_of_torchs_modules_is_ignored(name: str) -> None:
    """What is assigned has the effect that it has on torch's module, or is refused there or in the call."""
    arguments, shape = TORCHS[name]
    kind, theirs = getattr(nn, name), getattr(torch.nn, name)
    own = {key for key in dir(theirs(*arguments)) if key not in dir(torch.nn.Module())}
    for attribute in {*own, *inspect.signature(theirs).parameters} - {"device", "dtype"}:
        if attribute.startswith("_") or callable(getattr(theirs, attribute, None)):
            continue
        for value in ASSIGNED:
            for is_training in (True, False):
                module, wanted = (make(*arguments).train(is_training) for make in (kind, theirs))
                module.load_state_dict(wanted.state_dict())
                if name == "RMSNorm":
                    module.eps = wanted.eps
                try:
                    setattr(wanted, attribute, copy.deepcopy(value))
                    setattr(module, attribute, copy.deepcopy(value))
                except (TypeError, ShardfuseError):
                    continue
                right, found = outcome(wanted, drawn(*shape)), outcome(module, drawn(*shape))
                if right is not None and found is not None:
                    torch.testing.assert_close(found, right, msg=f"{attribute}={value!r}", rtol=1e-4, atol=1e-5)


def test_a_class_may_have_a_weight_of_its_own() -> None:
    class Weighted(nn.CrossEntropyLoss):
        weight = 0.5

    class Computed(nn.CrossEntropyLoss):
        @property
        def weight(self) -> float:
            return 3.0

    assert (Weighted().weight, Computed().weight) == (0.5, 3.0)
