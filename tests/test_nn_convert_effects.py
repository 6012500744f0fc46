"""convert: a class whose forward writes an attribute, or uses what is kept outside of it and may change, is left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

import pytest
import torch
from test_nn_convert import MLP, LlamaRMSNorm
from torch import Tensor, nn

from shardfuse import nn as fused
from shardfuse.nn import convert

F = nn.functional
SEEN: list[Tensor] = []
SCALES = [1.0]
OPTIONS = {"scale": 1.0}
FACTOR = torch.ones(())
CALLS = 0
LOGGER = logging.getLogger(__name__)
ONE, SIZES, PLAIN_GELU = 1.0, (1, 2), partial(F.gelu, approximate="none")


class LastRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.last_rms = x.detach().square().mean().sqrt()
        return super().forward(x)


class LastInDictRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["last"] = x.shape
        return super().forward(x)


class LastOfClassRMSNorm(LlamaRMSNorm):
    last: object = None

    def forward(self, x: Tensor) -> Tensor:
        type(self).last = x.shape
        return super().forward(x)


class DeletingRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.once = 1
        del self.once
        return super().forward(x)


class LastGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.largest = x.detach().abs().max()
        return F.gelu(x)


class LastMLP(MLP):
    def __init__(self) -> None:
        super().__init__(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        self.rows = x.shape[0]
        return super().forward(x)


class ListedRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.detach())
        return super().forward(x)


class ScaledRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALES[0]


class OfParentRMSNorm(ScaledRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OptionRMSNorm(LlamaRMSNorm):
    """By a property, and a function of the module that the class is in."""

    @property
    def factor(self) -> float:
        return scale()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def scale() -> float:
    return OPTIONS.get("scale", 1.0)


class TensorRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * FACTOR.to(x)


class CountedRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return super().forward(x)


def counted(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    times = 0

    @wraps(forward)
    def call(*given: Any) -> Tensor:
        nonlocal times
        times += 1
        return forward(*given)

    return call


class WrappedRMSNorm(LlamaRMSNorm):
    forward = counted(LlamaRMSNorm.forward)


class HeldGELU(nn.Module):
    """Its function is an attribute, which reads a list."""

    def __init__(self) -> None:
        super().__init__()
        self.act = lambda x: F.gelu(x) * SCALES[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class ScaledMLP(MLP):
    def __init__(self) -> None:
        super().__init__(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALES[0]


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an attribute": (partial(LastRMSNorm, 8), "writes last_rms, which"),
    "an entry of __dict__": (partial(LastInDictRMSNorm, 8), "writes last, which"),
    "an attribute of the class": (partial(LastOfClassRMSNorm, 8), "writes last, which"),
    "a deleted attribute": (partial(DeletingRMSNorm, 8), "writes once, which"),
    "an attribute of a gelu": (LastGELU, "writes largest, which a GELU would not"),
    "an attribute of an mlp": (LastMLP, "writes rows, which a GatedMLP would not"),
    "a list that is appended to": (partial(ListedRMSNorm, 8), "reads or writes SEEN, kept outside of it"),
    "a list that is read": (partial(ScaledRMSNorm, 8), "reads or writes SCALES, kept"),
    "in a forward that is called": (partial(OfParentRMSNorm, 8), "reads or writes SCALES, kept"),
    "a dict, by a function": (partial(OptionRMSNorm, 8), "reads or writes OPTIONS, kept"),
    "a tensor": (partial(TensorRMSNorm, 8), "reads or writes FACTOR, kept"),
    "a number that is written": (partial(CountedRMSNorm, 8), "reads or writes CALLS, kept"),
    "a variable of a decorator": (partial(WrappedRMSNorm, 8), "reads or writes times, kept"),
    "by a function that is held": (HeldGELU, "reads or writes SCALES, kept"),
    "in an mlp": (ScaledMLP, "reads or writes SCALES, kept outside of it, which a GatedMLP would not follow"),
}


@pytest.mark.parametrize("way", LEFT)
def test_a_class_whose_forward_has_another_effect_is_left(way: str) -> None:
    make, said = LEFT[way]
    module = make()
    done = convert(nn.Sequential(module))
    assert done.model[0] is module
    (left,) = (left for left in done.left if left.name == "0")
    assert said in left.reason, left.reason


class ConstantRMSNorm(LlamaRMSNorm):
    """Numbers, tuples, types, modules, loggers and functions of libraries are no state, nor variables of the call."""

    def forward(self, x: Tensor) -> Tensor:
        found = 0.0

        def add(k: int) -> None:
            nonlocal found
            found += k

        add(SIZES[0])
        if x.ndim > 9:
            LOGGER.warning("many dims")
        return cast(Tensor, torch.mul(super().forward(x), found * ONE))


class ConstantGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return PLAIN_GELU(x)


@pytest.mark.parametrize(
    ("make", "kind"), [(partial(ConstantRMSNorm, 8), fused.RMSNorm), (ConstantGELU, fused.GELU)], ids=["norm", "gelu"]
)
def test_constants_and_functions_do_not_keep_a_class(make: Callable[[], nn.Module], kind: type[nn.Module]) -> None:
    done = convert(nn.Sequential(make()))
    assert not done.left
    assert type(done.model[0]) is kind
