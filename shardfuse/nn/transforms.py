"""What torch.func and batches of gradients hand over has no memory of its own, which no kernel can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ..errors import TransformError
from .tensor_kinds import are_batches, forward_ad, in_functorch


def check_no_transform() -> None:
    """Raise TransformError inside of torch.func."""
    if in_functorch():
        raise TransformError("torch.func (grad, vjp, jvp, vmap)")


def check_one_gradient(gradients: Sequence[object]) -> None:
    """Raise TransformError for a batch of gradients."""
    if are_batches(gradients):
        raise TransformError("torch.autograd.grad(is_grads_batched=True), or vmap of a backward")


_tracing_state: Any = cast("Any", torch._C)._get_tracing_state  # pyright: ignore[reportPrivateUsage]


def is_traced_by_jit() -> bool:
    """Is this a call under torch.jit.trace?"""
    return _tracing_state() is not None


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
