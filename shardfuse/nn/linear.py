"""A linear layer whose parameters are kept in a wider dtype than they are multiplied in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ModuleInputError
from ..executor.uncompiled import uncompiled
from .checks import Function
from .refused_calls import refusing_by
from .second_derivatives import apply_of_c, backward_as_it_is, once
from .tensor_kinds import PLAIN, are_torchs, forward_ad
from .transforms import tracing_state

_HALVES = (torch.bfloat16, torch.float16)
_CAST = (torch.float64, torch.float32, *_HALVES)


class Linear(torch.nn.Linear):
    """torch.nn.Linear for mixed precision without autocast: input in bfloat16 or float16, parameters in float32.

    The weight is cast to the input's dtype once a call, for forward and backward.  On a GPU its gradient leaves the
    matmul in float32, where torch rounds it to the input's dtype and casts it back; on a CPU it is torch's.
    input: [..., in_features] -> [..., out_features], of the input's dtype.
    Arguments, parameters and state dict are torch.nn.Linear's.
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _why_refused(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> ModuleInputError | None:
    function, shape = Function("linear"), tuple(weight.shape)
    if weight.ndim not in (1, 2):
        return function.refuse("weight", f"shape {shape}", "[out_features, in_features]")
    if input.ndim == 0 or input.shape[-1] != shape[-1]:
        return function.refuse("input", f"shape {tuple(input.shape)}", f"[..., {shape[-1]}], as weight has {shape}")
    made = (*input.shape[:-1], *shape[:-1])
    if bias is not None and not _broadcasts(bias.shape, made):
        return function.refuse("bias", f"shape {tuple(bias.shape)}", f"{shape[:-1]}, as weight has {shape}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype is not input.dtype and not (t.dtype in _CAST and input.dtype in _CAST):
            return function.refuse(name, f"dtype {t.dtype}", f"{input.dtype}, that of input")
    return None


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1], strict=False))


@refusing_by(_why_refused)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear, where weight and bias may be of another floating dtype than ``input``.

    input: [..., in_features]; weight: [out_features, in_features]; bias: [out_features].
    Parameters of another floating dtype (of 16 bits or more) are cast to the input's, which is the result's.  On a GPU
    the gradient of a float32 weight leaves the matmul in float32, where torch rounds it to bfloat16 or float16 first.
    Raises ModuleInputError.
    """
    dtype, of_weight = input.dtype, weight.dtype
    of_bias = of_weight if bias is None else bias.dtype
    if dtype is of_weight is of_bias or not (dtype in _CAST and of_weight in _CAST and of_bias in _CAST):
        return functional.linear(input, weight, bias)
    if torch.compiler.is_compiling():
        return _composed(input, weight, bias)
    return _called(input, weight, bias)


def has_own_node(input: Tensor, weight: Tensor) -> bool:
    """Is their product, without a bias, one that ``linear`` records by a node of its own, and that fits?"""
    return (
        type(input) in PLAIN
        and type(weight) in PLAIN
        and input.dtype is not weight.dtype
        and input.dtype in _CAST
        and weight.dtype in _CAST
        and input.device == weight.device
        and input.device.type in ("cpu", "cuda")
        and not torch.is_autocast_enabled(input.device.type)
        and not _is_for_torch(input, weight, None)
        and input.shape[-1] == weight.shape[1]
    )


@uncompiled
def _called(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    kind = input.device.type
    is_known = kind in ("cpu", "cuda")
    if is_known and torch.is_autocast_enabled(kind):
        return functional.linear(input, weight, bias)
    if not is_known or _is_for_torch(input, weight, bias):
        return _composed(input, weight, bias)
    return _apply(input, weight, bias)


def _composed(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By torch's own ops, which it differentiates."""
    return functional.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))


def _is_for_torch(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Are there tensors or transforms that an autograd function does not know, or nothing to differentiate?"""
    return (
        not torch.is_grad_enabled()
        or not (weight.requires_grad or input.requires_grad or (bias is not None and bias.requires_grad))
        or not are_torchs((input, weight) if bias is None else (input, weight, bias))
        or (input.is_nested or weight.is_nested or (bias is not None and bias.is_nested))
        or input.ndim < 2
        or weight.ndim != 2
        or (bias is not None and bias.ndim != 1)
        or input.numel() == 0
        or weight.numel() == 0
        or forward_ad._current_level >= 0
        or tracing_state() is not None
    )


class _Linear(torch.autograd.Function):
    """Keeps what the gradients that are asked for read, and nothing else."""

    @staticmethod
    @uncompiled
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, cast_weight, made = multiplied(input, weight, bias)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, cast_weight if needs_x else None)
        ctx.shape, ctx.weight_dtype = input.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, cast_weight = ctx.saved_tensors  # once: a checkpoint's hooks unpack no tensor twice
        if not torch.is_grad_enabled():
            return _gradients(ctx, gradient, x, cast_weight)
        with torch.no_grad():  # create_graph=True: gradients that are not differentiated again, and say so
            made = _gradients(ctx, gradient, x, cast_weight)
        # made of the weight, and it may be of the input: what is saved is not of the graph
        node = ctx if all(ctx.needs_input_grad[:2]) else None
        return tuple(once("shardfuse.nn.functional.linear", made, (gradient, x, cast_weight), node))


_apply: Callable[..., Tensor] = apply_of_c(_Linear)
"""Without what torch puts before it: ``_is_for_torch`` has asked most of that."""
backward_as_it_is(_Linear)


def multiplied(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The input, or its rows, the weight in the input's dtype, which the gradients are made of, and the result.

    An input without gaps is taken for its rows by torch's own matmul, which is quicker at that than views of Python's.
    """
    dtype, shape = input.dtype, input.shape
    cast_weight = weight.to(dtype)
    if bias is None and (input.ndim == 2 or input.is_contiguous()):
        return input, cast_weight, functional.linear(input, cast_weight)
    rows = input if input.ndim == 2 else input.reshape(-1, shape[-1])
    made = functional.linear(rows, cast_weight, None if bias is None else bias.to(dtype))
    return rows, cast_weight, made if made.ndim == input.ndim else made.view(*shape[:-1], made.shape[1])


def _gradients(ctx: Any, gradient: Tensor, x: Tensor | None, cast_weight: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of input, weight and bias.  x, cast_weight: as ``gradients_of`` has them."""
    of_x, of_weight = gradients_of(gradient, x, cast_weight, ctx.shape, ctx.weight_dtype)
    if ctx.bias_dtype is None or not ctx.needs_input_grad[2]:
        return of_x, of_weight, None
    return of_x, of_weight, gradient.reshape(-1, gradient.shape[-1]).sum(0, dtype=ctx.bias_dtype)


def gradients_of(
    gradient: Tensor, x: Tensor | None, cast_weight: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Of the input, of this shape, and of the weight, of this dtype.

    x: the input, or its rows; None where the weight needs no gradient, as ``cast_weight`` where the input does not.
    """
    rows = gradient if gradient.ndim == 2 else gradient.reshape(-1, gradient.shape[-1])
    if cast_weight is None:
        of_x = None
    elif gradient.ndim > 2 and gradient.is_contiguous():
        of_x = torch.matmul(gradient, cast_weight)
    else:
        of_x = torch.mm(rows, cast_weight).view(shape)
    if x is None:
        return of_x, None
    x = x if x.ndim == 2 else x.view(-1, x.shape[-1])
    if x.is_cuda and dtype is torch.float32 and x.dtype in _HALVES:  # unrounded before where the GPU's matmul writes it
        return of_x, torch.mm(rows.t(), x, out_dtype=dtype)
    return of_x, torch.mm(rows.t(), x).to(dtype)
