"""Fusions whose kernels reduce blocks of the rows that they hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir.tensor_view import TensorView

TORCH = {DataType.Float: torch.float32, DataType.Half: torch.float16, DataType.BFloat16: torch.bfloat16}


def group_norm_gradients(
    shape: Sequence[int],
    groups: int,
    dtype: DataType,
    *,
    is_active: bool = True,
    invariant: str | None = None,
    cut: int | None = None,
    ranks: int = 1,
) -> FusionDefinition:
    """(x, gradient, weight) -> (dx, dweight, dbias) of a group norm without statistics of its own, and SiLU.

    cut: the axis of the images that so many ranks share, if any.
    """
    n, c, h, w = shape
    with FusionDefinition(backend="triton", invariant=invariant) as fd:
        o = fd.ops
        x, dy = (fd.define_tensor(list(shape), contiguity=True, dtype=dtype) for _ in range(2))
        weight = fd.define_tensor([c], contiguity=True, dtype=dtype)
        shared = [] if cut is None else [(x, cut), (dy, cut), *([(weight, 0)] if cut == 1 else [])]
        for tensor, axis in shared:
            tensor.set_device_mesh(DeviceMesh(range(ranks)))
            tensor.outer_split(axis, ranks, uneven=tensor.shape[axis] % ranks != 0)
            tensor.axis(axis).parallelize(ParallelType.mesh_x)
        x, dy, weight = (o.cast(t, DataType.Float) for t in (x, dy, weight))
        weight = o.broadcast(weight, [True, False, True, True])
        dz = o.mul(dy, o.sigmoid(o.mul(x, weight))) if is_active else dy
        grouped = [n, groups, c // groups, h, w]
        g, unit = o.reshape(o.mul(dz, weight), grouped), o.reshape(x, grouped)
        even, along = (o.mean(t, [2, 3, 4], keepdim=True) for t in (g, o.mul(g, unit)))
        dx = o.sub(o.sub(g, even), o.mul(unit, along))
        fd.add_output(o.cast(o.reshape(dx, list(shape)), dtype))
        for t in (o.mul(dz, x), dz):
            fd.add_output(o.cast(o.sum(t, [0, 2, 3]), dtype))
    return fd


def channels_last_gradients(
    shape: Sequence[int],
    groups: int,
    dtype: DataType,
    *,
    is_last: bool,
    has_weight: bool = True,
    invariant: str | None = None,
) -> FusionDefinition:
    """As ``group_norm_gradients``, of images whose channels are innermost in memory.

    is_last: is theirs the last dim, too?  shape: [n, c, h, w] in any case; without a weight dx and db alone.
    """
    n, c, h, w = shape
    sizes, channel, order = ([n, h, w, c], 3, None) if is_last else ([n, c, h, w], 1, [3, 0, 2, 1])
    with FusionDefinition(backend="triton", invariant=invariant) as fd:
        o = fd.ops
        x, dy = (fd.define_tensor(sizes, contiguity=True, dtype=dtype, stride_order=order) for _ in range(2))
        x, dz = (o.cast(t, DataType.Float) for t in (x, dy))
        scaled = dz
        if has_weight:
            weight = o.cast(fd.define_tensor([c], contiguity=True, dtype=dtype), DataType.Float)
            weight = o.broadcast(weight, [k != channel for k in range(4)])
            dz = o.mul(dz, o.sigmoid(o.mul(x, weight)))
            scaled = o.mul(dz, weight)
        grouped = [n, h, w, groups, c // groups] if is_last else [n, groups, c // groups, h, w]
        axes = [1, 2, 4] if is_last else [2, 3, 4]
        g, unit = o.reshape(scaled, grouped), o.reshape(x, grouped)
        even, along = (o.mean(t, axes, keepdim=True) for t in (g, o.mul(g, unit)))
        dx = o.reshape(o.sub(o.sub(g, even), o.mul(unit, along)), sizes)
        fd.add_output(o.cast(dx, dtype), stride_order=order)
        for t in (o.mul(dz, x), dz) if has_weight else (dz,):
            fd.add_output(o.cast(o.sum(t, [k for k in range(4) if k != channel]), dtype))
    return fd


def decomposed_gradients(shape: Sequence[int], groups: int, dtype: DataType) -> FusionDefinition:
    """(x, gradient, weight, mean, rstd) -> (dx, dweight, dbias) of a group norm and SiLU, in the steps that torch
    decomposes it into: sums over pixels, sums of these over the channels of a group, and what is made of both."""
    n, c, h, w = shape
    each, pixels = c // groups, h * w
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        x, dy = (fd.define_tensor(list(shape), contiguity=True, dtype=dtype) for _ in range(2))
        weight = fd.define_tensor([c], contiguity=True, dtype=dtype)
        mean, rstd = (fd.define_tensor([n, groups], contiguity=True) for _ in range(2))
        x, dy, weight = (o.cast(t, DataType.Float) for t in (x, dy, weight))
        dy = o.mul(dy, o.sigmoid(o.mul(x, o.broadcast(weight, [True, False, True, True]))))
        weight = o.broadcast(weight, [True, False])
        flat, flat_dy = (o.reshape(t, [n, c, pixels]) for t in (x, dy))
        along, even = o.sum(o.mul(flat_dy, flat), [2]), o.sum(flat_dy, [2])
        of_groups = [o.sum(o.reshape(o.mul(t, weight), [n, groups, each]), [2]) for t in (along, even)]
        cube = o.mul(rstd, o.mul(rstd, rstd))
        slope = o.mul(o.mul(o.sub(o.mul(of_groups[1], mean), of_groups[0]), cube), 1.0 / (each * pixels))
        shift = o.sub(o.neg(o.mul(slope, mean)), o.mul(o.mul(of_groups[1], rstd), 1.0 / (each * pixels)))
        by_channel = o.mul(o.broadcast(rstd, [False, False, True]), o.reshape(weight, [1, groups, each]))
        grouped, grouped_dy = (o.reshape(t, [n, groups, each, pixels]) for t in (x, dy))
        dx = o.mul(grouped_dy, o.broadcast(by_channel, [False, False, False, True]))
        dx = o.add(dx, o.mul(grouped, o.broadcast(slope, [False, False, True, True])))
        dx = o.add(dx, o.broadcast(shift, [False, False, True, True]))
        fd.add_output(o.cast(o.reshape(dx, list(shape)), dtype))
        mean, rstd = (o.broadcast(t, [False, False, True]) for t in (mean, rstd))
        along, even = (o.reshape(t, [n, groups, each]) for t in (along, even))
        d_weight = o.sum(o.reshape(o.mul(o.sub(along, o.mul(even, mean)), rstd), [n, c]), [0])
        fd.add_output(o.cast(d_weight, dtype))
        fd.add_output(o.cast(o.sum(o.reshape(even, [n, c]), [0]), dtype))
    return fd


def with_moments(arguments: Sequence[torch.Tensor], groups: int) -> list[torch.Tensor]:
    """``arguments``, of which the first are images, and the mean and the reciprocal deviation of their groups."""
    rows = arguments[0].float().reshape(arguments[0].shape[0], groups, -1)
    variance, mean = torch.var_mean(rows, -1, correction=0)
    return [*arguments, mean, torch.rsqrt(variance + 1e-5)]


def arranged(given: Sequence[torch.Tensor], *, is_last: bool) -> list[torch.Tensor]:
    """Images of [n, c, h, w] with their channels innermost in memory, as the last dim or not."""
    images = [t.permute(0, 2, 3, 1).contiguous() if t.ndim == 4 else t for t in given]
    return images if is_last else [t.permute(0, 3, 1, 2) if t.ndim == 4 else t for t in images]


def drawn(shape: Sequence[int], dtype: DataType, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape, shape, shape[1:2])
    return [torch.randn(list(s), generator=generator).to(TORCH[dtype]) for s in shapes]


class RandomRows:
    """A random fusion of rows [sample, group, (channel, height, width)] that are reduced in two steps and in one."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.dims = [pick(s) for s in ((1, 2, 3, 5), (1, 2, 3), (1, 2, 4, 5, 8), (1, 2, 4, 6, 8), (2, 4, 8, 24, 64))]
        if self.random.random() < 0.1:
            self.dims[2:] = pick([(24, 32, 32), (6, 48, 96)])
        self.dtype = pick(list(TORCH))

    def fusion(self) -> FusionDefinition:
        n, g, c, *_ = self.dims
        with FusionDefinition(backend="triton") as fd:
            self.ops = o = fd.ops
            arguments = [fd.define_tensor(d, contiguity=True, dtype=self.dtype) for d in (self.dims, self.dims, [g, c])]
            x, y, weight = (o.cast(t, DataType.Float) for t in arguments)
            self.weight, shift = weight, fd.define_tensor([n, g], contiguity=True)
            self.full = [x, y]
            beside = (
                o.broadcast(weight, [True, False, False, True, True]),
                o.broadcast(shift, [False] * 2 + [True] * 3),
            )
            for _ in range(self.random.randint(1, 4)):
                made = self.op("mul", "add")(self.any(), self.random.choice([*self.full, *beside]))
                self.full.append(o.sigmoid(made) if self.random.random() < 0.3 else made)
            self.inner: list[TensorView] = []
            self.outputs: list[TensorView] = []
            for step in self.random.sample((self.rows, self.blocks, self.columns, self.twice, self.spread), 4):
                step()
            for t in (*self.outputs, o.cast(self.full[-1], dtype=self.dtype)):
                fd.add_output(t)
        return fd

    def op(self, *names: str) -> Callable[..., TensorView]:
        return getattr(self.ops, self.random.choice(names))

    def any(self) -> TensorView:
        return self.random.choice(self.full)

    def rows(self) -> None:
        reduced = self.op("mean", "max", "min")(self.any(), [2, 3, 4], keepdim=True)
        self.full.append(self.ops.add(self.any(), reduced))

    def blocks(self) -> None:
        self.inner.append(self.op("max", "min", "mean")(self.any(), [3, 4]))
        if self.random.random() < 0.7:
            self.outputs.append(self.inner[-1])

    def columns(self) -> None:
        self.outputs.append(self.ops.sum(self.any(), [0, 3, 4]))

    def twice(self) -> None:
        for t in self.inner:
            t = self.ops.mul(t, self.ops.broadcast(self.weight, [True, False, False]))
            reduced = self.op("max", "mean")(t, [2])
            self.outputs.append(reduced)
            self.full.append(self.ops.mul(self.any(), self.ops.broadcast(reduced, [False] * 2 + [True] * 3)))

    def spread(self) -> None:
        for t in self.inner:
            self.full.append(self.ops.add(self.any(), self.ops.broadcast(t, [False] * 3 + [True] * 2)))

    def arguments(self) -> list[torch.Tensor]:
        generator, (n, g, c, *_) = torch.Generator().manual_seed(0), self.dims
        shapes = (self.dims, self.dims, (g, c), (n, g))
        made = [torch.randn(tuple(s), generator=generator) for s in shapes]
        return [*(t.to(TORCH[self.dtype]) for t in made[:3]), made[3]]
