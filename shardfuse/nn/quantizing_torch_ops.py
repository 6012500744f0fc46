"""What `quantized.py` makes, by torch's own ops: for torch.compile, and for tensors that are not plain."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import traced
from .quantizing_fusions import BLOCK, SMALLEST, Work


def made(
    work: Work,
    tensors: list[Tensor],
    vectors: list[Tensor | None],
    scales: Literal["row", "block", "given"],
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
    blocks = x.view(x.shape[0], x.shape[1] // BLOCK, BLOCK) if scales == "block" else x
    largest = torch.finfo(dtype).max
    scale = given
    if scale is None:
        scale = (blocks.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / largest).float()
    values = (blocks / scale).clamp(-largest, largest).to(dtype).view(x.shape)
    if scales == "block":
        scale = scale.squeeze(-1).t().contiguous().t()
    made = [values] if given is not None else [values, scale]
    return [*made, *([] if total is None else [total.to(tensors[1].dtype)])]
