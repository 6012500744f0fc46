"""The fusions of RMSNorm and AddRMSNorm, forward and backward, on any placement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..frontend import FusionDefinition
from ..ir import DataType, TensorView
from ..mesh import DeviceMesh
from .fused import FusedOp
from .placement import TensorPlacement, define, give, move

_DEFINITIONS = 256


@dataclass(frozen=True)
class NormSpec:
    """All that the fusions of a norm depend on.

    ndim: dims of the activations.  x, at, output, output_grad: where the input, the statistics (and the residual),
    the normed output and its gradient live.  weight_dtype, residual_dtype, bias_dtype: None where there is none.
    zero_centered: rows are multiplied by 1 + weight.
    mesh_id: fusions are bound to the process groups of one mesh object, so equal meshes do not share them.
    """

    ndim: int
    hidden_size: int
    eps: float
    mesh: DeviceMesh | None
    mesh_id: int
    x: TensorPlacement
    at: TensorPlacement
    output: TensorPlacement
    output_grad: TensorPlacement
    dtype: DataType
    weight_dtype: DataType | None
    residual_dtype: DataType | None = None
    bias_dtype: DataType | None = None
    zero_centered: bool = False

    @property
    def shape(self) -> list[int]:
        """Unsharded sizes of the activations."""
        return [-1] * (self.ndim - 1) + [self.hidden_size]

    @property
    def hidden_dim(self) -> int:
        return self.ndim - 1

    @property
    def rows(self) -> list[int]:
        """The dims that a parameter's gradient is summed over."""
        return list(range(self.ndim - 1))

    @property
    def statistic(self) -> TensorPlacement:
        """Where one number per row lives."""
        return self.at.without(self.hidden_dim)

    @property
    def parameter(self) -> TensorPlacement:
        """Where weight and bias live: sharded along a sharded hidden axis, else replicated."""
        return self.at.only(self.hidden_dim)

    @property
    def compute(self) -> DataType:
        """float32, or float64 where a tensor is."""
        dtypes = (self.dtype, self.residual_dtype, self.weight_dtype, self.bias_dtype)
        return DataType.Double if DataType.Double in dtypes else DataType.Float

    @property
    def stored_dtype(self) -> DataType:
        """The dtype in which the sum that is normed is kept for the backward."""
        return self.dtype if self.residual_dtype is None else self.residual_dtype

    @property
    def keeps_input(self) -> bool:
        """Is the input itself what the backward reads?  Else forward returns what it normed, an extra or a result."""
        return self.residual_dtype is None and self.bias_dtype is None and self.x == self.at

    @property
    def shares_gradient(self) -> bool:
        """Have x and the residual one gradient, of one dtype in one place?"""
        return self.residual_dtype is self.dtype and self.x.gradient() == self.at


@lru_cache(maxsize=_DEFINITIONS)
def norm_op(spec: NormSpec) -> FusedOp:
    """(x, weight[, bias][, residual]) -> (normed[, new residual]), with the gradients of all."""
    has_residual = spec.residual_dtype is not None
    has_weight = spec.weight_dtype is not None
    parameters = has_weight + (spec.bias_dtype is not None)
    tensors = 1 + parameters + has_residual
    if spec.keeps_input:
        # tensors are (x[, weight]), outputs (normed, rstd)
        results, saved = 1, (0, 2 + has_weight)
    else:
        # outputs are (normed, sum, rstd); the sum is a result where there is a residual
        results, saved = 1 + has_residual, (tensors + 1, tensors + 2)
    saved = (*saved, 1) if has_weight else saved
    arguments = (spec.x, *(spec.parameter,) * parameters, *(spec.at,) * has_residual)
    gradients = (spec.output_grad, *(spec.at,) * has_residual)
    order = tuple(range(tensors))
    if spec.shares_gradient:
        order = (*order[:-1], 0)
    return FusedOp(_forward(spec), _backward(spec), results, saved, arguments, gradients, order)


def _weight(fd: FusionDefinition, spec: NormSpec) -> TensorView | None:
    """What rows are multiplied by, in the compute dtype, where there is a weight."""
    if spec.weight_dtype is None:
        return None
    weight = define(fd, spec.mesh, spec.parameter, [spec.hidden_size], spec.weight_dtype)
    weight = fd.ops.cast(weight, dtype=spec.compute)
    return fd.ops.add(weight, 1.0) if spec.zero_centered else weight


def _forward(spec: NormSpec) -> FusionDefinition:
    """(x, weight[, bias][, residual]) -> (normed[, sum], rstd)."""
    mesh, compute = spec.mesh, spec.compute
    with FusionDefinition() as fd:
        x = define(fd, mesh, spec.x, spec.shape, spec.dtype)
        weight = _weight(fd, spec)
        total = fd.ops.cast(move(fd, x, mesh, spec.x, spec.at), dtype=compute)
        if spec.bias_dtype is not None:
            bias = define(fd, mesh, spec.parameter, [spec.hidden_size], spec.bias_dtype)
            total = fd.ops.add(total, fd.ops.cast(bias, dtype=compute))
        if spec.residual_dtype is not None:
            residual = define(fd, mesh, spec.at, spec.shape, spec.residual_dtype)
            total = fd.ops.add(fd.ops.cast(residual, dtype=compute), total)
        mean_square = fd.ops.mean(fd.ops.mul(total, total), [-1], keepdim=True)
        rstd = fd.ops.rsqrt(fd.ops.add(mean_square, spec.eps))
        normed = fd.ops.mul(total, rstd)
        normed = normed if weight is None else fd.ops.mul(normed, weight)
        normed = fd.ops.cast(normed, dtype=spec.dtype)
        give(fd, normed, mesh, spec.output, spec.at)
        if not spec.keeps_input:
            give(fd, fd.ops.cast(total, dtype=spec.stored_dtype), mesh, spec.at)
        give(fd, rstd, mesh, spec.statistic)
    return fd


def _backward(spec: NormSpec) -> FusionDefinition:
    """(d normed[, d sum], sum, rstd, weight) -> (dx, dweight[, dbias][, d residual]).

    With n = sum * rstd: d sum = rstd * (w * dy - n * mean(w * dy * n)) + what comes from the new residual.
    """
    mesh, compute = spec.mesh, spec.compute
    with FusionDefinition() as fd:
        gradient = define(fd, mesh, spec.output_grad, spec.shape, spec.dtype)
        from_sum = None
        if spec.residual_dtype is not None:
            from_sum = define(fd, mesh, spec.at, spec.shape, spec.residual_dtype)
        total = define(fd, mesh, spec.at, spec.shape, spec.stored_dtype)
        rstd = define(fd, mesh, spec.statistic, [*spec.shape[:-1], 1], compute)
        weight = _weight(fd, spec)

        dy = fd.ops.cast(move(fd, gradient, mesh, spec.output_grad, spec.at), dtype=compute)
        unit = fd.ops.mul(fd.ops.cast(total, dtype=compute), rstd)
        scaled = dy if weight is None else fd.ops.mul(dy, weight)
        along = fd.ops.mean(fd.ops.mul(scaled, unit), [-1], keepdim=True)
        d_total = fd.ops.mul(fd.ops.sub(scaled, fd.ops.mul(unit, along)), rstd)
        if from_sum is not None:
            d_total = fd.ops.add(d_total, fd.ops.cast(from_sum, dtype=compute))

        give(fd, fd.ops.cast(d_total, dtype=spec.dtype), mesh, spec.x.gradient(), spec.at)
        if spec.weight_dtype is not None:
            d_weight = fd.ops.sum(fd.ops.mul(dy, unit), spec.rows)
            give(fd, fd.ops.cast(d_weight, dtype=spec.weight_dtype), mesh, spec.parameter)
        if spec.bias_dtype is not None:
            give(fd, fd.ops.cast(fd.ops.sum(d_total, spec.rows), dtype=spec.bias_dtype), mesh, spec.parameter)
        if spec.residual_dtype is not None and not spec.shares_gradient:
            give(fd, fd.ops.cast(d_total, dtype=spec.residual_dtype), mesh, spec.at)
    return fd
