"""The reduction over ranks of what every rank gave, once it lies in one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ir.op import ReductionKind as Reduction
from ..ops.reductions import extreme

# What sums and products of a dtype are accumulated in where it is not the dtype itself.
_SUM_DTYPE: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}


def reduce_members(stacked: Tensor, op: Reduction) -> Tensor:
    """Reduce `[members, ...]` over its first dimension; the result has its dtype.

    Floats of 16 and 8 bits are summed in float32 and rounded once; max and min keep NaN; booleans have or and and;
    integers wrap around.
    """
    dtype = stacked.dtype
    if dtype == torch.bool:
        return stacked.any(0) if op in ("any", "sum", "max") else stacked.all(0)
    if op in ("max", "min"):
        return extreme(op, stacked, (0,))
    if dtype == torch.uint64:  # as signed numbers, of which sums and products have the same bits
        return reduce_members(stacked.view(torch.int64), op).view(torch.uint64)
    if dtype.is_floating_point and dtype.itemsize == 1:
        return reduce_members(stacked.float(), op).to(dtype)
    match op:
        case "sum":
            return stacked.sum(0, dtype=_SUM_DTYPE.get(dtype, dtype)).to(dtype)
        case "prod":
            return stacked.prod(0, dtype=_SUM_DTYPE.get(dtype, dtype)).to(dtype)
        case _:
            raise AssertionError(f"no reduction {op} of {dtype}")
