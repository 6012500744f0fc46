"""The fusion of a norm whose result is quantised: `row_norm_fusions.py`, with scales and a cast behind it."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..frontend import FusionDefinition
from ..ir import DataType
from .fused import FusedOp
from .placement import TensorPlacement, define, give
from .quantizing_fusions import ScaleKind, block_strides, quantized
from .row_norm_fusions import RowNormSpec, normed_rows


def scales_at(output: TensorPlacement, ndim: int, scales: ScaleKind) -> TensorPlacement:
    """Where scales live, [..., 1] or [..., blocks], of values that live at ``output``."""
    return output if scales == "block" else output.without(ndim - 1)


@lru_cache(maxsize=256)
def quantized_norm_op(spec: RowNormSpec, scales: ScaleKind, target: torch.dtype) -> FusedOp:
    """(x[, weight][, bias][, input_bias], residual[, scale]) -> (values[, scales], new residual).  No gradients."""
    whole = (spec.at.replicated(),) if scales == "given" else ()
    return FusedOp(
        forward=_forward(spec, scales, target),
        backward=None,
        results=2 + (scales != "given"),
        saved=(),
        arguments=(spec.x, *(spec.parameter,) * len(spec.parameters), spec.at, *whole),
        gradients=(),
        order=(),
        follows=(1 + len(spec.parameters),) * 3 if scales == "block" else (),  # the residual
    )


def _forward(spec: RowNormSpec, scales: ScaleKind, target: torch.dtype) -> FusionDefinition:
    mesh, is_block = spec.mesh, scales == "block"
    with FusionDefinition() as fd:
        rows = normed_rows(fd, spec)
        given = None
        if scales == "given":
            given = fd.ops.cast(define(fd, mesh, spec.at.replicated(), [1], DataType.Float), dtype=spec.compute)
        values, scale = quantized(fd, rows.normed, scales, target, given)
        give(fd, values, mesh, spec.output, spec.at)
        if scale is not None:
            here, there = (scales_at(at, spec.ndim, scales) for at in (spec.at, spec.output))
            give(fd, scale, mesh, there, here, block_strides(spec.ndim) if is_block else None)
        give(fd, fd.ops.cast(rows.total, dtype=spec.sum_dtype), mesh, spec.at)
    return fd
