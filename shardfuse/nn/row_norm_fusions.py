"""The fusions of norms over the last axis, with what stands before them: a bias, dropout, a residual sum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

from ..frontend import FusionDefinition
from ..ir import DataType, TensorView
from .fused import FusedOp
from .placed_spec import FusionSpec
from .placement import WHOLE, TensorPlacement, define, give, move


@dataclass(frozen=True, kw_only=True)
class RowNormSpec(FusionSpec):
    """All that the fusions depend on.

    centered: the mean is subtracted (a LayerNorm); else not (an RMSNorm).  dropout: probability that an element of x is
    dropped; None where none can be, and no mask is made.  weight_offset: what is added to the weight.
    x, at, output, output_grad: where the input, the statistics (and the residual), the normed output and its gradient
    live.  A dtype of a tensor that there is not is None.
    is_deferred: gradients of parameters are this rank's summands, with an axis of 1 for each mesh dim that cuts rows.
    """

    hidden_size: int
    eps: float
    centered: bool
    dropout: float | None
    weight_offset: float = 0.0
    x: TensorPlacement = WHOLE
    at: TensorPlacement = WHOLE
    output: TensorPlacement = WHOLE
    output_grad: TensorPlacement = WHOLE
    weight_dtype: DataType | None = None
    bias_dtype: DataType | None = None
    input_bias_dtype: DataType | None = None
    residual_dtype: DataType | None = None
    is_deferred: bool = False

    @property
    def shape(self) -> list[int]:
        """Unsharded sizes of the activations."""
        return [-1] * (self.ndim - 1) + [self.hidden_size]

    @property
    def row_shape(self) -> list[int]:
        """One number per row, with the hidden axis kept."""
        return [-1] * (self.ndim - 1) + [1]

    @property
    def rows(self) -> list[int]:
        """The dims that a parameter's gradient is summed over."""
        return list(range(self.ndim - 1))

    @property
    def statistic(self) -> TensorPlacement:
        """Where one number per row lives."""
        return self.at.without(self.ndim - 1)

    @property
    def parameter(self) -> TensorPlacement:
        """Where parameters live: sharded along a sharded hidden axis, else replicated."""
        return self.at.only(self.ndim - 1)

    @property
    def parameters(self) -> list[DataType]:
        """Those of weight, bias and input bias that there are."""
        dtypes = (self.weight_dtype, self.bias_dtype, self.input_bias_dtype)
        return [dtype for dtype in dtypes if dtype is not None]

    @property
    def other_dtypes(self) -> tuple[DataType | None, ...]:
        return (self.residual_dtype, *self.parameters)

    @property
    def sum_dtype(self) -> DataType:
        """That of the sum that is normed, where forward returns it."""
        return self.dtype if self.residual_dtype is None else self.residual_dtype

    @property
    def keeps_wide_sum(self) -> bool:
        """Is the sum kept for the backward beside the new residual, which is narrower than x?"""
        return self.residual_dtype is not None and self.residual_dtype.itemsize < self.dtype.itemsize

    @property
    def kept_dtype(self) -> DataType:
        """That of the sum as the backward reads it."""
        return self.compute if self.keeps_wide_sum else self.sum_dtype

    @property
    def keeps_input(self) -> bool:
        """Is the input itself what the backward reads?  Else forward returns what it normed, an extra or a result."""
        is_alone = self.residual_dtype is None and self.input_bias_dtype is None and self.dropout is None
        return is_alone and self.x == self.at

    @property
    def shares_gradient(self) -> bool:
        """Have x and the residual one gradient, of one dtype in one place?"""
        return self.residual_dtype is self.dtype and self.dropout is None and self.x.gradient() == self.at

    @property
    def keep_scale(self) -> float:
        """What kept elements are multiplied by."""
        return 0.0 if self.dropout in (None, 1.0) else 1.0 / (1.0 - self.dropout)


@lru_cache(maxsize=256)
def row_norm_op(spec: RowNormSpec) -> FusedOp:
    """(x[, weight][, bias][, input_bias][, residual]) -> (normed[, new residual]), with the gradients of all."""
    has_residual = spec.residual_dtype is not None
    tensors = 1 + len(spec.parameters) + has_residual
    # outputs are (normed[, sum][, wide sum], rstd[, mean][, mask]); the sum is a result where there is a residual
    total = 0 if spec.keeps_input else tensors + 1 + spec.keeps_wide_sum
    first = tensors + 1 + (not spec.keeps_input) + spec.keeps_wide_sum
    extras = range(first, first + 1 + spec.centered + (spec.dropout is not None))
    saved = (total, *extras, *((1,) if spec.weight_dtype is not None else ()))
    order = tuple(range(tensors))
    return FusedOp(
        forward=_forward(spec),
        backward=_backward(spec),
        results=1 + has_residual,
        saved=saved,
        arguments=(spec.x, *(spec.parameter,) * len(spec.parameters), *(spec.at,) * has_residual),
        gradients=(spec.output_grad, *(spec.at,) * has_residual),
        order=(*order[:-1], 0) if spec.shares_gradient else order,
        deferred=None if spec.is_deferred else partial(row_norm_op, replace(spec, is_deferred=True)),
    )


def _parameter(fd: FusionDefinition, spec: RowNormSpec, dtype: DataType | None) -> TensorView | None:
    """A parameter in the compute dtype, where there is one."""
    if dtype is None:
        return None
    return fd.ops.cast(define(fd, spec.mesh, spec.parameter, [spec.hidden_size], dtype), dtype=spec.compute)


def _weight(fd: FusionDefinition, spec: RowNormSpec) -> TensorView | None:
    weight = _parameter(fd, spec, spec.weight_dtype)
    return fd.ops.add(weight, spec.weight_offset) if weight is not None and spec.weight_offset else weight


@dataclass(frozen=True)
class NormedRows:
    """``normed`` in the compute dtype, and the ``total`` that was normed; what it was multiplied by, and its mean."""

    normed: TensorView
    total: TensorView
    rstd: TensorView
    mean: TensorView | None
    mask: TensorView | None


def normed_rows(fd: FusionDefinition, spec: RowNormSpec) -> NormedRows:
    """Declare (x[, weight][, bias][, input_bias][, residual]), and norm them where ``spec.at`` says."""
    mesh, compute = spec.mesh, spec.compute
    x = define(fd, mesh, spec.x, spec.shape, spec.dtype)
    weight, bias = _weight(fd, spec), _parameter(fd, spec, spec.bias_dtype)
    total = fd.ops.cast(move(fd, x, mesh, spec.x, spec.at), dtype=compute)
    input_bias = _parameter(fd, spec, spec.input_bias_dtype)
    total = total if input_bias is None else fd.ops.add(total, input_bias)
    mask = None
    if spec.dropout is not None:
        sizes = [fd.ops.size(total, k) for k in range(spec.ndim)]
        drawn = fd.ops.uniform(0.0, 1.0, sizes)  # pyright: ignore[reportArgumentType]
        mask = fd.ops.ge(drawn, spec.dropout)
        total = fd.ops.mul(fd.ops.mul(total, mask), spec.keep_scale)  # as torch, where a NaN that is dropped stays one
    if spec.residual_dtype is not None:
        residual = define(fd, mesh, spec.at, spec.shape, spec.residual_dtype)
        total = fd.ops.add(fd.ops.cast(residual, dtype=compute), total)
    unit, rstd, mean = _unit(fd, spec, total)
    normed = unit if weight is None else fd.ops.mul(unit, weight)
    return NormedRows(normed if bias is None else fd.ops.add(normed, bias), total, rstd, mean, mask)


def _forward(spec: RowNormSpec) -> FusionDefinition:
    """(x[, weight][, bias][, input_bias][, residual]) -> (normed[, sum][, wide sum], rstd[, mean][, mask])."""
    mesh = spec.mesh
    with FusionDefinition() as fd:
        rows = normed_rows(fd, spec)
        give(fd, fd.ops.cast(rows.normed, dtype=spec.dtype), mesh, spec.output, spec.at)
        if not spec.keeps_input:
            give(fd, fd.ops.cast(rows.total, dtype=spec.sum_dtype), mesh, spec.at)
        if spec.keeps_wide_sum:
            give(fd, rows.total, mesh, spec.at)
        give(fd, rows.rstd, mesh, spec.statistic)
        if rows.mean is not None:
            give(fd, rows.mean, mesh, spec.statistic)
        if rows.mask is not None:
            give(fd, rows.mask, mesh, spec.at)
    return fd


def _unit(
    fd: FusionDefinition, spec: RowNormSpec, total: TensorView
) -> tuple[TensorView, TensorView, TensorView | None]:
    """The rows in units of their deviation (or root mean square), what they were multiplied by, and their mean."""
    if not spec.centered:
        rstd = fd.ops.rsqrt(fd.ops.add(fd.ops.mean(fd.ops.mul(total, total), [-1], keepdim=True), spec.eps))
        return fd.ops.mul(total, rstd), rstd, None
    variance, mean = fd.ops.var_mean(total, [-1], correction=0, keepdim=True)
    rstd = fd.ops.rsqrt(fd.ops.add(variance, spec.eps))
    return fd.ops.mul(fd.ops.sub(total, mean), rstd), rstd, mean


def _backward(spec: RowNormSpec) -> FusionDefinition:
    """(d normed[, d sum], sum, rstd[, mean][, mask][, weight]) -> (dx[, d parameters...][, d residual]).

    With n the normed row before weight and bias, and g = w * dy:
    d sum = rstd * (g - n * mean(g * n) [- mean(g), where the mean was subtracted]) + what comes from the new residual.
    """
    mesh, compute = spec.mesh, spec.compute
    with FusionDefinition() as fd:
        gradient = define(fd, mesh, spec.output_grad, spec.shape, spec.dtype)
        from_sum = None
        if spec.residual_dtype is not None:
            from_sum = define(fd, mesh, spec.at, spec.shape, spec.residual_dtype)
        total = define(fd, mesh, spec.at, spec.shape, spec.kept_dtype)
        rstd = define(fd, mesh, spec.statistic, spec.row_shape, compute)
        mean = define(fd, mesh, spec.statistic, spec.row_shape, compute) if spec.centered else None
        mask = None if spec.dropout is None else define(fd, mesh, spec.at, spec.shape, DataType.Bool)
        weight = _weight(fd, spec)
        dy = fd.ops.cast(move(fd, gradient, mesh, spec.output_grad, spec.at), dtype=compute)
        away = fd.ops.cast(total, dtype=compute)
        away = away if mean is None else fd.ops.sub(away, mean)
        unit = fd.ops.mul(away, rstd)
        scaled = dy if weight is None else fd.ops.mul(dy, weight)
        along = fd.ops.mean(fd.ops.mul(scaled, unit), [-1], keepdim=True)
        d_total = fd.ops.sub(scaled, fd.ops.mul(unit, along))
        if spec.centered:
            d_total = fd.ops.sub(d_total, fd.ops.mean(scaled, [-1], keepdim=True))
        d_total = fd.ops.mul(d_total, rstd)
        if from_sum is not None:
            d_total = fd.ops.add(d_total, fd.ops.cast(from_sum, dtype=compute))
        d_x = d_total if mask is None else fd.ops.mul(fd.ops.mul(d_total, mask), spec.keep_scale)

        give(fd, fd.ops.cast(d_x, dtype=spec.dtype), mesh, spec.x.gradient(), spec.at)
        summands = ((spec.weight_dtype, None), (spec.bias_dtype, dy), (spec.input_bias_dtype, d_x))
        for dtype, summand in summands:
            if dtype is not None:
                _give_sum(fd, spec, fd.ops.mul(dy, unit) if summand is None else summand, dtype)
        if spec.residual_dtype is not None and not spec.shares_gradient:
            give(fd, fd.ops.cast(d_total, dtype=spec.residual_dtype), mesh, spec.at)
    return fd


def _give_sum(fd: FusionDefinition, spec: RowNormSpec, summand: TensorView, dtype: DataType) -> None:
    """The sum over all rows; of this rank's rows alone, where that is deferred."""
    if not spec.is_deferred or spec.mesh is None:
        give(fd, fd.ops.cast(fd.ops.sum(summand, spec.rows), dtype=dtype), spec.mesh, spec.parameter)
        return
    over, kept = list(spec.rows), list[int]()  # mesh dimensions, in the order of the axes that they have
    for dim in reversed(spec.rows):
        cut = [k for k, d in enumerate(spec.at.shards) if d == dim]
        if cut:
            sizes: list[object] = [fd.ops.size(summand, k) for k in range(summand.ndim)]
            sizes[dim : dim + 1] = [*(spec.mesh.shape[k] for k in cut), -1]
            summand = fd.ops.reshape(summand, sizes)  # pyright: ignore[reportArgumentType]
            over = [axis if axis < dim else axis + len(cut) for axis in over]
            kept = [*cut, *kept]
    summed = fd.ops.cast(fd.ops.sum(summand, over), dtype=dtype)
    shards = [kept.index(k) if k in kept else None for k in range(spec.mesh.ndim)]
    give(fd, summed, spec.mesh, TensorPlacement(tuple(shards), (False,) * spec.mesh.ndim))
