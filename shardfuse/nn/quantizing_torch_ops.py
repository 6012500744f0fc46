"""What `quantized.py` makes, by torch's own ops: for torch.compile, and for tensors that are not plain."""

from __future__ import annotations

import torch
from torch import Tensor

from . import traced
from .quantizing_fusions import BLOCK, SMALLEST, ScaleKind, Work


def made(
    work: Work,
    tensors: list[Tensor],
    vectors: list[Tensor | None],
    scales: ScaleKind,
    given: Tensor | None,
    dtype: torch.dtype,
    eps: float,
) -> list[Tensor]:
    """[values[, scales][, residual + input]], with one axis for all rows."""
    is_double = any(t is not None and t.dtype == torch.float64 for t in (*tensors, *vectors))
    wide = torch.float64 if is_double else torch.float32
    x, *others = ((t.flatten(0, -2) if t.ndim > 1 else t[None]).to(wide) for t in tensors)
    total = None
    if work in ("rms_norm", "layer_norm"):
        weight, bias = vectors
        residual = others[0] if others else None
        x, summed = traced.norm(
            x, eps, weight=weight, bias=bias, input_bias=None, residual=residual, centered=work == "layer_norm"
        )
        total = None if residual is None else summed
    elif work != "none":
        x = traced.gated(work, x, others[0]) if others else traced.activation(work, x)
    values, scale = quantized(x, scales, given, dtype)
    made = [values] if given is not None else [values, scale]
    return [*made, *([] if total is None else [total.to(tensors[1].dtype)])]


def quantized(x: Tensor, scales: ScaleKind, given: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x``, [..., columns], divided by its scales, and those; blocks' as ``as_matmuls_read`` says."""
    blocks = x.view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK) if scales == "block" else x
    largest = torch.finfo(dtype).max
    scale = given
    if scale is None:
        scale = (blocks.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / largest).float()
    values = (blocks / scale).clamp(-largest, largest).to(dtype).view(x.shape)
    return values, as_matmuls_read(scale.squeeze(-1)) if scales == "block" else scale


def as_matmuls_read(scales: Tensor) -> Tensor:
    """Scales of blocks, [..., blocks], of which those of all rows of a column of blocks lie one after the other."""
    return scales.movedim(-1, 0).contiguous().movedim(0, -1)
