"""Plain reductions: inner, outer, middle and full; and a reduction whose input is used again in its first type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from shardfuse import FusionDefinition

from ..workload import Case, Draw, Tensors, Workload, define

# The mean keeps a sum away from zero, where no relative error could be small.
MEAN = 0.5


def _arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [draw.normal(case.shape, case.dtype, mean=MEAN)]


def _sum_fusion(dims: list[int]) -> Callable[[Case], FusionDefinition]:
    def fusion(case: Case) -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.ops.cast(define(fd, [-1] * len(case.shape), case.dtype), dtype=case.compute)
            fd.add_output(fd.ops.sum(x, dims or None))
        return fd

    return fusion


def _sum(dims: list[int]) -> Callable[..., Tensors]:
    return lambda case, x: (x.sum(dims or None, dtype=case.accurate),)


def _variance_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.ops.cast(define(fd, [-1, case.columns], case.dtype), dtype=case.compute)
        for t in fd.ops.var_mean(x, [-1]):
            fd.add_output(t)
    return fd


def _variance(case: Case, x: torch.Tensor) -> Tensors:
    return tuple(torch.var_mean(x.to(case.accurate), -1))


def _maximum_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.max(define(fd, [-1, case.columns], case.dtype), [-1]))
    return fd


def _maximum(case: Case, x: torch.Tensor) -> Tensors:
    return (x.amax(-1),)


# x + sum(x): a row held in its storage type and converted at each use


def _privatised_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.ops.cast(define(fd, [-1, case.columns], case.dtype), dtype=case.compute)
        total = fd.ops.broadcast(fd.ops.sum(x, [-1]), [False, True])
        fd.add_output(fd.ops.cast(fd.ops.add(x, total), dtype=case.data_type))
    return fd


def _privatised(case: Case, x: torch.Tensor) -> Tensors:
    wide = x.to(case.accurate)
    return ((wide + wide.sum(-1, keepdim=True)).to(x.dtype),)


def _beside_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [*_arguments(case, draw), draw.normal([case.columns, case.shape[0]], case.dtype, mean=MEAN)]


def _beside_fusion(case: Case) -> FusionDefinition:
    """The same beside an output that has nothing to do with it."""
    with FusionDefinition() as fd:
        x = fd.ops.cast(define(fd, [-1, case.columns], case.dtype), dtype=case.compute)
        other = fd.ops.cast(define(fd, [-1, -1], case.dtype), dtype=case.compute)
        total = fd.ops.broadcast(fd.ops.sum(x, [-1]), [False, True])
        fd.add_output(fd.ops.cast(fd.ops.add(x, total), dtype=case.data_type))
        fd.add_output(fd.ops.sum(other, [-1]))
    return fd


def _beside(case: Case, x: torch.Tensor, other: torch.Tensor) -> Tensors:
    return (*_privatised(case, x), other.sum(-1, dtype=case.accurate))


INNER = Workload(
    name="sum_inner",
    title="sum over the last axis",
    cases=("1048576x128", "16384x8192", "512x262144", "16x8388608"),
    tiny=("5x16", "7x51:float16", "3x1030:float32"),
    arguments=_arguments,
    fusion=_sum_fusion([1]),
    eager=_sum([1]),
    reference=_sum([1]),
    rows=(True,),
    roundings=4,
)
OUTER = replace(
    INNER,
    name="sum_outer",
    title="sum over the first axis",
    cases=("1048576x128", "16384x8192", "16384x8191", "512x262144"),
    tiny=("40x16", "300x51:float16"),
    fusion=_sum_fusion([0]),
    eager=_sum([0]),
    reference=_sum([0]),
    sums=(True,),
)
MIDDLE = replace(
    INNER,
    name="sum_middle",
    title="sum over the middle axis",
    cases=("64x2048x1024", "4096x64x512"),
    tiny=("3x40x16", "2x33x51:float16"),
    fusion=_sum_fusion([1]),
    eager=_sum([1]),
    reference=_sum([1]),
)
FULL = replace(
    INNER,
    name="sum_full",
    title="sum to a scalar",
    cases=("4096x4096", "16384x8192"),
    tiny=("40x16", "300x51:float16"),
    fusion=_sum_fusion([]),
    eager=_sum([]),
    reference=_sum([]),
    sums=(True,),
)
VARIANCE = replace(
    INNER,
    name="var_mean",
    title="variance and mean over the last axis",
    cases=("16384x8192", "2048x131072"),
    fusion=_variance_fusion,
    eager=_variance,
    reference=_variance,
    sums=(False, False),
)
MAXIMUM = replace(
    INNER,
    name="maximum",
    title="maximum over the last axis",
    cases=("16384x8192",),
    fusion=_maximum_fusion,
    eager=_maximum,
    reference=_maximum,
    roundings=0,
)
PRIVATISED = replace(
    INNER,
    name="privatised_cast",
    title="x + sum(x), a row kept as it is stored",
    cases=("128x65536", "4096x65536"),
    fusion=_privatised_fusion,
    eager=_privatised,
    reference=_privatised,
    roundings=2,
)
BESIDE = replace(
    PRIVATISED,
    name="privatised_cast_beside",
    title="x + sum(x), beside an unrelated output",
    cases=("128x65536",),
    arguments=_beside_arguments,
    fusion=_beside_fusion,
    eager=_beside,
    reference=_beside,
    rows=(False, False),
    sums=(False, False),
)
WORKLOADS = (INNER, OUTER, MIDDLE, FULL, VARIANCE, MAXIMUM, PRIVATISED, BESIDE)
