"""Derivatives of fusions that there are not: second ones, batches of gradients, and those of torch.func."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import SecondDerivativeError, TransformError
from .tensor_kinds import in_functorch, is_batched

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


def check_no_transform() -> None:
    """Raise TransformError inside of torch.func, whose tensors have no memory of their own that a kernel could read."""
    if in_functorch():
        raise TransformError("torch.func (grad, vjp, jvp, vmap)")


def check_one_gradient(gradients: Sequence[object]) -> None:
    """Raise TransformError for a batch of gradients, which torch hands over as a tensor without memory of its own."""
    for gradient in gradients:
        if isinstance(gradient, torch.Tensor) and is_batched(gradient):
            raise TransformError("torch.autograd.grad(is_grads_batched=True), or vmap of a backward")
