"""Pointwise work: SwiGLU, broadcasts, RoPE, transposes, an optimiser's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from shardfuse import FusionDefinition
from shardfuse.ir.tensor_view import TensorView

from ..workload import Case, Draw, Tensors, Workload, define

RATE, BETA_1, BETA_2, DECAY, STEP = 1e-3, 0.9, 0.999, 0.01, 10
ADAM_EPS = 1e-8


# silu(gate) * up


def _pair(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [draw.normal(case.shape, case.dtype) for _ in range(2)]


def _swiglu_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        wide = [define(fd, [-1, -1], case.dtype) for _ in range(2)]
        gate, up = (fd.ops.cast(t, dtype=case.compute) for t in wide)
        fd.add_output(fd.ops.cast(fd.ops.mul(fd.ops.silu(gate), up), dtype=case.data_type))
    return fd


def _swiglu(case: Case, gate: torch.Tensor, up: torch.Tensor) -> Tensors:
    return (functional.silu(gate) * up,)


# gelu(x + bias) * scale of the row


def _broadcast_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    rows, columns = case.shape
    return [draw.normal(shape, case.dtype) for shape in (case.shape, [columns], [rows, 1])]


def _broadcast_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        given = [define(fd, shape, case.dtype) for shape in ([-1, case.columns], [case.columns], [-1, 1])]
        x, bias, scale = (fd.ops.cast(t, dtype=case.compute) for t in given)
        y = fd.ops.mul(fd.ops.gelu(fd.ops.add(x, bias)), scale)
        fd.add_output(fd.ops.cast(y, dtype=case.data_type))
    return fd


def _broadcast(case: Case, x: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return (functional.gelu(x + bias) * scale,)


# RoPE: x is [batch, sequence, heads, 2 * half]


def _rope_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    _, sequence, _, width = case.shape
    angle = draw.normal([sequence, width // 2], torch.float32)
    return [draw.normal(case.shape, case.dtype), angle.cos().to(case.dtype), angle.sin().to(case.dtype)]


def _rope_fusion(case: Case) -> FusionDefinition:
    """Halves are sliced from x and put together again."""
    *outer, columns = case.shape
    with FusionDefinition() as fd:
        x = define(fd, case.shape, case.dtype)
        angles = [define(fd, [-1, columns // 2], case.dtype) for _ in range(2)]
        low = fd.ops.slice(x, [0, 0, 0, 0], [*outer, columns // 2])
        high = fd.ops.slice(x, [0, 0, 0, columns // 2], [*outer, columns])
        fd.add_output(fd.ops.cat(_rotated(fd, case, [low, high, *angles]), -1))
    return fd


def _rotated(fd: FusionDefinition, case: Case, given: Sequence[TensorView]) -> list[TensorView]:
    """Both halves turned by the angle of their place in the sequence."""
    low, high, cos, sin = (fd.ops.cast(t, dtype=case.compute) for t in given)
    cos, sin = (fd.ops.unsqueeze(t, 1) for t in (cos, sin))
    turned = (
        fd.ops.sub(fd.ops.mul(low, cos), fd.ops.mul(high, sin)),
        fd.ops.add(fd.ops.mul(high, cos), fd.ops.mul(low, sin)),
    )
    return [fd.ops.cast(t, dtype=case.data_type) for t in turned]


# the same on halves that come as views, joined by the fusion, or go apart


def _halves(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*inputs[0].chunk(2, -1), *inputs[1:]]


def _define_halves(fd: FusionDefinition, case: Case) -> list[TensorView]:
    """The halves, and the angles."""
    half = case.columns // 2
    halves = [fd.define_tensor([-1, -1, -1, half], dtype=case.data_type) for _ in range(2)]
    return [*halves, *(define(fd, [-1, half], case.dtype) for _ in range(2))]


def _rope_halves_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.cat(_rotated(fd, case, _define_halves(fd, case)), -1))
    return fd


def _rope_apart_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        for t in _rotated(fd, case, _define_halves(fd, case)):
            fd.add_output(t)
    return fd


def _rope_apart(case: Case, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    cos, sin = cos[:, None], sin[:, None]
    low, high = x.chunk(2, -1)
    return low * cos - high * sin, high * cos + low * sin


def _rope(case: Case, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    return (torch.cat(_rope_apart(case, x, cos, sin), -1),)


# transposes


def _transpose_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [draw.normal(case.shape, case.dtype)]


def _transpose_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.ops.cast(define(fd, [-1] * len(case.shape), case.dtype), dtype=case.compute)
        doubled = fd.ops.transpose(fd.ops.mul(x, 2.0), -2, -1)
        fd.add_output(fd.ops.cast(doubled, dtype=case.data_type))
    return fd


def _transpose(case: Case, x: torch.Tensor) -> Tensors:
    return ((x * 2).transpose(-2, -1).contiguous(),)


def _transpose_add_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [draw.normal(case.shape, case.dtype), draw.normal(case.shape[::-1], case.dtype)]


def _transpose_add_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x, y = (define(fd, [-1, -1], case.dtype) for _ in range(2))
        fd.add_output(fd.ops.add(fd.ops.permute(x, [1, 0]), y))
    return fd


def _transpose_add(case: Case, x: torch.Tensor, y: torch.Tensor) -> Tensors:
    return (y + x.T,)  # the first operand's format is the result's


# AdamW: parameter, gradient, moments -> parameter, moments


def _adamw_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    p, g, m, v = (draw.normal(case.shape, case.dtype) for _ in range(4))
    return [p, g, m, v.square()]


def _adamw_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        p, g, m, v = (define(fd, [-1], case.dtype) for _ in range(4))
        m = fd.ops.add(fd.ops.mul(m, BETA_1), fd.ops.mul(g, 1 - BETA_1))
        v = fd.ops.add(fd.ops.mul(v, BETA_2), fd.ops.mul(fd.ops.mul(g, g), 1 - BETA_2))
        below = fd.ops.add(fd.ops.sqrt(fd.ops.mul(v, 1 / (1 - BETA_2**STEP))), ADAM_EPS)
        move = fd.ops.div(fd.ops.mul(m, RATE / (1 - BETA_1**STEP)), below)
        for t in (fd.ops.sub(fd.ops.mul(p, 1 - RATE * DECAY), move), m, v):
            fd.add_output(t)
    return fd


def _adamw(case: Case, p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Tensors:
    m = m * BETA_1 + g * (1 - BETA_1)
    v = v * BETA_2 + g * g * (1 - BETA_2)
    below = torch.sqrt(v / (1 - BETA_2**STEP)) + ADAM_EPS
    return p * (1 - RATE * DECAY) - RATE / (1 - BETA_1**STEP) * m / below, m, v


SWIGLU = Workload(
    name="swiglu",
    title="silu(gate) * up",
    cases=("8192x2048", "16384x8192", "16384x14336"),
    tiny=("5x16", "7x51:float16"),
    arguments=_pair,
    fusion=_swiglu_fusion,
    eager=_swiglu,
    reference=_swiglu,
    rows=(True, True),
)
BROADCAST = Workload(
    name="broadcast",
    title="gelu(x + bias) * scale of the row",
    cases=("16384x8192", "16384x5140", "1048576x128"),
    tiny=("5x16", "7x51:float16"),
    arguments=_broadcast_arguments,
    fusion=_broadcast_fusion,
    eager=_broadcast,
    reference=_broadcast,
    rows=(True, False, True),
)
ROPE = Workload(
    name="rope",
    title="rotary embedding, half and half",
    cases=("4x4096x32x128", "1x32768x8x128"),
    tiny=("2x3x2x8", "1x5x3x6:float32"),
    arguments=_rope_arguments,
    fusion=_rope_fusion,
    eager=_rope,
    reference=_rope,
    rows=(True, False, False),
)
ROPE_HALVES = replace(
    ROPE,
    name="rope_halves",
    title="rotary embedding of two halves that come as views, joined by the fusion",
    fusion=_rope_halves_fusion,
    bind=_halves,
)
ROPE_APART = replace(
    ROPE,
    name="rope_apart",
    title="rotary embedding of two halves, which every implementation leaves apart",
    fusion=_rope_apart_fusion,
    eager=_rope_apart,
    reference=_rope_apart,
    bind=_halves,
    sums=(False, False),
)
TRANSPOSE = Workload(
    name="transpose",
    title="2 * x, the last two axes exchanged",
    cases=("16384x8192", "16384x8191", "64x2048x1024"),
    tiny=("5x16", "7x51:float32", "2x5x7"),
    arguments=_transpose_arguments,
    fusion=_transpose_fusion,
    eager=_transpose,
    reference=_transpose,
    rows=(False,),
    roundings=0,
)
TRANSPOSE_ADD = Workload(
    name="transpose_add",
    title="x.T + y",
    cases=("16384x8192",),
    tiny=("5x16", "7x51:float32"),
    arguments=_transpose_add_arguments,
    fusion=_transpose_add_fusion,
    eager=_transpose_add,
    reference=_transpose_add,
    rows=(False, False),
)
ADAMW = Workload(
    name="adamw",
    title="a step of AdamW",
    cases=("67108864:float32",),
    tiny=("40:float32",),
    arguments=_adamw_arguments,
    fusion=_adamw_fusion,
    eager=_adamw,
    reference=_adamw,
    rows=(True, True, True, True),
    sums=(False, False, False),
)
WORKLOADS = (SWIGLU, BROADCAST, ROPE, ROPE_HALVES, ROPE_APART, TRANSPOSE, TRANSPOSE_ADD, ADAMW)
