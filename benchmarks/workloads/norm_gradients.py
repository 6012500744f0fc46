"""Gradients that go along rows (dx) and down columns (dw, db) at once: mixed orders of one read."""

from __future__ import annotations

import torch
from torch.nn import functional

from shardfuse import FusionDefinition
from shardfuse.ir.tensor_view import TensorView

from ..workload import EPS, Case, Draw, Tensors, Workload, define

LAYER_NORM_CASES = ("576000x384", "131072x1024", "32768x4096", "16384x5140", "16384x8192")
RMS_NORM_CASES = (
    *("576000x384", "131072x1024", "32768x4096", "16384x5120"),
    *("16384x8192", "8192x16384", "8192x32768"),
)
ROOT_2 = 2**0.5
ROOT_2_PI = (2 * torch.pi) ** 0.5


def _moments(x: torch.Tensor, dtype: torch.dtype, rows: int = 1 << 15) -> Tensors:
    """Mean and 1 / sqrt(var + eps) of each row, [rows, 1], a few rows at a time."""
    pieces = [torch.var_mean(piece.to(dtype), -1, correction=0, keepdim=True) for piece in x.split(rows)]
    return torch.cat([m for _, m in pieces]), torch.rsqrt(torch.cat([v for v, _ in pieces]) + EPS)


def standard_gradient(fd: FusionDefinition, unit: TensorView, g: TensorView, rstd: TensorView) -> TensorView:
    """The gradient of what was standardised to ``unit``, from that of ``unit``."""
    mean = fd.ops.mean(g, [-1], keepdim=True)
    along = fd.ops.mean(fd.ops.mul(g, unit), [-1], keepdim=True)
    return fd.ops.mul(fd.ops.sub(fd.ops.sub(g, mean), fd.ops.mul(unit, along)), rstd)


# layer_norm: dx, dw, db


def _layer_norm_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    x, dy = (draw.normal(case.shape, case.dtype) for _ in range(2))
    return [x, dy, draw.normal([case.columns], case.dtype), *_moments(x, case.accurate)]


def _layer_norm_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x, dy = (define(fd, [-1, case.columns], case.dtype) for _ in range(2))
        weight = define(fd, [case.columns], case.dtype)
        mean, rstd = (define(fd, [-1, 1], case.accurate) for _ in range(2))
        x, dy, weight = (fd.ops.cast(t, dtype=case.compute) for t in (x, dy, weight))
        unit = fd.ops.mul(fd.ops.sub(x, mean), rstd)
        dx = standard_gradient(fd, unit, fd.ops.mul(dy, weight), rstd)
        for t in (dx, fd.ops.sum(fd.ops.mul(dy, unit), [0]), fd.ops.sum(dy, [0])):
            fd.add_output(fd.ops.cast(t, dtype=case.data_type))
    return fd


def _layer_norm_eager(
    case: Case, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, *moments: torch.Tensor
) -> Tensors:
    if not x.is_cuda:  # torch has it with moments in float32 on a GPU only
        return _layer_norm_reference(case, x, dy, weight)
    backward = torch.ops.aten.native_layer_norm_backward.default
    return tuple(backward(dy, x, [case.columns], *moments, weight, weight, [True, True, True]))


def _layer_norm_reference(
    case: Case, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor
) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    y = functional.layer_norm(leaves[0], (case.columns,), leaves[1], leaves[2], EPS)
    return torch.autograd.grad(y, leaves, dy)


# rms_norm: dx, dw


def _rms_norm_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    x, dy = (draw.normal(case.shape, case.dtype) for _ in range(2))
    squares = [piece.to(case.accurate).square().mean(-1, keepdim=True) for piece in x.split(1 << 15)]
    return [x, dy, draw.normal([case.columns], case.dtype), torch.rsqrt(torch.cat(squares) + EPS)]


def _rms_norm_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x, dy = (define(fd, [-1, case.columns], case.dtype) for _ in range(2))
        weight = define(fd, [case.columns], case.dtype)
        rstd = define(fd, [-1, 1], case.accurate)
        x, dy, weight = (fd.ops.cast(t, dtype=case.compute) for t in (x, dy, weight))
        unit = fd.ops.mul(x, rstd)
        g = fd.ops.mul(dy, weight)
        along = fd.ops.mean(fd.ops.mul(g, unit), [-1], keepdim=True)
        dx = fd.ops.mul(fd.ops.sub(g, fd.ops.mul(unit, along)), rstd)
        for t in (dx, fd.ops.sum(fd.ops.mul(dy, unit), [0])):
            fd.add_output(fd.ops.cast(t, dtype=case.data_type))
    return fd


def _rms_norm_eager(case: Case, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> Tensors:
    if not x.is_cuda:  # torch has it with moments in float32 on a GPU only
        return _rms_norm_reference(case, x, dy, weight, rstd)
    backward = torch.ops.aten._fused_rms_norm_backward.default
    return tuple(backward(dy, x, [case.columns], rstd, weight, [True, True]))


def _rms_norm_reference(
    case: Case, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, _: torch.Tensor
) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(functional.rms_norm(leaves[0], (case.columns,), leaves[1], EPS), leaves, dy)


# gelu(x + bias): dx, dbias


def _bias_gelu_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [*(draw.normal(case.shape, case.dtype) for _ in range(2)), draw.normal([case.columns], case.dtype)]


def _bias_gelu_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x, dy = (define(fd, [-1, case.columns], case.dtype) for _ in range(2))
        bias = define(fd, [case.columns], case.dtype)
        x, dy, bias = (fd.ops.cast(t, dtype=case.compute) for t in (x, dy, bias))
        z = fd.ops.add(x, bias)
        below = fd.ops.mul(fd.ops.add(fd.ops.erf(fd.ops.mul(z, 1 / ROOT_2)), 1.0), 0.5)
        density = fd.ops.mul(fd.ops.exp(fd.ops.mul(fd.ops.mul(z, z), -0.5)), 1 / ROOT_2_PI)
        dx = fd.ops.mul(dy, fd.ops.add(below, fd.ops.mul(z, density)))
        for t in (dx, fd.ops.sum(dx, [0])):
            fd.add_output(fd.ops.cast(t, dtype=case.data_type))
    return fd


def _bias_gelu_eager(case: Case, x: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor) -> Tensors:
    dx = torch.ops.aten.gelu_backward(dy.to(case.accurate), x.to(case.accurate) + bias)
    return dx.to(x.dtype), dx.sum(0).to(x.dtype)


def _bias_gelu_reference(case: Case, x: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (x, bias)]
    return torch.autograd.grad(functional.gelu(leaves[0] + leaves[1]), leaves, dy)


# silu(gate + bias) * up: dgate, dup, dbias


def _gated_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [*(draw.normal(case.shape, case.dtype) for _ in range(3)), draw.normal([case.columns], case.dtype)]


def _gated_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        wide = [define(fd, [-1, case.columns], case.dtype) for _ in range(3)]
        bias = define(fd, [case.columns], case.dtype)
        gate, up, dy, bias = (fd.ops.cast(t, dtype=case.compute) for t in (*wide, bias))
        z = fd.ops.add(gate, bias)
        s = fd.ops.sigmoid(z)
        slope = fd.ops.mul(s, fd.ops.add(fd.ops.mul(z, fd.ops.sub(1.0, s)), 1.0))
        d_gate = fd.ops.mul(fd.ops.mul(dy, up), slope)
        d_up = fd.ops.mul(dy, fd.ops.mul(z, s))
        for t in (d_gate, d_up, fd.ops.sum(d_gate, [0])):
            fd.add_output(fd.ops.cast(t, dtype=case.data_type))
    return fd


def _gated_eager(case: Case, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor) -> Tensors:
    z, wide = gate.to(case.accurate) + bias, dy.to(case.accurate)
    d_gate = torch.ops.aten.silu_backward(wide * up, z)
    return d_gate.to(gate.dtype), (wide * functional.silu(z)).to(gate.dtype), d_gate.sum(0).to(gate.dtype)


def _gated_reference(case: Case, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (gate, up, bias)]
    return torch.autograd.grad(functional.silu(leaves[0] + leaves[2]) * leaves[1], leaves, dy)


LAYER_NORM_BACKWARD = Workload(
    name="layer_norm_backward",
    title="layer_norm: dx, dw, db",
    cases=LAYER_NORM_CASES,
    tiny=("40x16", "33x51:float16", "9x1030:float32"),
    arguments=_layer_norm_arguments,
    fusion=_layer_norm_fusion,
    eager=_layer_norm_eager,
    reference=_layer_norm_reference,
    rows=(True, True, False, True, True),
    sums=(False, True, True),
)
RMS_NORM_BACKWARD = Workload(
    name="rms_norm_backward",
    title="rms_norm: dx, dw",
    cases=RMS_NORM_CASES,
    tiny=("40x16", "33x51:float16", "9x1030:float32"),
    arguments=_rms_norm_arguments,
    fusion=_rms_norm_fusion,
    eager=_rms_norm_eager,
    reference=_rms_norm_reference,
    rows=(True, True, False, True),
    sums=(False, True),
)
BIAS_GELU_BACKWARD = Workload(
    name="bias_gelu_backward",
    title="gelu(x + bias): dx, dbias",
    cases=("32768x4096", "16384x8192"),
    tiny=("40x16", "33x51:float16"),
    arguments=_bias_gelu_arguments,
    fusion=_bias_gelu_fusion,
    eager=_bias_gelu_eager,
    reference=_bias_gelu_reference,
    rows=(True, True, False),
    sums=(False, True),
)
SWIGLU_BACKWARD = Workload(
    name="swiglu_backward",
    title="silu(gate + bias) * up: dgate, dup, dbias",
    cases=("32768x4096", "16384x8192"),
    tiny=("40x16", "33x51:float16"),
    arguments=_gated_arguments,
    fusion=_gated_fusion,
    eager=_gated_eager,
    reference=_gated_reference,
    rows=(True, True, True, False),
    sums=(False, False, True),
)
WORKLOADS = (LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD, BIAS_GELU_BACKWARD, SWIGLU_BACKWARD)
