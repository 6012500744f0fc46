"""Two layer norms in a row, modulated by one scale and shift for each sample, as in diffusion transformers."""

from __future__ import annotations

import torch
from torch.nn import functional

from shardfuse import FusionDefinition

from ..workload import EPS, Case, Draw, Tensors, Workload, define
from .norm_gradients import standard_gradient
from .norms import standardise


def _arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    samples, _, columns = case.shape
    return [draw.normal(case.shape, case.dtype), *(draw.normal([samples, 1, columns], case.dtype) for _ in range(2))]


def _fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = define(fd, [-1, -1, case.columns], case.dtype)
        scale, shift = (define(fd, [-1, 1, case.columns], case.dtype) for _ in range(2))
        h, scale, shift = (fd.ops.cast(t, dtype=case.compute) for t in (x, scale, shift))
        for _ in range(2):
            h = fd.ops.add(fd.ops.mul(standardise(fd, h, [-1]), fd.ops.add(scale, 1.0)), shift)
        fd.add_output(fd.ops.cast(h, dtype=case.data_type))
    return fd


def _twice(case: Case, h: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> Tensors:
    for _ in range(2):
        h = functional.layer_norm(h, (case.columns,), eps=EPS) * (1 + scale) + shift
    return (h,)


def _eager(case: Case, x: torch.Tensor, *modulation: torch.Tensor) -> Tensors:
    (y,) = _twice(case, x.to(case.accurate), *modulation)
    return (y.to(x.dtype),)


def _gradient_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    samples, _, columns = case.shape
    wide = [draw.normal(case.shape, case.dtype) for _ in range(2)]
    return [*wide, *(draw.normal([samples, 1, columns], case.dtype) for _ in range(2))]


def _gradient_fusion(case: Case) -> FusionDefinition:
    """The first norm is computed again: its output is cheaper to make than to keep."""
    with FusionDefinition() as fd:
        x, dy = (define(fd, [-1, -1, case.columns], case.dtype) for _ in range(2))
        scale, shift = (define(fd, [-1, 1, case.columns], case.dtype) for _ in range(2))
        h, g, scale, shift = (fd.ops.cast(t, dtype=case.compute) for t in (x, dy, scale, shift))
        factor = fd.ops.add(scale, 1.0)
        kept = []
        for _ in range(2):
            var, mean = fd.ops.var_mean(h, [-1], correction=0, keepdim=True)
            rstd = fd.ops.rsqrt(fd.ops.add(var, EPS))
            unit = fd.ops.mul(fd.ops.sub(h, mean), rstd)
            kept.append((unit, rstd))
            h = fd.ops.add(fd.ops.mul(unit, factor), shift)
        d_scale, d_shift = [], []
        for unit, rstd in reversed(kept):
            d_scale.append(fd.ops.sum(fd.ops.mul(g, unit), [1], keepdim=True))
            d_shift.append(fd.ops.sum(g, [1], keepdim=True))
            g = standard_gradient(fd, unit, fd.ops.mul(g, factor), rstd)
        for t in (g, fd.ops.add(*d_scale), fd.ops.add(*d_shift)):
            fd.add_output(fd.ops.cast(t, dtype=case.data_type))
    return fd


def _gradient_reference(case: Case, x: torch.Tensor, dy: torch.Tensor, *modulation: torch.Tensor) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (x, *modulation)]
    return torch.autograd.grad(_twice(case, *leaves), leaves, (dy,))


def _gradient_eager(case: Case, x: torch.Tensor, *rest: torch.Tensor) -> Tensors:
    """The formula, which ``torch.compile`` takes: it refuses autograd within a graph."""
    h, g, scale, shift = (t.to(case.accurate) for t in (x, *rest))
    factor = 1 + scale
    kept: list[Tensors] = []
    for _ in range(2):
        var, mean = torch.var_mean(h, -1, correction=0, keepdim=True)
        rstd = torch.rsqrt(var + EPS)
        unit = (h - mean) * rstd
        kept.append((unit, rstd))
        h = unit * factor + shift
    d_scale, d_shift = torch.zeros_like(scale), torch.zeros_like(shift)
    for unit, rstd in reversed(kept):
        d_scale = d_scale + (g * unit).sum(1, keepdim=True)
        d_shift = d_shift + g.sum(1, keepdim=True)
        g = g * factor
        g = (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True)) * rstd
    return g.to(x.dtype), d_scale.to(x.dtype), d_shift.to(x.dtype)


MODULATED_NORMS = Workload(
    name="modulated_norms",
    title="two layer norms with one scale and shift a sample",
    cases=("8x4096x3072",),
    tiny=("2x5x16", "3x4x51:float32"),
    arguments=_arguments,
    fusion=_fusion,
    eager=_eager,
    reference=_twice,
    rows=(True, True, True),
)
MODULATED_NORMS_BACKWARD = Workload(
    name="modulated_norms_backward",
    title="two layer norms with one scale and shift a sample: dx, dscale, dshift",
    cases=("8x4096x3072",),
    tiny=("2x5x16", "3x4x51:float32"),
    arguments=_gradient_arguments,
    fusion=_gradient_fusion,
    eager=_gradient_eager,
    reference=_gradient_reference,
    rows=(True, True, True, True),
    sums=(False, False, False),
)
WORKLOADS = (MODULATED_NORMS, MODULATED_NORMS_BACKWARD)
