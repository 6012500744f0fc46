"""LayerNorm and RMSNorm with their neighbours, forward."""

from __future__ import annotations

import torch
from torch.nn import functional

from shardfuse import FusionDefinition
from shardfuse.ir.tensor_view import TensorView

from ..workload import EPS, Case, Draw, Tensors, Workload, define

HALF_SIZES = (768, 1024, 1280, 1600, 2048, 4096, 5140, 12288, 16384, 20480)
RMS_CASES = (
    *("32768x1024", "32768x4096", "16384x8192", "16384x16384"),
    *("8192x32768", "4096x65536", "2048x131072", "1024x262144"),
)


def standardise(fd: FusionDefinition, x: TensorView, dims: list[int]) -> TensorView:
    """(x - mean) / sqrt(var + eps)."""
    var, mean = fd.ops.var_mean(x, dims, correction=0, keepdim=True)
    return fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, EPS)))


def scale_to_one(fd: FusionDefinition, x: TensorView) -> TensorView:
    """x / sqrt(mean(x^2) + eps), along the last axis."""
    mean_square = fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)
    return fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(mean_square, EPS)))


# layer_norm(x + bias + residual bias)


def _layer_norm_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [draw.normal(case.shape, case.dtype), *(draw.normal([case.columns], case.dtype) for _ in range(4))]


def _layer_norm_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = define(fd, [-1, case.columns], case.dtype)
        row = [define(fd, [case.columns], case.dtype) for _ in range(4)]
        x, bias, residual_bias, weight, shift = (fd.ops.cast(t, dtype=case.compute) for t in (x, *row))
        unit = standardise(fd, fd.ops.add(fd.ops.add(x, bias), residual_bias), [-1])
        fd.add_output(fd.ops.cast(fd.ops.add(fd.ops.mul(unit, weight), shift), dtype=case.data_type))
    return fd


def _layer_norm(case: Case, x: torch.Tensor, *row: torch.Tensor) -> Tensors:
    bias, residual_bias, weight, shift = row
    return (functional.layer_norm(x + bias + residual_bias, (case.columns,), weight, shift, EPS),)


# rms_norm(x)


def _rms_norm_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [draw.normal(case.shape, case.dtype), draw.normal([case.columns], case.dtype)]


def _rms_norm_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = define(fd, [-1, case.columns], case.dtype)
        weight = define(fd, [case.columns], case.dtype)
        unit = scale_to_one(fd, fd.ops.cast(x, dtype=case.compute))
        normed = fd.ops.mul(unit, fd.ops.cast(weight, dtype=case.compute))
        fd.add_output(fd.ops.cast(normed, dtype=case.data_type))
    return fd


def _rms_norm(case: Case, x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    return (functional.rms_norm(x, (case.columns,), weight, EPS),)


# gelu(rms_norm(x + bias + residual)), and the sum


def _add_rms_norm_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    wide = [draw.normal(case.shape, case.dtype) for _ in range(2)]
    return [*wide, *(draw.normal([case.columns], case.dtype) for _ in range(2))]


def _add_rms_norm_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        wide = [define(fd, [-1, case.columns], case.dtype) for _ in range(2)]
        row = [define(fd, [case.columns], case.dtype) for _ in range(2)]
        x, residual, bias, weight = (fd.ops.cast(t, dtype=case.compute) for t in (*wide, *row))
        total = fd.ops.add(fd.ops.add(x, bias), residual)
        normed = fd.ops.gelu(fd.ops.mul(scale_to_one(fd, total), weight))
        fd.add_output(fd.ops.cast(normed, dtype=case.data_type))
        fd.add_output(fd.ops.cast(total, dtype=case.data_type))
    return fd


def _add_rms_norm(
    case: Case, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor
) -> Tensors:
    total = x.to(case.accurate) + bias + residual
    normed = functional.rms_norm(total, (case.columns,), weight.to(total.dtype), EPS)
    return functional.gelu(normed).to(x.dtype), total.to(x.dtype)


def _add_rms_norm_reference(case: Case, x: torch.Tensor, *rest: torch.Tensor) -> Tensors:
    residual, bias, weight = rest
    total = x + bias + residual
    return functional.gelu(functional.rms_norm(total, (case.columns,), weight, EPS)), total


LAYER_NORM = Workload(
    name="layer_norm",
    title="layer_norm(x + bias + residual bias)",
    cases=tuple(f"8192x{n}:float16" for n in HALF_SIZES),
    tiny=("5x16:float16", "7x51:float16", "3x1030:float32"),
    arguments=_layer_norm_arguments,
    fusion=_layer_norm_fusion,
    eager=_layer_norm,
    reference=_layer_norm,
    rows=(True, False, False, False, False),
)
RMS_NORM = Workload(
    name="rms_norm",
    title="rms_norm(x)",
    cases=RMS_CASES,
    tiny=("5x16", "7x51", "3x1030:float32"),
    arguments=_rms_norm_arguments,
    fusion=_rms_norm_fusion,
    eager=_rms_norm,
    reference=_rms_norm,
    rows=(True, False),
)
ADD_RMS_NORM = Workload(
    name="add_rms_norm",
    title="gelu(rms_norm(x + bias + residual)), sum kept",
    cases=("32768x4096", "16384x8192", "16384x5139"),
    tiny=("5x16", "7x51"),
    arguments=_add_rms_norm_arguments,
    fusion=_add_rms_norm_fusion,
    eager=_add_rms_norm,
    reference=_add_rms_norm_reference,
    rows=(True, True, False, False),
    sums=(False, False),
)
WORKLOADS = (LAYER_NORM, RMS_NORM, ADD_RMS_NORM)
