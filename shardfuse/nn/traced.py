"""Modules under torch.compile on plain tensors, by torch's own ops.

A module without a mesh decomposes, so that a compiler fuses it with its neighbours.  The numerics are the fusion's:
float32 (float64 where a tensor is) inside, one rounding at the end.
"""

from __future__ import annotations

import math

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of ``residual + x + bias``, in x's dtype, and that sum in the residual's."""
    compute = _compute(x, weight, bias, residual)
    total = x.to(compute)
    if bias is not None:
        total = total + bias.to(compute)
    if residual is not None:
        total = residual.to(compute) + total
    rstd = torch.rsqrt((total * total).mean(-1, keepdim=True) + eps)
    normed = (total * rstd * weight.to(compute)).to(x.dtype)
    return normed, total.to(x.dtype if residual is None else residual.dtype)


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None
) -> torch.Tensor:
    """silu(gate + gate_bias) * (up + up_bias), in gate's dtype."""
    compute = _compute(gate, gate_bias)
    a, b = gate.to(compute), up.to(compute)
    if gate_bias is not None and up_bias is not None:
        a, b = a + gate_bias.to(compute), b + up_bias.to(compute)
    return (a * torch.sigmoid(a) * b).to(gate.dtype)


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, reduction: str, ignore_index: int, label_smoothing: float
) -> torch.Tensor:
    """As ``CrossEntropyLoss``; the loss and gradient of a row whose target is no class are NaN."""
    classes = logits.shape[-1]
    counted, known = target != ignore_index, (target >= 0) & (target < classes)
    # An ignored row is chosen away before anything is computed of it: its logits may be infinite.
    chosen_logits = torch.where(counted[..., None], logits.to(_compute(logits)), 0.0)
    maximum = chosen_logits.amax(-1, keepdim=True).detach()
    shifted = chosen_logits - maximum
    log_sum = shifted.exp().sum(-1).log()
    loss = log_sum - shifted.gather(-1, torch.where(known, target, 0)[..., None])[..., 0]
    if label_smoothing:
        even = (log_sum - shifted.mean(-1)) * label_smoothing
        loss = loss * (1.0 - label_smoothing) + even
    loss = torch.where(counted, loss * torch.where(known, 1.0, math.nan), 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / counted.sum() if reduction == "mean" else loss.sum()


def _compute(*tensors: torch.Tensor | None) -> torch.dtype:
    is_double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if is_double else torch.float32
