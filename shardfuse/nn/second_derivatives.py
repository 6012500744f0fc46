"""Gradients of fusions, which are not differentiated again."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
