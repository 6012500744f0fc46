"""Ops that torch does better than generated code: one call each."""

from __future__ import annotations

from ..ops.table import POINTWISE
from ..ops.torch_calls import TORCH_CALLS
from .segment import Segment


def why_not(segment: Segment) -> str | None:
    if len(segment.exprs) != 1:
        return "a torch call stands alone"
    expr = segment.exprs[0]
    if expr.op in TORCH_CALLS or (expr.op in POINTWISE and POINTWISE[expr.op].triton is None):
        return None
    if any(t.dtype.is_complex for t in (*expr.tensors, *expr.outputs)):
        return None
    return f"{expr.op} is not a torch call"
