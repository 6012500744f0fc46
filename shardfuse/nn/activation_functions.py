"""Formulas of activations and their slopes, as ops of a fusion."""

from __future__ import annotations

import math
from typing import Literal

from ..frontend import FusionDefinition
from ..ir import DataType, TensorView

Activation = Literal["silu", "gelu", "gelu_tanh"]

_CUBIC = 0.044715
"""The coefficient of x^3 in the tanh approximation of GELU (Hendrycks & Gimpel 2016)."""

_ALMOST_ONE = {"silu": 31 / 32, "gelu_tanh": 7 / 8}
"""Shares at which x * u'(x), by which the slope has the error of 1 - share, is 3 and 2."""


def activated(fd: FusionDefinition, activation: Activation, x: TensorView) -> TensorView:
    """The activation of ``x``, a tensor of the compute dtype.

    gelu in float32 is the op: 8192 x 4096 of bfloat16 take 37 us on an H200, where x times its share, by CUDA's erfc,
    takes 67 and a copy 36.
    """
    if activation == "gelu" and x.dtype is DataType.Float:
        return fd.ops.gelu(x)
    return fd.ops.mul(x, share_of(fd, activation, x))


def share_of(fd: FusionDefinition, activation: Activation, x: TensorView) -> TensorView:
    """What ``x`` is multiplied by."""
    match activation:
        case "gelu":
            return _normal_share(fd, x)
        case "silu" | "gelu_tanh":
            return fd.ops.sigmoid(_logistic_argument(fd, activation, x))


def slope(
    fd: FusionDefinition, activation: Activation, x: TensorView, into: DataType, share: TensorView | None = None
) -> TensorView:
    """The derivative of the activation at ``x``, for results of ``into``.  ``share``: ``share_of(x)``, if it is there.

    silu is x * s with s = sigmoid(x), and gelu_tanh is x * s with s = sigmoid(u(x)): the slope is s + x * s * (1 - s) *
    u'(x).  gelu is x times the normal distribution up to x, whose slope is the density.
    """
    if activation == "gelu" and share is None and x.dtype is DataType.Float:
        return fd.ops.gelu_slope(x)
    if activation == "gelu":
        square = fd.ops.mul(fd.ops.mul(x, x), -0.5)
        density = fd.ops.mul(fd.ops.exp(square), 1 / math.sqrt(2 * math.pi))
        return fd.ops.add(_normal_share(fd, x) if share is None else share, fd.ops.mul(x, density))
    share = share_of(fd, activation, x) if share is None else share
    rest = _rest_of(fd, activation, x, into, share)
    if activation == "silu":
        return fd.ops.mul(share, fd.ops.add(fd.ops.mul(x, rest), 1.0))
    inner = fd.ops.mul(fd.ops.add(fd.ops.mul(fd.ops.mul(x, x), 3 * _CUBIC), 1.0), 2 * math.sqrt(2 / math.pi))
    # First the share: it is 0 for large negative x, where x * rest * inner is beyond float32 from -1e13 on.
    return fd.ops.add(fd.ops.mul(fd.ops.mul(fd.ops.mul(share, x), rest), inner), share)


def _rest_of(
    fd: FusionDefinition, activation: Activation, x: TensorView, into: DataType, share: TensorView
) -> TensorView:
    """1 - ``share``: where the share is almost 1, as another sigmoid, as a difference would keep none of its digits.

    The slope of gelu_tanh at 4 has 20 times the error of that difference, and at 5 was off by 30 roundings of float32;
    of 16 bits that is a hundredth of one.  Below, the difference is nearer: its error and the share's make up for each
    other.
    """
    difference = fd.ops.sub(1.0, share)
    if into.is_low_precision:
        return difference
    other = fd.ops.sigmoid(fd.ops.neg(_logistic_argument(fd, activation, x)))
    return fd.ops.where(fd.ops.gt(share, _ALMOST_ONE[activation]), other, difference)


def _normal_share(fd: FusionDefinition, x: TensorView) -> TensorView:
    """The share of a standard normal distribution below ``x``; by erfc, which keeps its digits where x is negative."""
    return fd.ops.mul(fd.ops.erfc(fd.ops.mul(x, -math.sqrt(0.5))), 0.5)


def _logistic_argument(fd: FusionDefinition, activation: Activation, x: TensorView) -> TensorView:
    """What the share is the sigmoid of: x, or the u(x) of which sigmoid(u) is (1 + tanh(u / 2)) / 2."""
    if activation == "silu":
        return x
    inner = fd.ops.add(fd.ops.mul(fd.ops.mul(x, x), _CUBIC), 1.0)
    return fd.ops.mul(fd.ops.mul(x, inner), 2 * math.sqrt(2 / math.pi))
