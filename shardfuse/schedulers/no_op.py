"""Segments that run no kernel: views of one tensor, and the free slice of a replicated one."""

from __future__ import annotations

from ..analysis.communication_table import communication_of
from ..device import Device
from ..ir.expr import VIEWS, Expr
from ..ops.torch_calls import TORCH_CALLS
from .segment import Segment


def why_not(segment: Segment, device: Device) -> str | None:
    for expr in segment.exprs:
        found = communication_of(expr)
        if found is not None and found.kind != "slice":
            return f"{expr.output} is communicated"
        if found is None and expr.op not in (*VIEWS, "relabel", "stream_slice") and not _is_view(expr):
            return f"{expr.output} is computed by {expr.op}"
    return None


def _is_view(expr: Expr) -> bool:
    return expr.op in TORCH_CALLS and TORCH_CALLS[expr.op].is_view
