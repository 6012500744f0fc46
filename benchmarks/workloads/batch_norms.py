"""Instance norm and batch norm over NCHW and channels-last activations, 4-D and 5-D."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch.nn import functional

from shardfuse import FusionDefinition

from ..workload import EPS, Case, Draw, Tensors, Workload, define
from .group_norms import along_channels, channel_arguments, give
from .norms import standardise

MOMENTUM = 0.1

# instance norm: every channel of every sample


def _instance_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = define(fd, case.shape, case.dtype, case)
        weight, shift = (define(fd, [case.shape[1]], case.dtype) for _ in range(2))
        h = standardise(fd, fd.ops.cast(x, dtype=case.compute), list(range(2, len(case.shape))))
        give(fd, fd.ops.add(fd.ops.mul(h, along_channels(fd, weight, case)), along_channels(fd, shift, case)), case)
    return fd


def _instance_eager(case: Case, x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor) -> Tensors:
    return (functional.instance_norm(x, weight=weight, bias=shift, eps=EPS),)


# batch norm: every channel over all samples


def _batch_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    """x, weight, shift, running mean, running variance."""
    running = [draw.normal([case.shape[1]], case.accurate) for _ in range(2)]
    return [*channel_arguments(case, draw), running[0], running[1].square() + 0.5]


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
        h = fd.ops.mul(fd.ops.sub(h, along_channels(fd, mean, case)), along_channels(fd, rstd, case))
        give(fd, fd.ops.add(fd.ops.mul(h, along_channels(fd, weight, case)), along_channels(fd, shift, case)), case)
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
        h = fd.ops.sub(fd.ops.cast(x, dtype=case.compute), along_channels(fd, mean, case))
        h = fd.ops.mul(h, along_channels(fd, fd.ops.rsqrt(fd.ops.add(var, EPS)), case))
        give(fd, fd.ops.add(fd.ops.mul(h, along_channels(fd, weight, case)), along_channels(fd, shift, case)), case)
    return fd


def _inference_eager(
    case: Case, x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, *old: torch.Tensor
) -> Tensors:
    return (functional.batch_norm(x, *old, weight.to(old[0]), shift.to(old[0]), False, MOMENTUM, EPS),)


# gradients of batch norm in training: dx, dw, db


def _batch_gradient_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    """x, dy, weight, and the batch's mean and 1 / sqrt(var + eps)."""
    x, weight, _ = channel_arguments(case, draw)
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
        unit = fd.ops.sub(fd.ops.cast(x, dtype=case.compute), along_channels(fd, mean, case))
        unit = fd.ops.mul(unit, along_channels(fd, rstd, case))
        d_shift, d_weight = fd.ops.sum(g, axes), fd.ops.sum(fd.ops.mul(g, unit), axes)
        off = fd.ops.sub(g, along_channels(fd, fd.ops.div(d_shift, count), case))
        off = fd.ops.sub(off, fd.ops.mul(unit, along_channels(fd, fd.ops.div(d_weight, count), case)))
        factor = fd.ops.mul(rstd, fd.ops.cast(weight, dtype=case.compute))
        give(fd, fd.ops.mul(off, along_channels(fd, factor, case)), case)
        for t in (d_weight, d_shift):
            fd.add_output(fd.ops.cast(t, dtype=case.data_type))
    return fd


def _batch_gradient_reference(
    case: Case, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor
) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    y = functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, MOMENTUM, EPS)
    return torch.autograd.grad(y, leaves, dy)


def _batch_gradient_eager(
    case: Case, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, *moments: torch.Tensor
) -> Tensors:
    wide = weight.to(moments[0])
    backward = torch.ops.aten.native_batch_norm_backward.default
    dx, dw, db = backward(dy, x, wide, None, None, *moments, True, EPS, [True, True, True])
    return dx, dw.to(x.dtype), db.to(x.dtype)


SHAPES = ("32x256x56x56", "8x64x256x256")

INSTANCE_NORM = Workload(
    name="instance_norm",
    title="instance_norm(x)",
    cases=tuple(f"{shape}:float16" for shape in SHAPES),
    tiny=("2x8x3x5:float16", "2x6x2x3x4:float32"),
    arguments=channel_arguments,
    fusion=_instance_fusion,
    eager=_instance_eager,
    reference=_instance_eager,
    rows=(True, False, False),
)
BATCH_NORM = Workload(
    name="batch_norm",
    title="batch_norm(x) in training, with running statistics",
    cases=tuple(f"{shape}:float16" for shape in SHAPES),
    tiny=("2x8x3x5:float16", "2x6x2x3x4:float32"),
    arguments=_batch_arguments,
    fusion=_batch_fusion,
    eager=_batch_eager,
    reference=_batch_eager,
    rows=(False,) * 5,
    sums=(False, False, False),
    roundings=4,
)
BATCH_NORM_INFERENCE = Workload(
    name="batch_norm_inference",
    title="batch_norm(x) in inference",
    cases=tuple(f"{shape}:float16" for shape in SHAPES),
    tiny=("2x8x3x5:float16", "2x6x2x3x4:float32"),
    arguments=_batch_arguments,
    fusion=_inference_fusion,
    eager=_inference_eager,
    reference=_inference_eager,
    rows=(True, *(False,) * 4),
)
BATCH_NORM_BACKWARD = Workload(
    name="batch_norm_backward",
    title="batch_norm(x) in training: dx, dw, db",
    cases=tuple(f"{shape}:float16" for shape in SHAPES),
    tiny=("2x8x3x5:float16", "2x6x2x3x4:float32"),
    arguments=_batch_gradient_arguments,
    fusion=_batch_gradient_fusion,
    eager=_batch_gradient_eager,
    reference=_batch_gradient_reference,
    rows=(False,) * 5,
    sums=(False, False, False),
)


def _channels_last(workload: Workload) -> Workload:
    """``workload`` with channels innermost in memory."""
    return replace(
        workload,
        name=f"{workload.name}_channels_last",
        title=f"{workload.title}, channels-last",
        cases=tuple(f"{shape}:float16:channels_last" for shape in SHAPES),
        tiny=("2x8x3x5:float16:channels_last",),
    )


WORKLOADS = (
    INSTANCE_NORM,
    BATCH_NORM,
    _channels_last(BATCH_NORM),
    BATCH_NORM_INFERENCE,
    BATCH_NORM_BACKWARD,
    _channels_last(BATCH_NORM_BACKWARD),
)
