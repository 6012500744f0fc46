"""The reduction over ranks of what every rank gave, once it lies in one tensor."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "prod", "max", "min", "any", "all"]

# What sums and products of a dtype are accumulated in where it is not the dtype itself.
_SUM_DTYPE: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}
# torch does not order these; the wider dtype holds their values exactly.
_ORDER_DTYPE: dict[torch.dtype, torch.dtype] = {torch.uint16: torch.int64, torch.uint32: torch.int64}


def reduce_members(stacked: Tensor, op: Reduction) -> Tensor:
    """Reduce `[members, ...]` over its first dimension; the result has its dtype.

    Floats of 16 and 8 bits are summed in float32 and rounded once; max and min keep NaN; booleans have or and and;
    integers wrap around.
    """
    dtype = stacked.dtype
    if dtype == torch.bool:
        return stacked.any(0) if op in ("any", "sum", "max") else stacked.all(0)
    if dtype == torch.uint64:
        return _reduce_uint64(stacked, op)
    if dtype.is_floating_point and dtype.itemsize == 1:
        return reduce_members(stacked.float(), op).to(dtype)
    match op:
        case "sum":
            return stacked.sum(0, dtype=_SUM_DTYPE.get(dtype, dtype)).to(dtype)
        case "prod":
            return stacked.prod(0, dtype=_SUM_DTYPE.get(dtype, dtype)).to(dtype)
        case "max":
            return stacked.to(_ORDER_DTYPE.get(dtype, dtype)).amax(0).to(dtype)
        case "min":
            return stacked.to(_ORDER_DTYPE.get(dtype, dtype)).amin(0).to(dtype)
        case _:
            raise AssertionError(f"no reduction {op} of {dtype}")


def _reduce_uint64(stacked: Tensor, op: Reduction) -> Tensor:
    """As signed numbers: sums and products have the same bits, and with the top bit flipped the same order."""
    signed = stacked.view(torch.int64)
    if op in ("sum", "prod"):
        return reduce_members(signed, op).view(torch.uint64)
    lowest = torch.iinfo(torch.int64).min
    return (reduce_members(signed ^ lowest, op) ^ lowest).view(torch.uint64)
