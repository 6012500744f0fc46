"""What torch.func and batches of gradients hand over has no memory of its own, which no kernel can read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import TransformError
from .tensor_kinds import in_functorch, is_batched


def check_no_transform() -> None:
    """Raise TransformError inside of torch.func."""
    if in_functorch():
        raise TransformError("torch.func (grad, vjp, jvp, vmap)")


def check_one_gradient(gradients: Sequence[object]) -> None:
    """Raise TransformError for a batch of gradients."""
    for gradient in gradients:
        if isinstance(gradient, torch.Tensor) and is_batched(gradient):
            raise TransformError("torch.autograd.grad(is_grads_batched=True), or vmap of a backward")
