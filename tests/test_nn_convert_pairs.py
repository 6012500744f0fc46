"""convert, of a GroupNorm with a SiLU behind it in a Sequential: one kernel, and still two modules."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn import functional
from torch_answers import compare
from torch_gradients import with_gradients

from shardfuse import nn as fused
from shardfuse.errors import PromiseError
from shardfuse.nn import FusionTimer, convert, promise

SHAPE = (3, 8, 4, 5)


def block() -> nn.Sequential:
    return nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 1))


def made(build: Callable[[], nn.Module] = block) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    return model


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ran(call: Callable[[], object]) -> list[str]:
    """Which of the two were run: fusions of norms, and torch's SiLU."""
    with profile() as found:
        call()
    names = [e.name for e in sorted(found.function_events, key=lambda event: event.time_range.start)]
    return [name for name in names if name in ("shardfuse::GroupNorm", "shardfuse::GroupNorm backward", "aten::silu")]


def answer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (functional.silu(functional.group_norm(x, 4, weight, bias)),)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pair_is_one_kernel_of_torchs_numbers(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    model = made(lambda: nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(inplace=True)))
    model.to(dtype)
    x, dy = (normal(*SHAPE, seed=k).to(dtype).to(memory_format=memory_format) for k in (1, 2))
    weight, bias = (p.detach().clone() for p in model.parameters())
    convert(model)
    for _ in range(2):
        model.zero_grad()
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        result = model(given)
        result.backward(dy)
        found = [result.detach(), given.grad, *(p.grad for p in model.parameters())]
        for k, (got, want) in enumerate(zip(found, with_gradients(answer, [x, weight, bias], [dy]), strict=True)):
            compare(f"result or gradient {k}", got, want)
        assert result.is_contiguous(memory_format=memory_format)
    assert ran(lambda: model(x.clone().requires_grad_()).backward(dy)) == [
        "shardfuse::GroupNorm",
        "shardfuse::GroupNorm backward",
    ]


class Net(nn.Module):
    """Of blocks as diffusion models have them: one activation for all, a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.SiLU()
        self.enter = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), act)
        self.block = nn.Sequential(nn.GroupNorm(4, 8), act, nn.Conv2d(8, 8, 1), act, nn.GroupNorm(2, 8), act)
        self.again = self.block
        self.plain = nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.again(self.block(self.enter(x))))


def test_what_is_reported_and_what_undo_gives_back(caplog: pytest.LogCaptureFixture) -> None:
    model = made(Net)
    same, modules, state = copy.deepcopy(model), dict(model.named_modules()), list(model.state_dict())
    with caplog.at_level(logging.INFO, "shardfuse.nn.convert"):
        done = convert(model)
    assert [(j.name, j.norms) for j in done.joined] == [("enter", ("1",)), ("block", ("0", "4"))]
    assert all(j.module is modules[j.name] is model.get_submodule(j.name) for j in done.joined)
    line = "block: GroupNorm and SiLU in one kernel, at 0, 4"
    assert line in [r.message for r in caplog.records]
    assert line in str(done).splitlines()
    assert not done.left
    assert list(model.state_dict()) == state
    assert isinstance(model.block, nn.Sequential)
    x = normal(2, 3, 4, 4)
    torch.testing.assert_close(model(x), same(x))
    norm, block_ran = "shardfuse::GroupNorm", ["shardfuse::GroupNorm", "aten::silu", "shardfuse::GroupNorm"]
    assert ran(lambda: model(x)) == [norm, *block_ran, *block_ran, norm, "aten::silu"]
    assert not convert(model).joined, "a second conversion finds nothing"
    assert done.undo() is model
    assert all(m is modules[name] and type(m) is type(same.get_submodule(name)) for name, m in model.named_modules())
    assert torch.equal(model(x), same(x))


def test_one_that_is_called_by_itself_gives_what_it_gave() -> None:
    """As blocks do that scale and shift what a norm in a Sequential gives, and go on with the rest of it."""
    model, same, x = made(), made(), normal(*SHAPE)
    convert(model)
    assert ran(lambda: model(x)) == ["shardfuse::GroupNorm"]
    torch.testing.assert_close(model[0](x), same[0](x))
    torch.testing.assert_close(model[1:](model[0](x) * 2 + 1), same[1:](same[0](x) * 2 + 1))
    torch.testing.assert_close(model[:2](x), same[:2](x))
    assert ran(lambda: model[:2](x)) == ["shardfuse::GroupNorm"]
    assert ran(lambda: model[1:](x)) == ["aten::silu"]


def seen_by(hook: Callable[[nn.Module, Callable[[Tensor], None]], object], model: nn.Module, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = hook(model, lambda t: seen.append(t.detach()))
    model(x)
    handle.remove()
    (found,) = seen
    return found


HOOKS = {
    "behind the norm": lambda model, see: model[0].register_forward_hook(lambda m, given, result: see(result)),
    "before the activation": lambda model, see: model[1].register_forward_pre_hook(lambda m, given: see(given[0])),
    "anywhere": lambda model, see: nn.modules.module.register_module_forward_hook(
        lambda m, given, result: see(result) if isinstance(m, nn.GroupNorm | fused.GroupNorm) else None
    ),
}


@pytest.mark.parametrize("place", HOOKS)
def test_hooks_see_what_is_in_between(place: str) -> None:
    model, same, x = made(), made(), normal(*SHAPE)
    convert(model)
    model(x)
    torch.testing.assert_close(seen_by(HOOKS[place], model, x), seen_by(HOOKS[place], same, x))
    assert ran(lambda: model(x)) == ["shardfuse::GroupNorm"], "once the hook is gone"


def test_changes_of_the_two_modules_are_followed() -> None:
    model, x = made(), normal(*SHAPE)
    convert(model)
    model(x)
    norm = model[0]
    norm.weight = nn.Parameter(torch.full((8,), 3.0))
    torch.testing.assert_close(model[:2](x), answer(x, norm.weight, norm.bias)[0])
    norm.bias = None
    torch.testing.assert_close(model[:2](x), functional.silu(functional.group_norm(x, 4, norm.weight)))
    norm.eps = 1.0
    torch.testing.assert_close(model[:2](x), functional.silu(functional.group_norm(x, 4, norm.weight, eps=1.0)))
    model.double()
    assert model(x.double()).dtype == torch.float64
    model.float()
    norm.activation = "silu"
    assert ran(lambda: model(x)) == ["shardfuse::GroupNorm", "aten::silu"], "silu of silu, as it is said"
    norm.activation = None
    model[1].forward = lambda x: x * 2
    torch.testing.assert_close(model[:2](x), functional.group_norm(x, 4, norm.weight, eps=1.0) * 2)
    model[1] = nn.Identity()
    assert ran(lambda: model(x)) == ["shardfuse::GroupNorm"]
    torch.testing.assert_close(model[:2](x), functional.group_norm(x, 4, norm.weight, eps=1.0))


def test_promises_and_timers_hold_for_a_pair() -> None:
    model, x = made(), normal(*SHAPE)
    convert(model)
    model(x)
    timer = FusionTimer().watch(model)
    model(x)
    assert timer.seconds() > 0
    promise(model, invariant="batch")
    with pytest.raises(PromiseError, match="'batch'"):  # which torch does not keep, on a CPU
        model(x)
    with pytest.raises(PromiseError, match="'batch'"):
        convert(made(), invariant="batch").model(x)


def copies(model: nn.Module) -> Sequence[nn.Module]:
    return copy.deepcopy(model), pickle.loads(pickle.dumps(model))


def test_copies_have_parameters_of_their_own() -> None:
    model, x = made(), normal(*SHAPE)
    convert(model)
    expected = model(x)
    for other in copies(model):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other[0].weight.zero_()
        assert not torch.equal(other(x), expected)
        assert torch.equal(model(x), expected)
        assert ran(lambda: other(x)) == ["shardfuse::GroupNorm"]  # noqa: B023


def test_it_is_traced_as_two_modules() -> None:
    model, same, x = made(), made(), normal(*SHAPE)
    convert(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), same(x))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), same(x))


class Named(nn.Sequential):
    pass


class Conditioned(nn.Sequential):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x * scale)


def test_what_is_not_joined_and_why() -> None:
    own = block()
    own.forward = lambda x: x
    hooked = block()
    hooked[1].register_forward_hook(lambda *_: None)
    parts = (nn.GroupNorm(4, 8), nn.SiLU())
    model = nn.ModuleDict(
        {
            "named": Named(*parts),
            "conditioned": Conditioned(*parts),
            "own": own,
            "hooked": hooked,
            "list": nn.ModuleList(parts),
        }
    )
    kinds = {name: type(m) for name, m in model.named_children()}
    done = convert(model)
    assert not done.joined
    assert {left.name: left.reason.partition(":")[0] for left in done.left} == {
        "named": "a class of its own",
        "conditioned": "a class of its own",
        "own": "its forward has been replaced in this one instance",
    }
    assert {name: type(m) for name, m in model.named_children()} == kinds
    assert len(done.replaced) == 5, "the norms alone"
