"""Segments written by hand: a few lines a fusion, local tensors only, and torch's word on what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch_answers import Expected, answers

from shardfuse.codegen import KernelSource, generate
from shardfuse.device import H200
from shardfuse.ir.digits import Axis, Digit, Root, axis_of, extent, merge, roots, split
from shardfuse.ir.domain import BoundDomain
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor, Expr, Value
from shardfuse.ir.layout import Layout, local_extent
from shardfuse.ir.op import Broadcast, Cast, Expand, Iota, Op, Permute, Pointwise, Reduce, ReductionKind, Reshape
from shardfuse.ir.scalar import Number, Scalar
from shardfuse.mesh import DeviceMesh, ParallelType
from shardfuse.ops.promotion import types
from shardfuse.ops.table import POINTWISE
from shardfuse.schedulers import looped, mix_order, persistent, pointwise, reduction, transpose
from shardfuse.segments.segment import Segment

Operand = BoundTensor | Scalar | float | int | bool


class Builder:
    """Exprs, one call each; operands of lower rank are broadcast as numpy does."""

    def __init__(self) -> None:
        self.exprs: list[Expr] = []
        self.inputs: list[BoundTensor] = []
        self.count = 0
        self.roots = 0

    def axis(self, size: int) -> Axis:
        self.roots += 1
        return axis_of(Root(f"i{self.roots - 1}", size))

    def define(self, dtype: DataType, axes: Sequence[Axis]) -> BoundTensor:
        self.count += 1
        return BoundTensor(f"T{self.count - 1}", dtype, BoundDomain(tuple(axes)))

    def input(self, dtype: DataType, *axes: Axis) -> BoundTensor:
        tensor = self.define(dtype, axes)
        self.inputs.append(tensor)
        return tensor

    def emit(self, op: Op, inputs: Sequence[Value], dtype: DataType, logical: Sequence[Axis]) -> BoundTensor:
        out = self.define(dtype, logical)
        self.exprs.append(Expr(op, tuple(inputs), (out,)))
        return out

    def op(self, name: str, *operands: Operand) -> BoundTensor:
        """A pointwise op; Python numbers are literals."""
        values: list[Value] = [v if isinstance(v, (BoundTensor, Scalar)) else number(v) for v in operands]
        ndim = max(v.ndim for v in values if isinstance(v, BoundTensor))
        aligned = [self.aligned(v, ndim) if isinstance(v, BoundTensor) else v for v in values]
        axes = [
            next((v.domain.logical[k] for v in aligned if isinstance(v, BoundTensor) and v.domain.logical[k]), ())
            for k in range(ndim)
        ]
        return self.emit(Pointwise(name), aligned, types(POINTWISE[name], values)[1], axes)

    def aligned(self, tensor: BoundTensor, ndim: int) -> BoundTensor:
        new = ndim - tensor.ndim
        if not new:
            return tensor
        flags = (True,) * new + (False,) * tensor.ndim
        return self.emit(Broadcast(flags), [tensor], tensor.dtype, ((),) * new + tensor.domain.logical)

    def cast(self, tensor: BoundTensor, dtype: DataType) -> BoundTensor:
        return self.emit(Cast(), [tensor], dtype, tensor.domain.logical)

    def reduce(
        self,
        op: ReductionKind,
        tensor: BoundTensor,
        axes: Sequence[int],
        *,
        keepdim: bool = True,
        dtype: DataType | None = None,
    ) -> BoundTensor:
        gone = tuple(a % tensor.ndim for a in axes)
        kept = [axis for k, axis in enumerate(tensor.domain.logical) if k not in gone]
        out = self.emit(Reduce(op, gone), [tensor], dtype or tensor.dtype, kept)
        if not keepdim:
            return out
        flags = tuple(k in gone for k in range(tensor.ndim))
        shape = [() if k in gone else axis for k, axis in enumerate(tensor.domain.logical)]
        return self.emit(Broadcast(flags), [out], out.dtype, shape)

    def mean(self, tensor: BoundTensor, axes: Sequence[int]) -> BoundTensor:
        size = 1
        for a in axes:
            size *= extent(tensor.domain.logical[a])
        return self.op("div", self.reduce("sum", tensor, axes), float(size))

    def permute(self, tensor: BoundTensor, dims: Sequence[int]) -> BoundTensor:
        axes = [tensor.domain.logical[d] for d in dims]
        return self.emit(Permute(tuple(dims)), [tensor], tensor.dtype, axes)

    def unflatten(self, tensor: BoundTensor, dim: int, inner: int) -> BoundTensor:
        """``dim`` as two dims, the second of extent ``inner``."""
        before = tensor.domain.logical
        axes = [*before[:dim], *split(before[dim], inner), *before[dim + 1 :]]
        return self.emit(Reshape(tuple(map(extent, axes))), [tensor], tensor.dtype, axes)

    def flatten(self, tensor: BoundTensor, first: int, last: int) -> BoundTensor:
        before = tensor.domain.logical
        axes = [*before[:first], merge(*before[first : last + 1]), *before[last + 1 :]]
        return self.emit(Reshape(tuple(map(extent, axes))), [tensor], tensor.dtype, axes)

    def expand(self, tensor: BoundTensor, axes: Sequence[Axis]) -> BoundTensor:
        return self.emit(Expand(tuple(map(extent, axes))), [tensor], tensor.dtype, axes)

    def iota(self, axis: Axis, start: int = 0, step: int = 1, dtype: DataType = DataType.Int) -> BoundTensor:
        return self.emit(Iota((extent(axis),), start, step), [], dtype, [axis])

    def segment(self, *outputs: BoundTensor) -> Segment:
        return Segment.of(self.exprs, outputs)


def number(value: Number) -> Scalar:
    """A literal of Python's own type."""
    match value:
        case bool():
            dtype = DataType.Bool
        case int():
            dtype = DataType.Int
        case _:
            dtype = DataType.Double
    return Scalar(f"{value}", dtype, value, is_literal=True)


def layout_of(tensor: BoundTensor, value: torch.Tensor, rank: int = 0) -> Layout:
    """The storage of ``value``, in digits: a strided dim of several digits is cut."""
    coordinates = tensor.domain.coordinates(rank)
    digits: list[Digit] = []
    extents: list[int] = []
    strides: list[int] = []
    for axis, stride in zip(tensor.domain.local_axes(), value.stride(), strict=True):
        step = stride
        at = len(digits)
        for d in reversed(axis):
            digits.insert(at, d)
            extents.insert(at, local_extent(d, coordinates))
            strides.insert(at, step)
            step *= extents[at]
    return Layout(tuple(digits), tuple(extents), tuple(strides))


def shard(segment: Segment, root: Root, ranks: int) -> Segment:
    """Cut the outer part of ``root`` over a 1-D mesh in every tensor that has it, unevenly where it must be."""
    mesh = DeviceMesh(list(range(ranks)))
    outer, _ = split(axis_of(root), -(-root.extent // ranks), uneven=True)
    for tensor in dict.fromkeys(t for e in segment.exprs for t in (*e.tensors, *e.outputs)):
        if any(root in roots(axis) for axis in tensor.domain.logical):
            tensor.domain = replace(tensor.domain, mesh=mesh, sharding=((ParallelType.mesh_x, outer),))
    return segment


def evaluate(
    segment: Segment,
    inputs: Mapping[BoundTensor, torch.Tensor],
    numbers: Mapping[Scalar, float] | None = None,
    rank: int = 0,
) -> list[Expected]:
    """Every output by torch, of what ``rank`` has of the inputs: dtype for dtype, and in float64."""
    return answers({**inputs, **(numbers or {})}, segment.exprs, segment.outputs, rank)


def rms_norm(rows: int, columns: int, dtype: DataType, *, residual: bool = False) -> Segment:
    """x (+ residual, stored) normalised over its rows and scaled."""
    b = Builder()
    i, j = b.axis(rows), b.axis(columns)
    x = b.input(dtype, i, j)
    more = b.input(dtype, i, j) if residual else None
    weight = b.input(dtype, j)
    total = b.op("add", x, more) if more else x
    wide = b.cast(total, DataType.Float)
    scale = b.op("rsqrt", b.op("add", b.mean(b.op("mul", wide, wide), [1]), 1e-6))
    out = b.cast(b.op("mul", b.op("mul", wide, scale), b.cast(weight, DataType.Float)), dtype)
    return b.segment(*((total, out) if residual else (out,)))


def scheduler_of(segment: Segment) -> ModuleType:
    """The first scheduler that takes ``segment``, in order of priority."""
    schedulers = (mix_order, persistent, reduction, transpose, pointwise, looped)
    return next(s for s in schedulers if s.why_not(segment, H200) is None)


def kernels_of(segment: Segment) -> list[KernelSource]:
    """The kernels of ``segment`` on contiguous tensors."""
    scheduler = scheduler_of(segment)
    plans = scheduler.kernels(segment, scheduler.propose(segment, H200), H200)
    return [generate(p, {t: t.domain.layout(0) for t in (*p.segment.inputs, *p.segment.outputs)}, 0) for p in plans]
