"""The fusions of GroupNorm, with an activation after it, on any placement that leaves groups whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..frontend import FusionDefinition
from ..ir import TensorView
from .activation_functions import Activation, activated, slope
from .channel_norm_spec import ChannelNormSpec, affine, of_channels
from .fused import FusedOp
from .placement import TensorPlacement, define, give


@dataclass(frozen=True, kw_only=True)
class GroupNormSpec(ChannelNormSpec):
    """All that the fusions depend on.  activation: of the result; None where there is none."""

    groups: int
    activation: Activation | None

    @property
    def statistic_shape(self) -> list[int]:
        """One number for each sample and group, in x's dims."""
        return [-1, *(self.groups if k == self.channel_dim else 1 for k in range(1, self.ndim))]

    @property
    def statistic(self) -> TensorPlacement:
        kept = (0, self.channel_dim)
        return replace(self.placement, shards=tuple(d if d in kept else None for d in self.placement.shards))

    @property
    def group_dims(self) -> list[int]:
        """Those of a group, where it has a dim for the channels in it, after that of the groups."""
        return [k for k in range(1, self.ndim + 1) if k != self.channel_dim]


@lru_cache(maxsize=256)
def group_norm_op(spec: GroupNormSpec) -> FusedOp:
    """(x[, weight][, bias]) -> (normed); outputs are (normed, mean, rstd)."""
    parameters = len(spec.vector_dtypes)
    tensors = 1 + parameters
    weight = () if spec.weight_dtype is None else (1,)
    saved = (0, tensors + 1, tensors + 2, *(weight if spec.activation is None else range(1, tensors)))
    arguments = (spec.placement, *(spec.vector,) * parameters)
    order = tuple(range(tensors))
    return FusedOp(_forward(spec), _backward(spec), 1, saved, arguments, (spec.placement,), order, follows=(0, 0, 0))


def _forward(spec: GroupNormSpec) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.ops.cast(define(fd, spec.mesh, spec.placement, spec.shape, spec.dtype), dtype=spec.compute)
        weight, bias = (of_channels(fd, spec, dtype) for dtype in (spec.weight_dtype, spec.bias_dtype))
        grouped = _grouped(fd, spec, x)
        variance, mean = fd.ops.var_mean(grouped, spec.group_dims, correction=0, keepdim=True)
        rstd = fd.ops.rsqrt(fd.ops.add(variance, spec.eps))
        unit = _together(fd, spec, fd.ops.mul(fd.ops.sub(grouped, mean), rstd), x)
        result = affine(fd, unit, weight, bias)
        result = result if spec.activation is None else activated(fd, spec.activation, result)
        give(fd, fd.ops.cast(result, dtype=spec.dtype), spec.mesh, spec.placement)
        for statistic in (mean, rstd):
            give(fd, fd.ops.squeeze(statistic, [spec.channel_dim + 1]), spec.mesh, spec.statistic)
    return fd


def _backward(spec: GroupNormSpec) -> FusionDefinition:
    """(gradient, x, mean, rstd[, weight][, bias]) -> (dx[, dweight][, dbias]); the bias where an activation reads it.

    With n the normed x and g = weight * dy: dx = rstd * (g - mean(g) - n * mean(g * n)), means over a group.
    """
    with FusionDefinition() as fd:
        dy = fd.ops.cast(define(fd, spec.mesh, spec.placement, spec.shape, spec.dtype), dtype=spec.compute)
        x = fd.ops.cast(define(fd, spec.mesh, spec.placement, spec.shape, spec.dtype), dtype=spec.compute)
        mean, rstd = (
            fd.ops.unsqueeze(
                define(fd, spec.mesh, spec.statistic, spec.statistic_shape, spec.compute), spec.channel_dim + 1
            )
            for _ in range(2)
        )
        weight = of_channels(fd, spec, spec.weight_dtype)
        bias = None if spec.activation is None else of_channels(fd, spec, spec.bias_dtype)
        grouped = fd.ops.mul(fd.ops.sub(_grouped(fd, spec, x), mean), rstd)
        unit = _together(fd, spec, grouped, x)
        if spec.activation is not None:
            before = affine(fd, unit, weight, bias)
            dy = fd.ops.mul(dy, slope(fd, spec.activation, before, spec.dtype))
        scaled = _grouped(fd, spec, dy if weight is None else fd.ops.mul(dy, weight))
        along = fd.ops.mean(fd.ops.mul(scaled, grouped), spec.group_dims, keepdim=True)
        even = fd.ops.mean(scaled, spec.group_dims, keepdim=True)
        d_x = fd.ops.sub(fd.ops.sub(scaled, even), fd.ops.mul(grouped, along))
        d_x = _together(fd, spec, fd.ops.mul(d_x, rstd), x)
        give(fd, fd.ops.cast(d_x, dtype=spec.dtype), spec.mesh, spec.placement)
        if spec.weight_dtype is not None:
            summed = fd.ops.sum(fd.ops.mul(dy, unit), spec.rows)
            give(fd, fd.ops.cast(summed, dtype=spec.weight_dtype), spec.mesh, spec.vector)
        if spec.bias_dtype is not None:
            summed = fd.ops.sum(dy, spec.rows)
            give(fd, fd.ops.cast(summed, dtype=spec.bias_dtype), spec.mesh, spec.vector)
    return fd


def _grouped(fd: FusionDefinition, spec: GroupNormSpec, x: TensorView) -> TensorView:
    """``x`` with two dims in place of the channels': the groups, and the channels in each."""
    sizes: list[object] = [fd.ops.size(x, k) for k in range(spec.ndim)]
    at = spec.channel_dim
    sizes[at : at + 1] = [spec.groups, spec.channels // spec.groups]
    return fd.ops.reshape(x, sizes)  # pyright: ignore[reportArgumentType]


def _together(fd: FusionDefinition, spec: GroupNormSpec, grouped: TensorView, like: TensorView) -> TensorView:
    """``grouped`` in the dims of ``like``."""
    sizes: list[object] = [fd.ops.size(like, k) for k in range(spec.ndim)]
    sizes[spec.channel_dim] = spec.channels
    return fd.ops.reshape(grouped, sizes)  # pyright: ignore[reportArgumentType]
