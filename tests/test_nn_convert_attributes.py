"""convert: an attribute that a class's forward reads has its effect afterwards too, is refused, or keeps the class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

import pytest
import torch
from test_nn_convert import MLP, LlamaRMSNorm
from test_nn_convert_lookalikes import FlowLayerNorm, GELUActivation, Gemma4RMSNorm
from torch import Tensor, nn

from shardfuse import nn as fused
from shardfuse.errors import ModuleArgumentError
from shardfuse.nn import convert

F = nn.functional


class OfClassRMSNorm(LlamaRMSNorm):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class NoneOfClassRMSNorm(LlamaRMSNorm):
    scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.scale is None else y * self.scale


class CopiedDictRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.__dict__.copy().get("scale", 1.0)


class CompiledRMSNorm(LlamaRMSNorm):
    @torch.compile(backend="eager", dynamic=True)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class KeptRMSNorm(LlamaRMSNorm):
    @lru_cache(maxsize=1)  # noqa: B019
    def factor(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor()


class OfTypeRMSNorm(OfClassRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return LlamaRMSNorm.forward(self, x) * type(self).scale


class DefaultRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "scale", 1.0)


class DictRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.__dict__.get("scale", 1.0)


class VarsRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(self).get("scale", 1.0)


class PropertyRMSNorm(OfClassRMSNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.held = {"scale": 1.0}

    @property
    def scale(self) -> float:
        return self.held["scale"]


class SetPropertyRMSNorm(PropertyRMSNorm):
    @property
    def scale(self) -> float:
        return SCALES.get(id(self), 1.0)

    @scale.setter
    def scale(self, value: float) -> None:
        SCALES[id(self)] = value


SCALES: dict[int, float] = {}


class CachedRMSNorm(OfClassRMSNorm):
    @cached_property
    def scale(self) -> float:
        return 1.0


class HelpedRMSNorm(OfClassRMSNorm):
    """Its forward hands the module to a function."""

    def forward(self, x: Tensor) -> Tensor:
        return LlamaRMSNorm.forward(self, x) * scale_of(self)


def scale_of(module: OfClassRMSNorm) -> float:
    return module.scale


class TwoEpsRMSNorm(LlamaRMSNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.eps = self.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return (
            x
            * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + max(self.eps, self.variance_epsilon)).to(x.dtype)
            * self.weight
        )


class Scaled:
    """An object whose method computes by what it has."""

    k = 1.0

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x) * self.k


class KGELU(nn.Module):
    k = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) * self.k


class KMLP(MLP):
    k = 1.0

    def __init__(self) -> None:
        super().__init__(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.k


class OpGELU(nn.Module):
    """Its function has a name that shardfuse's GELU has for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.bind = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.bind(x)


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "class": (partial(OfClassRMSNorm, 8), "scale"),
    "None of a class": (partial(NoneOfClassRMSNorm, 8), "scale"),
    "type": (partial(OfTypeRMSNorm, 8), "scale"),
    "getattr": (partial(DefaultRMSNorm, 8), "scale"),
    "__dict__": (partial(DictRMSNorm, 8), "scale"),
    "vars": (partial(VarsRMSNorm, 8), "scale"),
    "a copy of __dict__": (partial(CopiedDictRMSNorm, 8), "scale"),
    "property": (partial(PropertyRMSNorm, 8), "held"),
    "property with a setter": (partial(SetPropertyRMSNorm, 8), "scale"),
    "cached property": (partial(CachedRMSNorm, 8), "scale"),
    "by a function": (partial(HelpedRMSNorm, 8), "scale"),
    "two eps": (partial(TwoEpsRMSNorm, 8), "eps"),
    "gelu": (KGELU, "k"),
    "a method of another object": (lambda: GELUActivation(Scaled().gelu), "act"),
    "a name of shardfuse's": (OpGELU, "bind"),
    "mlp": (KMLP, "k"),
}


@pytest.mark.parametrize("way", LEFT)
def test_a_class_that_reads_what_a_caller_may_assign_is_left_by_whatever_way_it_reads(way: str) -> None:
    make, name = LEFT[way]
    module = make()
    done = convert(nn.Sequential(module))
    assert done.model[0] is module
    (left,) = (left for left in done.left if left.name == "0")
    assert f"its forward reads {name}, which" in left.reason, left.reason


@pytest.mark.parametrize("kind", [CompiledRMSNorm, KeptRMSNorm])
def test_code_that_no_caller_assigns_is_no_attribute(kind: type[nn.Module]) -> None:
    done = convert(nn.Sequential(kind(8)))
    assert not done.left
    assert type(done.model[0]) is fused.RMSNorm


class MethodRMSNorm(LlamaRMSNorm):
    """As Llama's own code has it: the norm is a method, and a property says a size."""

    @property
    def size(self) -> int:
        return self.weight.shape[0]

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / self.size + self.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


class LaterRMSNorm(LlamaRMSNorm):
    """Its bias is None, and is added where there is one."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        normed = super().forward(x)
        return normed if self.bias is None else self.added(normed, self.bias)

    def added(self, normed: Tensor, bias: Tensor) -> Tensor:
        return normed + bias


class SubtractingRMSNorm(LaterRMSNorm):
    def added(self, normed: Tensor, bias: Tensor) -> Tensor:
        return normed - bias


class UnbiasedLayerNorm(LlamaRMSNorm):
    """Its bias is None, and may be one later, as that of shardfuse's."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.variance_epsilon)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


NORMS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "variance_epsilon": (LlamaRMSNorm, "variance_epsilon"),
    "a method": (MethodRMSNorm, "variance_epsilon"),
    "layer norm": (UnbiasedLayerNorm, "variance_epsilon"),
    "eps": (lambda size: FlowLayerNorm(size), "eps"),
}


@pytest.mark.parametrize("case", NORMS)
def test_eps_is_followed_by_the_name_that_it_had(case: str) -> None:
    make, name = NORMS[case]
    theirs, x = make(8), normal(4, 8)
    found: Any = convert(copy.deepcopy(theirs)).model
    assert isinstance(found, fused.RMSNorm | fused.LayerNorm)
    torch.testing.assert_close(found(x), theirs(x))
    for module in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        for value in (1.0, 0.5):
            setattr(module, name, value)
            setattr(theirs, name, value)
            assert getattr(module, name) == module.eps == value
            torch.testing.assert_close(module(x), theirs(x))
        module.eps = 2.0
        assert getattr(module, name) == 2.0
        with pytest.raises(ModuleArgumentError, match=r"eps=-1.0\): expected 0 or more"):
            setattr(module, name, -1.0)
        assert getattr(module, name) == module.eps == 2.0


@pytest.mark.parametrize(("make", "kind"), [(UnbiasedLayerNorm, fused.LayerNorm), (LaterRMSNorm, fused.RMSNorm)])
def test_a_bias_that_a_norm_comes_to_have_is_followed(make: Callable[[int], nn.Module], kind: type[nn.Module]) -> None:
    theirs, x = make(8), normal(4, 8)
    found: Any = convert(copy.deepcopy(theirs)).model
    assert type(found) is kind
    found.bias, theirs.bias = (nn.Parameter(torch.arange(8.0)) for _ in range(2))
    torch.testing.assert_close(found(x), theirs(x))


FIXED: dict[str, tuple[Callable[[], nn.Module], str, object]] = {
    "a function": (lambda: GELUActivation(F.gelu), "act", torch.relu),
    "a partial function": (lambda: GELUActivation(partial(F.gelu, approximate="tanh")), "act", F.gelu),
    "a method": (lambda: MethodRMSNorm(8), "_norm", torch.relu),
    "a switch": (lambda: Gemma4RMSNorm(8), "with_scale", False),
    "a switch that shardfuse's has": (lambda: FlowLayerNorm(8), "elementwise_affine", False),
    "an activation": (lambda: MLP(nn.SiLU()), "act_fn", nn.ReLU()),
    "an activation, once more": (lambda: MLP(nn.GELU()), "act_fn", None),
}


@pytest.mark.parametrize("case", FIXED)
def test_what_a_replacement_cannot_follow_is_refused_where_it_is_assigned(case: str) -> None:
    make, name, value = FIXED[case]
    theirs, x = make(), normal(4, 8)
    found = convert(nn.Sequential(copy.deepcopy(theirs))).model
    for module in (found[0], pickle.loads(pickle.dumps(copy.deepcopy(found[0])))):
        with pytest.raises(ModuleArgumentError) as refused:
            setattr(module, name, value)
        assert str(refused.value).startswith(f"{type(module).__name__}({name}=")
        assert f"what the {type(theirs).__name__} computed by, in whose place this is: undo" in str(refused.value)
        torch.testing.assert_close(module(x), theirs(x))
    if name in vars(found[0]):
        setattr(found[0], name, getattr(found[0], name))
        module = found[0]
        module.mark = "a mark"
        assert module.mark == "a mark"


def test_a_conversion_that_is_undone_takes_any_function() -> None:
    done = convert(nn.Sequential(GELUActivation(F.gelu)))
    done.undo()[0].act = torch.relu
    x = normal(4, 8)
    assert torch.equal(done.model(x), torch.relu(x))


def test_a_norm_that_does_something_else_with_a_bias_is_left() -> None:
    """Found by trying it with one: it has none, and may come to have it."""
    (left,) = convert(nn.Sequential(SubtractingRMSNorm(8))).left
    assert "its forward reads bias, which" in left.reason
