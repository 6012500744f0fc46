"""Fusions that quantise what they make: a norm or an activation, the scale of a row or block, and the cast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from ..frontend import FusionDefinition
from ..ir import DataType, TensorView
from .activation_functions import share_of

BLOCK = 128
"""Elements of a row that share a scale, as the 1 x 128 blocks of scaled matmuls do."""
SMALLEST = 1e-12
"""The least magnitude of a row or block that its scale is computed from, so that zeros are not divided by zero."""
ScaleKind = Literal["row", "block", "given"]
"""Is there a scale for each row, for each block of a row, or one that the caller gives?"""
Work = Literal["none", "rms_norm", "layer_norm", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class Quantization:
    """What a fusion depends on.

    columns: of a row.  dtypes: of the tensors, of which there are ``tensors``, and of weight and bias, None where there
    is none.  scales: of rows, of blocks, or one that is given.  target: the float8 dtype of the result.
    """

    work: Work
    columns: int
    dtypes: tuple[torch.dtype | None, ...]
    tensors: int
    eps: float
    scales: ScaleKind
    target: torch.dtype

    @property
    def compute(self) -> DataType:
        return DataType.Double if torch.float64 in self.dtypes else DataType.Float


@lru_cache(maxsize=256)
def quantizing_fusion(spec: Quantization) -> FusionDefinition:
    """(tensors [rows, columns]..., weight, bias, scale) -> (values[, scales][, residual + input]).

    A scale that is given is no output.
    """
    dense = spec.columns > 1 or None  # an axis of one element has no stride to speak of
    with FusionDefinition() as fd:
        rows = [
            fd.define_tensor([-1, spec.columns], contiguity=[False, dense], dtype=DataType.from_torch(t))
            for t in spec.dtypes[: spec.tensors]
            if t is not None
        ]
        vectors = [
            None if t is None else fd.define_tensor([spec.columns], contiguity=[dense], dtype=DataType.from_torch(t))
            for t in spec.dtypes[spec.tensors :]
        ]
        given = None
        if spec.scales == "given":
            given = fd.ops.cast(fd.define_tensor([1], contiguity=[None], dtype=DataType.Float), dtype=spec.compute)
        made, total = _worked(fd, spec, [fd.ops.cast(t, dtype=spec.compute) for t in rows], vectors)
        values, scale = quantized(fd, made, spec.scales, spec.target, given)
        fd.add_output(values)
        if scale is not None:
            fd.add_output(scale, stride_order=block_strides(2) if spec.scales == "block" else None)
        if total is not None:
            fd.add_output(fd.ops.cast(total, dtype=rows[1].dtype))
    return fd


def _worked(
    fd: FusionDefinition, spec: Quantization, rows: list[TensorView], vectors: list[TensorView | None]
) -> tuple[TensorView, TensorView | None]:
    """The result before it is quantised; and the sum that was normed, where there is a residual."""
    x = rows[0]
    if spec.work == "none":
        return x, None
    if spec.work != "rms_norm" and spec.work != "layer_norm":
        # Not fd.ops.gelu, whose results below 0 are right to the largest of a row alone, and a block may have none of
        # those: kernels' are off by 3 % between -8 and -4, torch's, which is run on a CPU, by all of the result.
        gate = fd.ops.mul(x, share_of(fd, spec.work, x))
        return gate if len(rows) == 1 else fd.ops.mul(gate, rows[1]), None
    total = fd.ops.add(x, rows[1]) if len(rows) == 2 else None
    x = x if total is None else total
    if spec.work == "layer_norm":
        x = fd.ops.sub(x, fd.ops.mean(x, [-1], keepdim=True))
    variance = fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)
    x = fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(variance, spec.eps)))
    weight, bias = (None if v is None else fd.ops.cast(v, dtype=spec.compute) for v in vectors)
    x = x if weight is None else fd.ops.mul(x, weight)
    return x if bias is None else fd.ops.add(x, bias), total


def quantized(
    fd: FusionDefinition, made: TensorView, scales: ScaleKind, target: torch.dtype, given: TensorView | None
) -> tuple[TensorView, TensorView | None]:
    """``made``, [..., columns], divided by its scales and cast; and the float32 scales that are made of it here.

    given: one scale, in the dtype of ``made``, where there is one.  Scales of blocks have no axis of their elements.
    """
    largest, compute = torch.finfo(target).max, made.dtype
    sizes: Any = [fd.ops.size(made, k) for k in range(made.ndim)]
    if scales == "block":
        made = fd.ops.reshape(made, [*sizes[:-1], sizes[-1] // BLOCK, BLOCK])
    scale, divisor = None, given
    if given is None:
        # Without the axis of one element, so that blocks' scales, as they are stored, are what the kernel computes.
        magnitude = fd.ops.max(fd.ops.abs(made), [-1], keepdim=scales == "row")
        scale = fd.ops.div(fd.ops.maximum(magnitude, SMALLEST), largest)
        scale = fd.ops.cast(scale, dtype=DataType.Float)
        divisor = fd.ops.cast(scale, dtype=compute)
    assert divisor is not None, "a scale is given or made"
    if scales == "block":
        divisor = fd.ops.broadcast(divisor, [*[False] * (made.ndim - 1), True])
    values = fd.ops.clamp(fd.ops.div(made, divisor), -largest, largest)
    values = fd.ops.cast(values, dtype=DataType.from_torch(target))
    return fd.ops.reshape(values, sizes) if scales == "block" else values, scale


def block_strides(ndim: int) -> list[int]:
    """The order of the dims of blocks' scales in memory: those of all rows of one column of blocks follow one another.

    Of each dim how many are stored inside of it, as ``add_output`` takes it.
    """
    return [*range(ndim - 2, -1, -1), ndim - 1]
