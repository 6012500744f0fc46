"""Reductions by the torch backend: identities, and what sums are accumulated in."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from shardfuse.ir.dtype import DataType
from shardfuse.ir.op import ReductionKind
from shardfuse.ops.reductions import REDUCTION_TABLE


def test_every_reduction_has_an_entry() -> None:
    assert tuple(REDUCTION_TABLE) == get_args(ReductionKind)


@pytest.mark.parametrize("op", REDUCTION_TABLE)
@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16, DataType.Int, DataType.Int32, DataType.Bool])
def test_the_identity_changes_nothing(op: str, dtype: DataType) -> None:
    """Reducing [x, identity] gives x; reducing nothing gives the identity."""
    if op in ("any", "all"):
        dtype = DataType.Bool
    x = torch.tensor([-3.0, 0.0, 2.0]).to(dtype.torch)
    neutral = torch.full((3,), REDUCTION_TABLE[op].identity(dtype)).to(dtype.torch)
    assert torch.equal(REDUCTION_TABLE[op].torch(torch.stack([x, neutral]), (0,), dtype), x)
    assert torch.equal(REDUCTION_TABLE[op].torch(x.new_empty(0, 3), (0,), dtype), neutral)


def test_narrow_sums_are_accumulated_wide() -> None:
    """4096 ones and small ones in bfloat16: a sum in bfloat16 stops at 256."""
    x = torch.ones(4096, dtype=torch.bfloat16)
    total = REDUCTION_TABLE["sum"].torch
    assert total(x, (0,), DataType.BFloat16).item() == 4096
    assert total(torch.full((300,), 100, dtype=torch.int8), (0,), DataType.Int).item() == 30_000
