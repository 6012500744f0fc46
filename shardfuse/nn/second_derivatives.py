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
    def forward(ctx: FunctionCtx, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise SecondDerivativeError("a module of shardfuse.nn")


def once(
    made: Sequence[torch.Tensor | None], read: Sequence[torch.Tensor | None], *, is_of_more: bool
) -> list[torch.Tensor | None]:
    """``made``, or None of what needs no gradient, by ``Once``, of what was ``read`` for it.

    is_of_more: do they depend on a tensor that requires a gradient, though what was read of it, as a cast weight, may
    say nothing of that?  They would pass as constants.
    """
    known, given = ([t for t in tensors if t is not None] for tensors in (made, read))
    if is_of_more:
        given.append(torch.empty(0, device="cpu", requires_grad=True))
    found = iter(cast("Any", Once).apply(len(known), *known, *given))
    return [None if t is None else next(found) for t in made]


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
