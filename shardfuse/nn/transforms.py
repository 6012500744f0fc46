"""What torch.func and batches of gradients hand over has no memory of its own, which no kernel can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..errors import TransformError
from .tensor_kinds import forward_ad, in_functorch, is_batched, is_batched_by_the_older


def check_no_transform() -> None:
    """Raise TransformError inside of torch.func."""
    if in_functorch():
        raise TransformError("torch.func (grad, vjp, jvp, vmap)")


def check_one_gradient(gradients: Sequence[object]) -> None:
    """Raise TransformError for a batch of gradients."""
    tensors = [g for g in gradients if isinstance(g, torch.Tensor)]
    if any(map(is_batched, tensors)) or any(map(is_batched_by_the_older, tensors)):
        raise TransformError("torch.autograd.grad(is_grads_batched=True), or vmap of a backward")


tracing_state: Callable[[], object] = cast("Any", torch._C)._get_tracing_state  # pyright: ignore[reportPrivateUsage]
"""None outside of torch.jit.trace."""


def is_traced_by_jit() -> bool:
    """Is this a call under torch.jit.trace?"""
    return tracing_state() is not None


def check_not_traced() -> None:
    """Raise TransformError under torch.jit.trace, which would keep the results of one input.

    Sizes are tensors there, so that nothing that was bound before is found, and binding asks.
    """
    if is_traced_by_jit():
        raise TransformError("torch.jit.trace")


def check_no_tangent(tensors: Sequence[torch.Tensor]) -> None:
    """Raise TransformError for a tensor with a forward derivative, which the result would not have."""
    level: int = forward_ad._current_level
    if level >= 0 and any(forward_ad.unpack_dual(t, level=level).tangent is not None for t in tensors):
        raise TransformError("torch.autograd.forward_ad")
