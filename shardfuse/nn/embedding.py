"""Rows of a table in a narrower dtype than the table's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import IndexRangeError, ModuleArgumentError, ShardfuseError
from ..executor.uncompiled import uncompiled
from ..frontend.detection import has_dtensor
from .checks import Function
from .refused_calls import refusing_by
from .second_derivatives import Once, apply_of_c
from .tensor_kinds import are_torchs, forward_ad

_HALVES = (torch.bfloat16, torch.float16)
_INDICES = (torch.int64, torch.int32)


def _why_refused(
    input: Tensor, weight: Tensor, dtype: object = None, *, padding_idx: int | None = None, **options: object
) -> ShardfuseError | None:
    function, rows = Function("embedding"), weight.shape[0] if weight.ndim else 0
    if weight.ndim != 2:
        return function.refuse("weight", f"shape {tuple(weight.shape)}", "[rows, width]")
    if input.dtype not in _INDICES:
        return function.refuse("input", f"dtype {input.dtype}", " or ".join(map(str, _INDICES)))
    if padding_idx is not None and not -rows <= padding_idx < rows:
        return ModuleArgumentError("embedding", "padding_idx", padding_idx, f"None, or {-rows} to {rows - 1}: a row")
    # A GPU says so where nothing can be read any longer; the smallest index of a DTensor is a collective.
    if input.device.type == "cpu" and input.numel() and not has_dtensor((input,)):
        for index in (int(input.min()), int(input.max())):
            if not 0 <= index < rows:
                return IndexRangeError("embedding", "input", index, 0, rows, 0, "weight")
    return None


@refusing_by(_why_refused)
def embedding(
    input: Tensor,
    weight: Tensor,
    dtype: torch.dtype | None = None,
    *,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """torch.nn.functional.embedding, of which the rows come in ``dtype``, and their gradients in the weight's.

    input: [...] of int32 or int64; weight: [rows, width] -> [..., width].  On a GPU rows of 16 bits are cast as they
    are read, and their gradients added up in float32, in an order of the indices alone: the same bits on every rank and
    in every run; with one of torch's further options as torch does it.  Raises ModuleInputError, ModuleArgumentError
    for a dtype that is none of floats, as torch's ``padding_idx`` by position would be, and on a CPU IndexRangeError.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModuleArgumentError("embedding", "dtype", dtype, "None or a torch.dtype of floats")
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        rows = functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return rows if dtype is None else rows.to(dtype)
    if dtype is None or dtype is weight.dtype or torch.compiler.is_compiling():
        rows = functional.embedding(input, weight)
        return rows if dtype is None else rows.to(dtype)
    return _looked_up(input, weight, dtype)


@uncompiled
def _looked_up(input: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if not (_is_known(input, weight, dtype) and are_torchs((input, weight)) and forward_ad._current_level < 0):
        return functional.embedding(input, weight).to(dtype)
    is_recorded = weight.requires_grad and torch.is_grad_enabled()
    return (_apply if is_recorded else _cast_rows)(input, weight, dtype)


def _is_known(input: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Is it what the kernels take?  The rest is torch's, and what torch refuses."""
    is_table = weight.is_cuda and weight.dtype is torch.float32 and weight.ndim == 2 and weight.numel() > 0
    is_index = input.dtype in _INDICES and input.device == weight.device and input.numel() > 0
    return is_table and is_index and dtype in _HALVES and weight.stride(1) == 1


def _cast_rows(input: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    from shardfuse.nn.embedding_kernel import rows_of

    return rows_of(input.reshape(-1).contiguous(), weight, dtype).view(*input.shape, weight.shape[1])


class _Embedding(torch.autograd.Function):
    @staticmethod
    @uncompiled
    def forward(ctx: Any, input: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(input)
        ctx.rows = weight.shape[0]
        return _cast_rows(input, weight, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from shardfuse.nn.embedding_kernel import gradient_of

        (input,) = ctx.saved_tensors
        with torch.no_grad():
            rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
            made = gradient_of(input.reshape(-1).contiguous(), rows, ctx.rows)
        if torch.is_grad_enabled():  # create_graph=True
            (made,) = cast("Any", Once).apply("shardfuse.nn.functional.embedding", 1, made, gradient)
        return None, made, None


_apply: Callable[..., Tensor] = apply_of_c(_Embedding)
