"""Modules under torch.compile on plain tensors, by torch's own ops.

A module without a mesh decomposes, so that a compiler fuses it with its neighbours.  The numerics are the fusion's:
float32 (float64 where a tensor is) inside, one rounding at the end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .activation_functions import Activation


def norm(
    x: torch.Tensor,
    eps: float,
    *,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    input_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    centered: bool,
    weight_offset: float = 0.0,
    dropout: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm over the last axis of ``residual + dropout(x + input_bias)``, in x's dtype, and that sum."""
    compute = _compute(x, weight, bias, input_bias, residual)
    total = x.to(compute)
    if input_bias is not None:
        total = total + input_bias.to(compute)
    if dropout is not None:
        keep = torch.rand_like(total) >= dropout
        total = torch.where(keep, total * (0.0 if dropout == 1 else 1.0 / (1.0 - dropout)), 0.0)
    if residual is not None:
        total = residual.to(compute) + total
    away = total - total.mean(-1, keepdim=True) if centered else total
    normed = away * torch.rsqrt((away * away).mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * (weight.to(compute) + weight_offset if weight_offset else weight.to(compute))
    if bias is not None:
        normed = normed + bias.to(compute)
    return normed.to(x.dtype), total.to(x.dtype if residual is None else residual.dtype)


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: Activation | None,
) -> torch.Tensor:
    """GroupNorm of [batch, channels, ...], and the activation of its result, in x's dtype."""
    compute = _compute(x, weight, bias)
    grouped = x.to(compute).reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    dims = list(range(2, grouped.ndim))
    away = grouped - grouped.mean(dims, keepdim=True)
    normed = (away * torch.rsqrt((away * away).mean(dims, keepdim=True) + eps)).flatten(1, 2)
    normed = _affine(normed, weight, bias)
    return (normed if activation is None else _activated(activation, normed)).to(x.dtype)


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    kept: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """BatchNorm of [batch, channels, ...] in x's dtype; mean and unbiased variance, unless these are ``kept``."""
    compute = _compute(x, weight, bias, *kept)
    values, column = x.to(compute), (-1, *[1] * (x.ndim - 2))
    if kept:
        mean, variance = (t.to(compute) for t in kept)
        away = values - mean.view(column)
        return (_affine(away * torch.rsqrt(variance + eps).view(column), weight, bias).to(x.dtype),)
    dims = [0, *range(2, x.ndim)]
    mean = values.mean(dims)
    away = values - mean.view(column)
    variance = (away * away).mean(dims)
    count = x.numel() // x.shape[1]
    normed = _affine(away * torch.rsqrt(variance + eps).view(column), weight, bias)
    return normed.to(x.dtype), mean.detach(), variance.detach() * (count / (count - 1))


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """``x * weight + bias`` along the channels of [batch, channels, ...]."""
    column = (-1, *[1] * (x.ndim - 2))
    x = x if weight is None else x * weight.to(x.dtype).view(column)
    return x if bias is None else x + bias.to(x.dtype).view(column)


def activation(name: Activation, x: torch.Tensor) -> torch.Tensor:
    """An activation in x's dtype."""
    return _activated(name, x.to(_compute(x))).to(x.dtype)


def gated(
    name: Activation,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(gate + gate_bias) * (up + up_bias), in gate's dtype."""
    compute = _compute(gate, gate_bias)
    a, b = gate.to(compute), up.to(compute)
    if gate_bias is not None and up_bias is not None:
        a, b = a + gate_bias.to(compute), b + up_bias.to(compute)
    return (_activated(name, a) * b).to(gate.dtype)


def _activated(name: Activation, x: torch.Tensor) -> torch.Tensor:
    if name == "silu":
        return x * torch.sigmoid(x)
    return torch.nn.functional.gelu(x, approximate="none" if name == "gelu" else "tanh")


def softmax(x: torch.Tensor, mask: torch.Tensor | None, dim: int, scale: float, *, is_log: bool) -> torch.Tensor:
    """Softmax of ``scale * x``, masked, or its logarithm, in x's dtype."""
    values = x.to(_compute(x, None if mask is None or mask.dtype == torch.bool else mask)) * scale
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        values = torch.where(mask, values, -math.inf) if is_bool else values + mask.to(values.dtype)
    return (torch.log_softmax(values, dim) if is_log else torch.softmax(values, dim)).to(x.dtype)


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int, *, interleaved: bool
) -> torch.Tensor:
    """The first ``rotary_dim`` features of x, each pair turned by its angle, and the others, in x's dtype.

    cos, sin: broadcast to x but for the features, of which they have one for each pair.
    """
    compute = _compute(x, cos)
    turned, rest = x[..., :rotary_dim].to(compute), x[..., rotary_dim:]
    cos, sin = cos.to(compute), sin.to(compute)
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1) if rotary_dim < x.shape[-1] else turned.to(x.dtype)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float = 0.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """As ``CrossEntropyLoss``; the loss and gradient of a row whose target is no class are NaN."""
    counted, known, shifted, maximum, log_sum = _log_sum(logits, target, ignore_index, temperature)
    loss = log_sum - shifted.gather(-1, torch.where(known, target, 0)[..., None])[..., 0]
    if label_smoothing:
        even = (log_sum - shifted.mean(-1)) * label_smoothing
        loss = loss * (1.0 - label_smoothing) + even
    if z_loss:
        loss = loss + (maximum + log_sum).square() * z_loss
    loss = torch.where(counted, loss * torch.where(known, 1.0, math.nan), 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / counted.sum() if reduction == "mean" else loss.sum()


def log_prob(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, temperature: float, *, entropy: bool
) -> tuple[torch.Tensor, ...]:
    """As ``LogProb``; results and gradient of a row whose target is no class are NaN."""
    counted, known, shifted, _, log_sum = _log_sum(logits, target, ignore_index, temperature)
    found = [shifted.gather(-1, torch.where(known, target, 0)[..., None])[..., 0] - log_sum]
    if entropy:
        # A class of no weight, a logit of minus infinity, adds nothing: nor does its gradient.
        weights = shifted.exp()
        moments = weights * torch.where(shifted > -math.inf, shifted, 0.0)
        found.append(log_sum - moments.sum(-1) / weights.sum(-1))
    factor = torch.where(known, 1.0, math.nan)
    return tuple(torch.where(counted, result * factor, 0.0) for result in found)


def _log_sum(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, temperature: float
) -> tuple[torch.Tensor, ...]:
    """Which rows count, whose targets are classes, logits less their maximum, that, and log(sum(exp(...)))."""
    counted, known = target != ignore_index, (target >= 0) & (target < logits.shape[-1])
    # An ignored row is chosen away before anything is computed of it: its logits may be infinite.
    chosen = torch.where(counted[..., None], logits.to(_compute(logits)), 0.0)
    chosen = chosen if temperature == 1 else chosen * (1.0 / temperature)
    maximum = chosen.amax(-1, keepdim=True).detach()
    shifted = chosen - maximum
    return counted, known, shifted, maximum[..., 0], shifted.exp().sum(-1).log()


def _compute(*tensors: torch.Tensor | None) -> torch.dtype:
    is_double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if is_double else torch.float32
