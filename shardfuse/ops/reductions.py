"""The reductions: of each, one entry says how elements are combined, in kernels, between programs, and by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ..ir.dtype import DataType
from ..ir.op import ReductionKind
from ..ir.scalar import Number
from .moved_bits import comparable, compared

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Reduction:
    """How one reduction combines elements.

    carried: the type of a partial result, of the type that is reduced and that of the result.  A kernel carries truth
    values, Bool, as int32.
    identity: what nothing comes to, in a carried type, or in that of the result.  Where a type has no infinity it is
    the outermost of its numbers, beside which any element stays what it is, a NaN too.
    torch: the reduction of a tensor over axes, not kept, in the type of the result; of an empty extent the identity.
    combine: the Triton function of two values (``kernel_functions/``); "" where they are added.
    is_exact: the result is one of what was reduced, so that it needs no rounding.
    """

    carried: Callable[[DataType, DataType], DataType]
    identity: Callable[[DataType], Number]
    torch: Callable[[torch.Tensor, Axes, DataType], torch.Tensor]
    combine: str = ""
    is_exact: bool = False


def _sum(x: torch.Tensor, axes: Axes, dtype: DataType) -> torch.Tensor:
    return x.to(dtype.accumulator.torch).sum(axes).to(dtype.torch) if axes else x.to(dtype.torch)


def _product(x: torch.Tensor, axes: Axes, dtype: DataType) -> torch.Tensor:
    return _one_by_one(torch.prod, x.to(dtype.accumulator.torch), axes).to(dtype.torch)


def _any(x: torch.Tensor, axes: Axes, dtype: DataType) -> torch.Tensor:
    return _one_by_one(torch.any, x.to(torch.bool), axes).to(dtype.torch)


def _all(x: torch.Tensor, axes: Axes, dtype: DataType) -> torch.Tensor:
    return _one_by_one(torch.all, x.to(torch.bool), axes).to(dtype.torch)


def _one_by_one(reduce: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """``x`` with its axes reduced one after the other, by a function of torch's that takes one."""
    for axis in sorted(axes, reverse=True):
        x = reduce(x, axis)
    return x


def extreme(op: str, x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The largest or smallest element over ``axes``, none of which is empty, in any dtype that has an order."""
    ordered = comparable(x)
    return compared(ordered.amax(axes) if op == "max" else ordered.amin(axes), x.dtype)


def _extreme(op: Literal["max", "min"]) -> Callable[[torch.Tensor, Axes, DataType], torch.Tensor]:
    def reduced(x: torch.Tensor, axes: Axes, dtype: DataType) -> torch.Tensor:
        if not axes:
            return x
        if any(x.shape[a] == 0 for a in axes):
            shape = [n for k, n in enumerate(x.shape) if k not in axes]
            return torch.full(shape, REDUCTION_TABLE[op].identity(dtype), dtype=dtype.torch, device=x.device)
        return extreme(op, x, axes)

    return reduced


def _least(dtype: DataType) -> Number:
    if dtype.is_floating:
        return float("-inf") if dtype.has_infinity else torch.finfo(dtype.torch).min
    return False if dtype is DataType.Bool else int(torch.iinfo(dtype.torch).min)


def _greatest(dtype: DataType) -> Number:
    if dtype.is_floating:
        return float("inf") if dtype.has_infinity else torch.finfo(dtype.torch).max
    return True if dtype is DataType.Bool else int(torch.iinfo(dtype.torch).max)


def _accumulated(source: DataType, result: DataType) -> DataType:
    return result.accumulator


def _compared(source: DataType, result: DataType) -> DataType:
    return source.compute


def _told(source: DataType, result: DataType) -> DataType:
    return DataType.Bool


REDUCTION_TABLE: dict[ReductionKind, Reduction] = {
    "sum": Reduction(_accumulated, lambda _: 0, _sum),
    "prod": Reduction(_accumulated, lambda _: 1, _product, "product"),
    "max": Reduction(_compared, _least, _extreme("max"), "maximum", is_exact=True),
    "min": Reduction(_compared, _greatest, _extreme("min"), "minimum", is_exact=True),
    "any": Reduction(_told, lambda _: 0, _any, "maximum", is_exact=True),
    "all": Reduction(_told, lambda _: 1, _all, "minimum", is_exact=True),
}
