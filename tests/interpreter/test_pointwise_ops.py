"""Every op with Triton text, in every type that a kernel takes, as a generated kernel under the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import run
from op_cases import assert_answer, cases, operands
from segments import Builder

from shardfuse.ir.dtype import DataType
from shardfuse.ops.table import POINTWISE
from shardfuse.schedulers import pointwise
from shardfuse.schedulers.space import refusal_of

_ROUNDINGS = 16
"""tanh, gelu and the like are composed of several roundings."""


def _interpreted() -> list[tuple[str, torch.dtype]]:
    """Types whose arithmetic is its own; the narrow ones are computed as float32 and tried with a few ops elsewhere."""
    kept = (torch.float64, torch.float32, torch.int64, torch.int32, torch.bool)
    return [(name, dtype) for name, dtype in cases() if dtype in kept and POINTWISE[name].triton is not None]


@pytest.mark.parametrize(("name", "dtype"), _interpreted())
def test_pointwise(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    op = POINTWISE[name]
    values = operands(op, dtype)
    b = Builder()
    axis = b.axis(len(values[0]))
    inputs = [b.input(DataType.from_torch(v.dtype), axis) for v in values]
    out = b.op(name, *inputs)
    if refusal_of(b.exprs[-1]) is not None:
        pytest.skip("a torch call in this type")
    (found,) = run(b.segment(out), dict(zip(inputs, values, strict=True)), tmp_path, scheduler=pointwise)
    assert_answer(found, op, values, roundings=_ROUNDINGS)
