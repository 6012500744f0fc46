"""Group norm + SiLU as people write it, instance norm and batch norm, NCHW and channels-last, 4-D and 5-D."""

from __future__ import annotations

from math import prod

import torch
from torch.nn import functional

from shardfuse import FusionDefinition
from shardfuse.ir.tensor_view import TensorView

from ..workload import EPS, Case, Draw, Tensors, Workload, define
from .norm_gradients import standard_gradient
from .norms import standardise

SHAPES = ("2x320x128x128", "2x640x64x64", "2x1280x32x32", "1x512x256x256", "32x128x256x256")
VIDEO = "1x128x20x256x256:bfloat16"
MOMENTUM = 0.1


def _grouped(case: Case) -> list[int]:
    n, c, *space = case.shape
    return [n, case.groups, c // case.groups, *space]


def _along_channels(fd: FusionDefinition, t: TensorView, case: Case) -> TensorView:
    """A tensor [channels] against the activations."""
    shape = [1, case.shape[1], *(1 for _ in case.shape[2:])]
    return fd.ops.broadcast_in_dim(fd.ops.cast(t, dtype=case.compute), shape=shape, broadcast_dims=[1])


def _output(fd: FusionDefinition, t: TensorView, case: Case) -> None:
    fd.add_output(fd.ops.cast(t, dtype=case.data_type), stride_order=case.stride_order)


# silu(group_norm(x))


def _arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    x = case.arranged(draw.normal(case.shape, case.dtype, mean=0.5))
    return [x, *(draw.normal([case.shape[1]], case.dtype) for _ in range(2))]


def _fusion(case: Case) -> FusionDefinition:
    grouped = _grouped(case)
    with FusionDefinition() as fd:
        x = define(fd, case.shape, case.dtype, case)
        weight, shift = (define(fd, [case.shape[1]], case.dtype) for _ in range(2))
        h = fd.ops.reshape(fd.ops.cast(x, dtype=case.compute), grouped)
        h = fd.ops.reshape(standardise(fd, h, list(range(2, len(grouped)))), case.shape)
        h = fd.ops.add(fd.ops.mul(h, _along_channels(fd, weight, case)), _along_channels(fd, shift, case))
        _output(fd, fd.ops.silu(h), case)
    return fd


def _eager(case: Case, x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor) -> Tensors:
    return (functional.silu(functional.group_norm(x, case.groups, weight, shift, EPS)),)


# its gradients: dx, dw, db


def _moments(case: Case, x: torch.Tensor) -> Tensors:
    """[samples, groups, 1, ...] each."""
    h = x.reshape(_grouped(case)).to(case.accurate)
    var, mean = torch.var_mean(h, list(range(2, h.ndim)), correction=0, keepdim=True)
    return mean, torch.rsqrt(var + EPS)


def _gradient_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    x, weight, shift = _arguments(case, draw)
    dy = case.arranged(draw.normal(case.shape, case.dtype))
    return [x, dy, weight, shift, *_moments(case, x)]


def _gradient_fusion(case: Case) -> FusionDefinition:
    grouped = _grouped(case)
    within, across = list(range(2, len(grouped))), [0, *range(2, len(case.shape))]
    with FusionDefinition() as fd:
        x, dy = (define(fd, case.shape, case.dtype, case) for _ in range(2))
        weight, shift = (define(fd, [case.shape[1]], case.dtype) for _ in range(2))
        mean, rstd = (define(fd, [grouped[0], case.groups, *(1 for _ in within)], case.accurate) for _ in range(2))
        weight, shift = (_along_channels(fd, t, case) for t in (weight, shift))
        h = fd.ops.reshape(fd.ops.cast(x, dtype=case.compute), grouped)
        unit = fd.ops.mul(fd.ops.sub(h, mean), rstd)
        flat = fd.ops.reshape(unit, case.shape)
        z = fd.ops.add(fd.ops.mul(flat, weight), shift)
        s = fd.ops.sigmoid(z)
        slope = fd.ops.mul(s, fd.ops.add(fd.ops.mul(z, fd.ops.sub(1.0, s)), 1.0))
        dz = fd.ops.mul(fd.ops.cast(dy, dtype=case.compute), slope)
        g = fd.ops.reshape(fd.ops.mul(dz, weight), grouped)
        middle = fd.ops.mean(g, within, keepdim=True)
        along = fd.ops.mean(fd.ops.mul(g, unit), within, keepdim=True)
        dx = fd.ops.mul(fd.ops.sub(fd.ops.sub(g, middle), fd.ops.mul(unit, along)), rstd)
        _output(fd, fd.ops.reshape(dx, case.shape), case)
        for t in (fd.ops.sum(fd.ops.mul(dz, flat), across), fd.ops.sum(dz, across)):
            fd.add_output(fd.ops.cast(t, dtype=case.data_type))
    return fd


def _gradient_eager(case: Case, x: torch.Tensor, dy: torch.Tensor, *rest: torch.Tensor) -> Tensors:
    """The formula, in float32: torch's own backward of half precision wants moments in half precision."""
    grouped, channels = _grouped(case), (1, -1, *(1 for _ in case.shape[2:]))
    weight, shift, mean, rstd = rest
    unit = (x.reshape(grouped).to(case.accurate) - mean) * rstd
    flat = unit.reshape(case.shape)
    dz = torch.ops.aten.silu_backward(dy.to(case.accurate), flat * weight.view(channels) + shift.view(channels))
    g = (dz * weight.view(channels)).reshape(grouped)
    within, across = list(range(2, len(grouped))), [0, *range(2, len(case.shape))]
    middle, along = g.mean(within, keepdim=True), (g * unit).mean(within, keepdim=True)
    dx = ((g - middle - unit * along) * rstd).reshape(case.shape)
    return dx.to(x.dtype), (dz * flat).sum(across).to(x.dtype), dz.sum(across).to(x.dtype)


def _gradient_reference(case: Case, x: torch.Tensor, dy: torch.Tensor, *rest: torch.Tensor) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (x, rest[0], rest[1])]
    return torch.autograd.grad(_eager(case, *leaves), leaves, (dy,))


# instance norm: every channel of every sample


def _instance_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = define(fd, case.shape, case.dtype, case)
        weight, shift = (define(fd, [case.shape[1]], case.dtype) for _ in range(2))
        h = standardise(fd, fd.ops.cast(x, dtype=case.compute), list(range(2, len(case.shape))))
        _output(fd, fd.ops.add(fd.ops.mul(h, _along_channels(fd, weight, case)), _along_channels(fd, shift, case)), case)
    return fd


def _instance_eager(case: Case, x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor) -> Tensors:
    return (functional.instance_norm(x, weight=weight, bias=shift, eps=EPS),)


# batch norm: every channel over all samples


def _batch_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    """x, weight, shift, running mean, running variance."""
    running = [draw.normal([case.shape[1]], case.accurate) for _ in range(2)]
    return [*_arguments(case, draw), running[0], running[1].square() + 0.5]


def _batch_fusion(case: Case) -> FusionDefinition:
    """Training: the batch's own moments, and new running statistics."""
    axes = [0, *range(2, len(case.shape))]
    with FusionDefinition() as fd:
        x = define(fd, case.shape, case.dtype, case)
        weight, shift = (define(fd, [case.shape[1]], case.dtype) for _ in range(2))
        running = [define(fd, [case.shape[1]], case.accurate) for _ in range(2)]
        h = fd.ops.cast(x, dtype=case.compute)
        var, mean = fd.ops.var_mean(h, axes, correction=0)
        rstd = fd.ops.rsqrt(fd.ops.add(var, EPS))
        h = fd.ops.mul(fd.ops.sub(h, _along_channels(fd, mean, case)), _along_channels(fd, rstd, case))
        _output(fd, fd.ops.add(fd.ops.mul(h, _along_channels(fd, weight, case)), _along_channels(fd, shift, case)), case)
        count = prod(case.shape) // case.shape[1]
        for old, new in zip(running, (mean, fd.ops.mul(var, count / (count - 1))), strict=True):
            fd.add_output(fd.ops.add(fd.ops.mul(old, 1 - MOMENTUM), fd.ops.mul(new, MOMENTUM)))
    return fd


def _batch_eager(case: Case, x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, *old: torch.Tensor) -> Tensors:
    running = [t.clone() for t in old]
    y = functional.batch_norm(x, *running, weight.to(old[0]), shift.to(old[0]), True, MOMENTUM, EPS)
    return y, *running


def _inference_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = define(fd, case.shape, case.dtype, case)
        weight, shift = (define(fd, [case.shape[1]], case.dtype) for _ in range(2))
        mean, var = (define(fd, [case.shape[1]], case.accurate) for _ in range(2))
        h = fd.ops.sub(fd.ops.cast(x, dtype=case.compute), _along_channels(fd, mean, case))
        h = fd.ops.mul(h, _along_channels(fd, fd.ops.rsqrt(fd.ops.add(var, EPS)), case))
        _output(fd, fd.ops.add(fd.ops.mul(h, _along_channels(fd, weight, case)), _along_channels(fd, shift, case)), case)
    return fd


def _inference_eager(case: Case, x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, *old: torch.Tensor) -> Tensors:
    return (functional.batch_norm(x, *old, weight.to(old[0]), shift.to(old[0]), False, MOMENTUM, EPS),)


# gradients of batch norm in training: dx, dw, db


def _batch_gradient_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    """x, dy, weight, and the batch's mean and 1 / sqrt(var + eps)."""
    x, weight, _ = _arguments(case, draw)
    var, mean = torch.var_mean(x.to(case.accurate), [0, *range(2, x.ndim)], correction=0)
    return [x, case.arranged(draw.normal(case.shape, case.dtype)), weight, mean, torch.rsqrt(var + EPS)]


def _batch_gradient_fusion(case: Case) -> FusionDefinition:
    axes = [0, *range(2, len(case.shape))]
    count = prod(case.shape) // case.shape[1]
    with FusionDefinition() as fd:
        x, dy = (define(fd, case.shape, case.dtype, case) for _ in range(2))
        weight = define(fd, [case.shape[1]], case.dtype)
        mean, rstd = (define(fd, [case.shape[1]], case.accurate) for _ in range(2))
        g = fd.ops.cast(dy, dtype=case.compute)
        unit = fd.ops.sub(fd.ops.cast(x, dtype=case.compute), _along_channels(fd, mean, case))
        unit = fd.ops.mul(unit, _along_channels(fd, rstd, case))
        d_shift, d_weight = fd.ops.sum(g, axes), fd.ops.sum(fd.ops.mul(g, unit), axes)
        off = fd.ops.sub(g, _along_channels(fd, fd.ops.div(d_shift, count), case))
        off = fd.ops.sub(off, fd.ops.mul(unit, _along_channels(fd, fd.ops.div(d_weight, count), case)))
        factor = fd.ops.mul(rstd, fd.ops.cast(weight, dtype=case.compute))
        _output(fd, fd.ops.mul(off, _along_channels(fd, factor, case)), case)
        for t in (d_weight, d_shift):
            fd.add_output(fd.ops.cast(t, dtype=case.data_type))
    return fd


def _batch_gradient_reference(case: Case, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    y = functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, MOMENTUM, EPS)
    return torch.autograd.grad(y, leaves, dy)


def _batch_gradient_eager(case: Case, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, *moments: torch.Tensor) -> Tensors:
    wide = weight.to(moments[0])
    backward = torch.ops.aten.native_batch_norm_backward.default
    dx, dw, db = backward(dy, x, wide, None, None, *moments, True, EPS, [True, True, True])
    return dx, dw.to(x.dtype), db.to(x.dtype)


__all__ = ["standard_gradient"]
