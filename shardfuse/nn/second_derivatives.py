"""Functions of autograd: gradients of fusions, which are not differentiated again, and ``apply`` past torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import SecondDerivativeError

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class Once(torch.autograd.Function):
    """Gradients that depend on what they were made of, and say so where they are differentiated.

    torch's ``once_differentiable`` lets them pass as constants where the gradient that came in is one.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, what: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cast("Any", ctx).what = what
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise SecondDerivativeError(cast("Any", ctx).what)


def once(
    what: str, made: Sequence[torch.Tensor | None], read: Sequence[torch.Tensor | None], node: Any = None
) -> list[torch.Tensor | None]:
    """``made``, or None of what needs no gradient, by ``Once``, of what was ``read`` for it.

    what: the module or function that they are gradients of, as an error calls it.
    node: that ``made`` are gradients of, where they depend on tensors of autograd's graph of which that has saved what
    says nothing of it, as a cast weight: they would pass as constants.
    """
    known, given = ([t for t in tensors if t is not None] for tensors in (made, read))
    if node is not None:
        given += _leaves_behind(node)
    found = iter(cast("Any", Once).apply(what, len(known), *known, *given))
    return [None if t is None else next(found) for t in made]


def _leaves_behind(node: Any) -> list[torch.Tensor]:
    """The leaves of autograd's graph that a node leads to."""
    found: list[torch.Tensor] = []
    seen, waiting = {node}, [node]
    while waiting:
        for behind, _ in waiting.pop().next_functions:
            if behind is None or behind in seen:
                continue
            seen.add(behind)
            if behind.name() == "torch::autograd::AccumulateGrad":
                found.append(behind.variable)
            else:
                waiting.append(behind)
    return found


def apply_of_c(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` as C has it, without what torch puts before it.

    Within a function, as a module that names ``super`` itself is compiled without the one instruction for ``super().x``
    that torch 2.11 takes in Python 3.12.
    """
    return cast("Any", super(torch.autograd.Function, function)).apply


def backward_as_it_is(function: type[torch.autograd.Function]) -> None:
    """Have autograd call ``function.backward`` by itself, without what torch looks for in each backward.

    That is whether the function has a ``vjp``, or takes its gradients as one list, which those of shardfuse do not.
    """
    cast("Any", function)._backward_cls.apply = function.backward
