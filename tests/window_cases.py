"""Definitions with slices, pads, cats and flips, and what torch has for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from shardfuse.ir.dtype import DataType
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops

Define = Callable[..., TensorView]
Tensor = torch.Tensor


@dataclass(frozen=True)
class WindowCase:
    """``define(ops, *inputs)``.  ``launches``: kernels and torch calls that it comes to at most."""

    name: str
    define: Define
    reference: Callable[..., Tensor]
    shapes: Sequence[Sequence[int]]
    launches: int = 1
    dtypes: Sequence[DataType] = (DataType.Float,)


def part(o: Ops, x: TensorView, dim: int, start: int, stop: int, step: int = 1) -> TensorView:
    """``x[start:stop:step]`` along ``dim``."""
    starts, stops, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    starts[dim], stops[dim], steps[dim] = start, stop, step
    return o.slice(x, starts, stops, steps)


def centred(o: Ops, x: TensorView) -> TensorView:
    return o.sub(x, o.mean(x, [1], keepdim=True))


def rotate_half(o: Ops, x: TensorView, cos: TensorView, sin: TensorView) -> TensorView:
    """``x * cos + cat(-x2, x1) * sin``, x1 and x2 the halves of the last axis."""
    n, last = x.shape[-1], x.ndim - 1
    turned = o.cat([o.neg(part(o, x, last, n // 2, n)), part(o, x, last, 0, n // 2)], -1)
    return o.add(o.mul(x, cos), o.mul(turned, sin))


def half_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def rotate_halves(o: Ops, x: TensorView, cos: TensorView, sin: TensorView) -> TensorView:
    """``cat(x1 * cos - x2 * sin, x1 * sin + x2 * cos)``."""
    n, last = x.shape[-1], x.ndim - 1
    a, b = part(o, x, last, 0, n // 2), part(o, x, last, n // 2, n)
    return o.cat([o.sub(o.mul(a, cos), o.mul(b, sin)), o.add(o.mul(a, sin), o.mul(b, cos))], -1)


def halves_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def rotate_pairs(o: Ops, x: TensorView, cos: TensorView, sin: TensorView) -> TensorView:
    """Neighbours are pairs: (x0, x1) becomes (-x1, x0)."""
    shape = list(x.shape)
    y = o.reshape(x, [*shape[:-1], shape[-1] // 2, 2])
    turned = o.cat([o.neg(part(o, y, x.ndim, 1, 2)), part(o, y, x.ndim, 0, 1)], -1)
    return o.add(o.mul(x, cos), o.mul(o.reshape(turned, shape), sin))


def pairs_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = x.unflatten(-1, (-1, 2))
    return x * cos + torch.stack([-y[..., 1], y[..., 0]], -1).flatten(-2) * sin


def stack_pairs(o: Ops, x: TensorView, cos: TensorView, sin: TensorView) -> TensorView:
    """Neighbours are pairs, taken apart by ``select`` and stacked again; cos and sin have one value a pair."""
    shape = list(x.shape)
    y = o.reshape(x, [*shape[:-1], shape[-1] // 2, 2])
    a, b = o.select(y, 0, x.ndim), o.select(y, -1, x.ndim)
    first, second = o.sub(o.mul(a, cos), o.mul(b, sin)), o.add(o.mul(a, sin), o.mul(b, cos))
    return o.reshape(o.cat([o.unsqueeze(first, x.ndim), o.unsqueeze(second, x.ndim)], -1), shape)


def pairs_stacked(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def norm(o: Ops, x: TensorView, weight: TensorView) -> TensorView:
    scale = o.rsqrt(o.add(o.mean(o.mul(x, x), [-1], keepdim=True), 1e-5))
    return o.mul(o.mul(x, scale), weight)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def softmax(o: Ops, x: TensorView) -> TensorView:
    e = o.exp(o.sub(x, o.max(x, [1], keepdim=True)))
    return o.div(e, o.sum(e, [1], keepdim=True))


def stencil(o: Ops, x: TensorView) -> TensorView:
    p = o.pad(x, [1, 1])
    return o.add(o.add(part(o, p, 1, 0, 20), part(o, p, 1, 1, 21)), part(o, p, 1, 2, 22))


def blurred(x: Tensor) -> Tensor:
    p = functional.pad(x, (1, 1))
    return p[:, :20] + p[:, 1:21] + p[:, 2:]


def through_a_wide_type(define: Define) -> Define:
    """``define`` on inputs that are cast to float32, its result cast back."""

    def wide(o: Ops, *inputs: TensorView) -> TensorView:
        return o.cast(define(o, *(o.cast(x, DataType.Float) for x in inputs)), inputs[0].dtype)

    return wide


HALF = ((2, 3, 5, 16), (5, 16), (5, 16))
PAIRS = ((2, 3, 5, 16), (5, 8), (5, 8))
NARROW = (DataType.Float, DataType.BFloat16)
ROTARY = [
    WindowCase("rotate_half", rotate_half, half_rotated, HALF, dtypes=NARROW),
    WindowCase("rotate_halves", rotate_halves, halves_rotated, PAIRS, dtypes=NARROW),
    WindowCase("rotate_pairs", rotate_pairs, pairs_rotated, HALF, dtypes=NARROW),
    WindowCase("stack_pairs", stack_pairs, pairs_stacked, PAIRS, dtypes=NARROW),
    *(
        WindowCase(f"{d.__name__} in float32", through_a_wide_type(d), r, s, dtypes=NARROW[1:])
        for d, r, s in (
            (rotate_half, half_rotated, HALF),
            (rotate_halves, halves_rotated, PAIRS),
            (rotate_pairs, pairs_rotated, HALF),
            (stack_pairs, pairs_stacked, PAIRS),
        )
    ),
    WindowCase(
        "norm and rotate_half",
        lambda o, x, w, c, s: rotate_half(o, norm(o, x, w), c, s),
        lambda x, w, c, s: half_rotated(normed(x, w), c, s),
        ((6, 5, 16), (16,), (5, 16), (5, 16)),
    ),
    WindowCase(
        "part of the head",
        lambda o, x, c, s: o.cat([rotate_half(o, part(o, x, 2, 0, 8), c, s), part(o, x, 2, 8, 20)], -1),
        lambda x, c, s: torch.cat([half_rotated(x[..., :8], c, s), x[..., 8:]], -1),
        ((6, 5, 20), (5, 8), (5, 8)),
    ),
    WindowCase(
        "queries of qkv",
        lambda o, x, c, s: rotate_half(o, o.select(o.reshape(x, [4, 5, 3, 2, 16]), 1, 2), c, s),
        lambda x, c, s: half_rotated(x.view(4, 5, 3, 2, 16)[:, :, 1], c, s),
        ((4, 5, 96), (5, 1, 16), (5, 1, 16)),
    ),
]
OTHERS = [
    WindowCase(
        "three parts of the rows",
        lambda o, x, y, b: o.mul(o.cat([o.exp(x), o.neg(y), o.add(x, y)], 0), b),
        lambda x, y, b: torch.cat([x.exp(), -y, x + y]) * b,
        ((7, 40), (7, 40), (40,)),
        dtypes=NARROW,
    ),
    WindowCase(
        "parts under a permuted axis and a new one",
        lambda o, x, y: o.permute(o.unsqueeze(o.cat([o.exp(x), o.add(x, y)], 1), 0), [2, 0, 1]),
        lambda x, y: torch.cat([x.exp(), x + y], 1)[None].permute(2, 0, 1),
        ((7, 24), (7, 24)),
        launches=2,
    ),
    WindowCase(
        "parts that a sum needs whole",
        lambda o, x, y, w: norm(o, o.cat([o.exp(x), o.mul(x, y)], 1), w),
        lambda x, y, w: normed(torch.cat([x.exp(), x * y], 1), w),
        ((7, 24), (7, 24), (48,)),
    ),
    WindowCase(
        "swiglu of one input",
        lambda o, x: o.mul(o.silu(part(o, x, 1, 0, 24)), part(o, x, 1, 24, 48)),
        lambda x: functional.silu(x[:, :24]) * x[:, 24:],
        ((7, 48),),
    ),
    WindowCase(
        "swiglu of a sum",
        lambda o, x, b: o.mul(o.silu(part(o, o.add(x, b), 1, 0, 24)), part(o, o.add(x, b), 1, 24, 48)),
        lambda x, b: functional.silu((x + b)[:, :24]) * (x + b)[:, 24:],
        ((7, 48), (48,)),
    ),
    WindowCase(
        "pad and norm",
        lambda o, x, w: norm(o, o.pad(x, [3, 2], 1.5), w),
        lambda x, w: normed(functional.pad(x, (3, 2), value=1.5), w),
        ((7, 48), (53,)),
    ),
    WindowCase(
        "pad of zeros and norm of a long row",
        lambda o, x, w: norm(o, o.pad(x, [1700, 1]), w),
        lambda x, w: normed(functional.pad(x, (1700, 1)), w),
        ((3, 3000), (4701,)),
    ),
    WindowCase(
        "pad and cut",
        lambda o, x: o.pad(o.exp(x), [3, -2, -1, 2], -1.0),
        lambda x: functional.pad(x.exp(), (3, -2, -1, 2), value=-1.0),
        ((7, 48),),
    ),
    WindowCase(
        "pad of an axis of 1",
        lambda o, x: o.neg(o.pad(x, [3, 2, 0, 1], 1.5)),
        lambda x: -functional.pad(x, (3, 2, 0, 1), value=1.5),
        ((7, 1),),
    ),
    *(
        WindowCase(
            f"softmax of padded rows of {n}",
            lambda o, x: softmax(o, o.pad(x, [0, 3], float("-inf"))),
            lambda x: functional.pad(x, (0, 3), value=float("-inf")).softmax(1),
            ((3, n),),
        )
        for n in (30, 70000)
    ),
    WindowCase(
        "cat and norm of rows that no program holds",
        lambda o, x, y, w: norm(o, o.cat([part(o, x, 1, 3, 50003), o.neg(y)], 1), w),
        lambda x, y, w: normed(torch.cat([x[:, 3:50003], -y], 1), w),
        ((2, 50010), (2, 20000), (70000,)),
    ),
    WindowCase(
        "slice of a norm",
        lambda o, x, w: o.neg(part(o, norm(o, x, w), 1, 5, 20)),
        lambda x, w: -normed(x, w)[:, 5:20],
        ((7, 48), (48,)),
        launches=2,
    ),
    WindowCase(
        "rows of a norm",
        lambda o, x, w: o.neg(part(o, norm(o, x, w), 0, 2, 6)),
        lambda x, w: -normed(x, w)[2:6],
        ((7, 48), (48,)),
    ),
    WindowCase(
        "cat of computed tensors and norm",
        lambda o, x, y, w: norm(o, o.cat([o.exp(x), o.mul(y, 2.0)], 1), w),
        lambda x, y, w: normed(torch.cat([x.exp(), y * 2], 1), w),
        ((7, 48), (7, 11), (59,)),
    ),
    WindowCase(
        "cat of rows and sum of columns",
        lambda o, x, y: o.sum(o.cat([o.exp(x), y], 0), [0]),
        lambda x, y: torch.cat([x.exp(), y]).sum(0),
        ((7, 48), (3, 48)),
    ),
    WindowCase(
        "cat of ones",
        lambda o, x, y, z: o.exp(o.cat([x, o.neg(y), z], 1)),
        lambda x, y, z: torch.cat([x, -y, z], 1).exp(),
        ((7, 1), (7, 1), (7, 2)),
    ),
    WindowCase(
        "cat of a cat",
        lambda o, x, y: o.exp(o.cat([o.cat([x, o.neg(y)], 1), x], 1)),
        lambda x, y: torch.cat([x, -y, x], 1).exp(),
        ((7, 5), (7, 4)),
    ),
    WindowCase(
        "cat of a product",
        lambda o, x, y: o.exp(o.cat([o.matmul(x, y), o.relu(x)], 1)),
        lambda x, y: torch.cat([x @ y, x.relu()], 1).exp(),
        ((4, 5), (5, 6)),
        launches=2,
    ),
    WindowCase(
        "cat across a transpose",
        lambda o, x, y: o.exp(o.cat([o.permute(x, [1, 0]), y], 1)),
        lambda x, y: torch.cat([x.T, y], 1).exp(),
        ((40, 50), (50, 30)),
    ),
    WindowCase(
        "nine pieces",
        lambda o, x: o.neg(o.cat([x] * 9, 0)),
        lambda x: -torch.cat([x] * 9),
        ((7, 3),),
        launches=2,
    ),
    WindowCase(
        "nothing but a cat",
        lambda o, x, y: o.cat([x, y], 0),
        lambda x, y: torch.cat([x, y]),
        ((7, 3), (2, 3)),
    ),
    WindowCase(
        "an empty piece",
        lambda o, x, y, z: o.neg(o.cat([o.exp(x), y, z], 0)),
        lambda x, y, z: -torch.cat([x.exp(), y, z]),
        ((7, 3), (0, 3), (2, 3)),
        launches=4,
    ),
    WindowCase(
        "roll",
        lambda o, x: o.sub(x, o.cat([part(o, x, 1, 3, 10), part(o, x, 1, 0, 3)], 1)),
        lambda x: x - x.roll(-3, 1),
        ((7, 10),),
    ),
    WindowCase("stencil", stencil, blurred, ((4, 20),)),
    WindowCase("flip", lambda o, x: o.add(x, o.flip(x, [1])), lambda x: x + x.flip(1), ((7, 10),)),
    WindowCase(
        "flip of a pad of a part of a flip",
        lambda o, x: o.exp(o.flip(o.pad(part(o, o.flip(x, [1]), 1, 2, 9, 2), [1, 2], 5.0), [1])),
        lambda x: functional.pad(x.flip(1)[:, 2:9:2], (1, 2), value=5.0).flip(1).exp(),
        ((7, 10),),
    ),
    WindowCase(
        "every third of a difference",
        lambda o, x, y: o.exp(part(o, o.sub(x, y), 1, 1, 10, 3)),
        lambda x, y: (x - y)[:, 1:10:3].exp(),
        ((7, 10), (10,)),
    ),
    WindowCase(
        "part of an index",
        lambda o, x: o.mul(x, part(o, o.iota(20), 0, 4, 14)),
        lambda x: x * torch.arange(4, 14),
        ((7, 10),),
    ),
    WindowCase(
        "pad of integers",
        lambda o, x: o.add(o.pad(x, [3, 2], 7), o.flip(o.pad(x, [3, 2], 7), [1])),
        lambda x: (p := functional.pad(x, (3, 2), value=7)) + p.flip(1),
        ((7, 10),),
        dtypes=(DataType.Int,),
    ),
    *(
        WindowCase(
            f"norm and sums of padded rows of {n}",
            lambda o, x: o.mul(centred(o, p := o.pad(x, [0, 0, 1, 2], 2.0)), o.sum(p, [0])),
            lambda x: (p := functional.pad(x, (0, 0, 1, 2), value=2.0)).sub(p.mean(1, True)) * p.sum(0),
            ((3, n),),
            launches=3,
        )
        for n in (40, 1030)
    ),
    WindowCase(
        "cat of flags",
        lambda o, x, y: o.where(o.cat([x, o.logical_not(y)], 1), 1.0, 0.5),
        lambda x, y: torch.where(torch.cat([x, ~y], 1), 1.0, 0.5),
        ((7, 5), (7, 4)),
        dtypes=(DataType.Bool,),
    ),
]
