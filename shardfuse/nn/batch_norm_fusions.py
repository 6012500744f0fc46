"""The fusions of BatchNorm, by statistics of the batch or by those that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..frontend import FusionDefinition
from ..ir import DataType
from .channel_norm_spec import ChannelNormSpec, affine, of_channels
from .fused import FusedOp
from .placement import TensorPlacement, define, give


@dataclass(frozen=True, kw_only=True)
class BatchNormSpec(ChannelNormSpec):
    """All that the fusions depend on.

    kept_dtype: of the statistics that are kept and normed by; None where the batch's own are.
    """

    kept_dtype: DataType | None

    @property
    def other_dtypes(self) -> tuple[DataType | None, ...]:
        return self.weight_dtype, self.bias_dtype, self.kept_dtype

    @property
    def vector(self) -> TensorPlacement:
        """Everywhere: nothing cuts the channels."""
        return self.placement.replicated()


@lru_cache(maxsize=256)
def batch_norm_op(spec: BatchNormSpec) -> FusedOp:
    """(x[, weight][, bias][, kept mean, kept variance]) -> (normed[, mean, unbiased variance]).

    The statistics are results, without gradients, where they are the batch's own.
    """
    parameters = len(spec.vector_dtypes)
    kept = 0 if spec.kept_dtype is None else 2
    tensors = 1 + parameters + kept
    if kept:
        results, statistics = 1, (1 + parameters, 2 + parameters)
    else:  # outputs are (normed, mean, unbiased variance, rstd)
        results, statistics = 3, (tensors + 1, tensors + 3)
    saved = (0, *statistics, *(() if spec.weight_dtype is None else (1,)))
    arguments = (spec.placement, *(spec.vector,) * (parameters + kept))
    order = tuple(range(1 + parameters))
    return FusedOp(_forward(spec), _backward(spec), results, saved, arguments, (spec.placement,), order)


def _forward(spec: BatchNormSpec) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.ops.cast(define(fd, spec.mesh, spec.placement, spec.shape, spec.dtype), dtype=spec.compute)
        weight, bias = (of_channels(fd, spec, dtype) for dtype in (spec.weight_dtype, spec.bias_dtype))
        if spec.kept_dtype is not None:
            mean, variance = (of_channels(fd, spec, spec.kept_dtype) for _ in range(2))
            assert mean is not None
            assert variance is not None
        else:
            variance, mean = fd.ops.var_mean(x, spec.rows, correction=0, keepdim=True)
        rstd = fd.ops.rsqrt(fd.ops.add(variance, spec.eps))
        result = affine(fd, fd.ops.mul(fd.ops.sub(x, mean), rstd), weight, bias)
        give(fd, fd.ops.cast(result, dtype=spec.dtype), spec.mesh, spec.placement)
        if spec.kept_dtype is None:
            count = fd.ops.size(x, spec.rows)
            unbiased = fd.ops.mul(variance, fd.ops.div(count, fd.ops.sub(count, 1)))
            for statistic in (mean, unbiased, rstd):
                give(fd, fd.ops.squeeze(statistic, spec.rows), spec.mesh, spec.vector)
    return fd


def _backward(spec: BatchNormSpec) -> FusionDefinition:
    """(gradient, x, mean, rstd or kept variance[, weight]) -> (dx[, dweight][, dbias]).

    With n the normed x and g = weight * dy: dx = rstd * (g - mean(g) - n * mean(g * n)) by the batch's own statistics,
    which x moves too, and rstd * g by those that are kept.
    """
    with FusionDefinition() as fd:
        dy = fd.ops.cast(define(fd, spec.mesh, spec.placement, spec.shape, spec.dtype), dtype=spec.compute)
        x = fd.ops.cast(define(fd, spec.mesh, spec.placement, spec.shape, spec.dtype), dtype=spec.compute)
        mean, rstd = (of_channels(fd, spec, spec.kept_dtype or spec.compute) for _ in range(2))
        assert mean is not None
        assert rstd is not None
        rstd = rstd if spec.kept_dtype is None else fd.ops.rsqrt(fd.ops.add(rstd, spec.eps))
        weight = of_channels(fd, spec, spec.weight_dtype)
        unit = fd.ops.mul(fd.ops.sub(x, mean), rstd)
        # weight is the same for all of a channel: it comes out of the means, which are the parameters' gradients
        along, even = fd.ops.sum(fd.ops.mul(dy, unit), spec.rows), fd.ops.sum(dy, spec.rows)
        d_x = dy
        if spec.kept_dtype is None:
            share = fd.ops.reciprocal(fd.ops.size(x, spec.rows))
            flags = [k != spec.channel_dim for k in range(spec.ndim)]
            means = [fd.ops.broadcast(fd.ops.mul(t, share), flags) for t in (even, along)]
            d_x = fd.ops.sub(fd.ops.sub(dy, means[0]), fd.ops.mul(unit, means[1]))
        d_x = fd.ops.mul(d_x, rstd if weight is None else fd.ops.mul(rstd, weight))
        give(fd, fd.ops.cast(d_x, dtype=spec.dtype), spec.mesh, spec.placement)
        for summed, dtype in ((along, spec.weight_dtype), (even, spec.bias_dtype)):
            if dtype is not None:
                give(fd, fd.ops.cast(summed, dtype=dtype), spec.mesh, spec.vector)
    return fd
