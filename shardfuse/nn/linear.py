"""A linear layer whose weight is kept in a wider dtype than it is multiplied in."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..executor.uncompiled import uncompiled
from .backward_overlap import LONG_MATMUL, mark_ready
from .fused import PLAIN

_core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_HALVES = (torch.bfloat16, torch.float16)


class Linear(torch.nn.Linear):
    """torch.nn.Linear for mixed precision without autocast: x in bfloat16 or float16, parameters in float32.

    The weight is cast to x's dtype once a call, for forward and backward, and its gradient leaves the matmul in the
    weight's own dtype, unrounded by x's.  On a GPU a module of this package that made x, and whose backward has
    collectives, runs them while the weight's gradient is computed.
    x: [..., in_features] -> [..., out_features], of x's dtype.
    Arguments, parameters and state dict are torch.nn.Linear's.
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear; weight and bias may be of another dtype than ``input``, whose dtype the result has.

    input: [..., in_features]; weight: [out_features, in_features]; bias: [out_features].
    The weight is cast once, for forward and backward.  Its gradient leaves the matmul in the weight's own dtype, where
    torch rounds it to input's first.  On a GPU the backward of the module of this package that made ``input`` runs
    beside the matmul of the weight's gradient, if that is long.
    """
    if torch.compiler.is_compiling() or _is_for_torch(input, weight, bias):
        return functional.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))
    return cast("Any", _Linear).apply(input, weight, bias)


@uncompiled
def _is_for_torch(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Are there tensors or transforms that an autograd function does not know, or nothing to differentiate?"""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    return (
        not torch.is_grad_enabled()
        or not any(t.requires_grad for t in tensors)
        or any(type(t) not in PLAIN for t in tensors)
        or not input.is_floating_point()
        or input.ndim < 2
        or torch.is_autocast_enabled(input.device.type)
        or _core._len_torch_dispatch_stack() > 0
        or _core._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    @uncompiled
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        cast_weight = weight.to(input.dtype)
        ctx.save_for_backward(input, weight, cast_weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return functional.linear(input, cast_weight, None if bias is None else bias.to(input.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, cast_weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: by ops that torch differentiates again
            cast_weight = weight.to(x.dtype)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = of_weight = of_bias = None
        if needs_x:
            of_x = (rows @ cast_weight).view(x.shape)
            if x.is_cuda and needs_weight and rows.numel() * weight.shape[1] >= LONG_MATMUL:
                mark_ready(of_x)
        if needs_weight:
            of_weight = _product(rows.t(), x.reshape(-1, x.shape[-1]), weight.dtype)
        if needs_bias:
            of_bias = rows.sum(0, dtype=ctx.bias_dtype)
        return of_x, of_weight, of_bias


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in ``dtype``, unrounded before where the GPU's matmul writes that."""
    if a.is_cuda and dtype is torch.float32 and a.dtype in _HALVES and not torch.is_grad_enabled():
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
