"""A subclass of a module, of a caller's own: errors call it by its name, and not as one of shardfuse.nn."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardfuse import nn
from shardfuse.errors import ModuleArgumentError, ModuleInputError, SecondDerivativeError, ShardfuseError

X, TARGET, WEIGHT = torch.ones(3, 4), torch.arange(3), torch.ones(5, 4)


class MyNorm(nn.RMSNorm):
    pass


class MyEmbedding(nn.RotaryEmbedding):
    pass


class MyLoss(nn.CrossEntropyLoss):
    pass


class MyLinearLoss(nn.LinearCrossEntropyLoss):
    pass


def differentiated_twice(module: torch.nn.Module) -> None:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    gradient.sum().backward()


def test_the_error_of_a_run() -> None:
    with pytest.raises(SecondDerivativeError, match=r"^MyNorm has no second derivative"):
        differentiated_twice(MyNorm(4))
    with pytest.raises(SecondDerivativeError, match=r"^shardfuse\.nn\.RMSNorm has no second derivative"):
        differentiated_twice(nn.RMSNorm(4))


def assigned(module: torch.nn.Module, name: str, value: object) -> None:
    setattr(module, name, value)


BAD: dict[str, Callable[[], object]] = {
    "MyNorm(eps=-1.0): expected 0 or more": lambda: MyNorm(4, eps=-1.0),
    "MyNorm(hidden_size='x'): expected an integer": lambda: MyNorm("x"),
    "MyNorm(size=4): expected an argument of one of the names hidden_size": lambda: MyNorm(size=4),
    "MyNorm(eps='x'): expected a number or None": lambda: assigned(MyNorm(4), "eps", "x"),
    "MyNorm(eps=-2.0): expected 0 or more": lambda: assigned(MyNorm(4), "eps", -2.0),
    "MyNorm: x has shape (3, 2)": lambda: MyNorm(4)(X[:, :2]),
    "MyEmbedding: query has 2 dims": lambda: MyEmbedding(4)(X),
    "MyEmbedding: dtype has torch.int64": lambda: MyEmbedding(4).tables(TARGET, torch.int64),
    "MyLoss(weight=a Tensor of shape [4]): expected None": lambda: MyLoss(weight=X[0]),
    "MyLoss(reduction='x'): ": lambda: MyLoss(reduction="x"),
    "MyLinearLoss(temperature=0.0): ": lambda: MyLinearLoss(temperature=0.0),
    "MyLinearLoss(temperature=-1.0): ": lambda: assigned(MyLinearLoss(), "temperature", -1.0),
    "MyLinearLoss(chunk_rows=0): ": lambda: MyLinearLoss(chunk_rows=0),
    "MyLinearLoss(chunk_rows=-1): ": lambda: assigned(MyLinearLoss(), "chunk_rows", -1),
    "MyLinearLoss: weight has shape (4, 5)": lambda: MyLinearLoss()(X, WEIGHT.T, TARGET),
    "MyLinearLoss: target has 2 values": lambda: MyLinearLoss(chunk_rows=2)(X, WEIGHT, TARGET + 4),
    "MyLinearLoss: target has type int": lambda: MyLinearLoss()(X, WEIGHT, 3),
}


@pytest.mark.parametrize("sentence", BAD)
def test_errors_of_arguments_and_tensors(sentence: str) -> None:
    with pytest.raises((ModuleArgumentError, ModuleInputError), match=f"^{re.escape(sentence)}"):
        BAD[sentence]()


def test_an_error_of_a_module_in_a_forward_is_that_modules() -> None:
    class Gated(nn.RMSNorm):
        def __init__(self) -> None:
            super().__init__(4)
            self.gate = nn.GELU()

        def forward(self, x: Tensor, *, unsharded: None = None) -> Tensor:
            return super().forward(self.gate(x))

    with pytest.raises(ShardfuseError, match=r"^GELU: x has dtype torch\.int64"):
        Gated()(X.long())
    torch.testing.assert_close(Gated()(X), nn.RMSNorm(4)(nn.GELU()(X)))
