"""Group norm + SiLU as people write it, forward and backward, NCHW and channels-last, 4-D and 5-D."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from shardfuse import FusionDefinition
from shardfuse.ir.tensor_view import TensorView

from ..workload import EPS, Case, Draw, GroupsError, Tensors, Workload, define
from .norms import standardise

SHAPES = ("2x320x128x128", "2x640x64x64", "2x1280x32x32", "1x512x256x256", "32x128x256x256")
VIDEO = "1x128x20x256x256:bfloat16"


def _grouped(case: Case) -> list[int]:
    """Raises ``GroupsError``."""
    n, c, *space = case.shape
    if case.groups < 1 or c % case.groups:
        raise GroupsError(case)
    return [n, case.groups, c // case.groups, *space]


def along_channels(fd: FusionDefinition, t: TensorView, case: Case) -> TensorView:
    """A tensor [channels] against the activations."""
    shape = [1, case.shape[1], *(1 for _ in case.shape[2:])]
    return fd.ops.broadcast_in_dim(fd.ops.cast(t, dtype=case.compute), shape=shape, broadcast_dims=[1])


def give(fd: FusionDefinition, t: TensorView, case: Case) -> None:
    fd.add_output(fd.ops.cast(t, dtype=case.data_type), stride_order=case.stride_order)


# silu(group_norm(x))


def channel_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    x = case.arranged(draw.normal(case.shape, case.dtype, mean=0.5))
    return [x, *(draw.normal([case.shape[1]], case.dtype) for _ in range(2))]


def _fusion(case: Case) -> FusionDefinition:
    grouped = _grouped(case)
    with FusionDefinition() as fd:
        x = define(fd, case.shape, case.dtype, case)
        weight, shift = (define(fd, [case.shape[1]], case.dtype) for _ in range(2))
        h = fd.ops.reshape(fd.ops.cast(x, dtype=case.compute), grouped)
        h = fd.ops.reshape(standardise(fd, h, list(range(2, len(grouped)))), case.shape)
        h = fd.ops.add(fd.ops.mul(h, along_channels(fd, weight, case)), along_channels(fd, shift, case))
        give(fd, fd.ops.silu(h), case)
    return fd


def _returned(case: Case, x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor) -> Tensors:
    """torch gives NCHW on a GPU, whatever the format of x."""
    return (functional.silu(functional.group_norm(x, case.groups, weight, shift, EPS)),)


def _eager(case: Case, *inputs: torch.Tensor) -> Tensors:
    (y,) = _returned(case, *inputs)
    return (case.arranged(y),)


# its gradients: dx, dw, db


def _moments(case: Case, x: torch.Tensor) -> Tensors:
    """[samples, groups, 1, ...] each."""
    h = x.reshape(_grouped(case)).to(case.accurate)
    var, mean = torch.var_mean(h, list(range(2, h.ndim)), correction=0, keepdim=True)
    return mean, torch.rsqrt(var + EPS)


def _gradient_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    x, weight, shift = channel_arguments(case, draw)
    dy = case.arranged(draw.normal(case.shape, case.dtype))
    return [x, dy, weight, shift, *_moments(case, x)]


def _gradient_fusion(case: Case) -> FusionDefinition:
    grouped = _grouped(case)
    within, across = list(range(2, len(grouped))), [0, *range(2, len(case.shape))]
    with FusionDefinition() as fd:
        x, dy = (define(fd, case.shape, case.dtype, case) for _ in range(2))
        weight, shift = (define(fd, [case.shape[1]], case.dtype) for _ in range(2))
        mean, rstd = (define(fd, [grouped[0], case.groups, *(1 for _ in within)], case.accurate) for _ in range(2))
        weight, shift = (along_channels(fd, t, case) for t in (weight, shift))
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
        give(fd, fd.ops.reshape(dx, case.shape), case)
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
    return case.arranged(dx.to(x.dtype)), (dz * flat).sum(across).to(x.dtype), dz.sum(across).to(x.dtype)


def _gradient_reference(case: Case, x: torch.Tensor, dy: torch.Tensor, *rest: torch.Tensor) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (x, rest[0], rest[1])]
    return torch.autograd.grad(_eager(case, *leaves), leaves, (dy,))


GROUP_NORM = Workload(
    name="group_norm",
    title="silu(group_norm(x)), NCHW",
    cases=(*(f"{shape}:float16" for shape in SHAPES), VIDEO),
    tiny=("2x8x3x5:float16:groups=4", "1x6x5x7:groups=6", "2x6x2x3x4:float32:groups=1"),
    arguments=channel_arguments,
    fusion=_fusion,
    eager=_eager,
    reference=_eager,
    rows=(True, False, False),
    roundings=4,
)
GROUP_NORM_CHANNELS_LAST = replace(
    GROUP_NORM,
    name="group_norm_channels_last",
    title="silu(group_norm(x)), channels-last in and out",
    returned=_returned,
    cases=(*(f"{shape}:float16:channels_last" for shape in SHAPES), f"{VIDEO}:channels_last"),
    tiny=("2x8x3x5:float16:channels_last:groups=4", "2x6x2x3x4:float32:channels_last:groups=3"),
)
GROUP_NORM_BACKWARD = Workload(
    name="group_norm_backward",
    title="silu(group_norm(x)): dx, dw, db, NCHW",
    cases=tuple(f"{shape}:float16" for shape in SHAPES),
    tiny=("2x8x3x5:float16:groups=4", "2x6x2x3x4:float32:groups=3"),
    arguments=_gradient_arguments,
    fusion=_gradient_fusion,
    eager=_gradient_eager,
    reference=_gradient_reference,
    rows=(True, True, False, False, True, True),
    sums=(False, True, True),
)
GROUP_NORM_BACKWARD_CHANNELS_LAST = replace(
    GROUP_NORM_BACKWARD,
    name="group_norm_backward_channels_last",
    title="silu(group_norm(x)): dx, dw, db, channels-last",
    cases=tuple(f"{shape}:float16:channels_last" for shape in SHAPES),
    tiny=("2x8x3x5:float16:channels_last:groups=4",),
)
WORKLOADS = (GROUP_NORM, GROUP_NORM_CHANNELS_LAST, GROUP_NORM_BACKWARD, GROUP_NORM_BACKWARD_CHANNELS_LAST)
