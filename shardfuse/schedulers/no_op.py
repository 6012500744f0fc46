"""Segments that run no kernel: views of one tensor, and the free slice of a replicated one."""

from __future__ import annotations

from ..analysis.communication_table import communication_of
from ..device import Device
from ..ir.call import Call
from ..ir.expr import Expr
from ..ir.op import Relabel, StreamSlice, View
from ..ops.torch_calls import TORCH_CALLS
from .segment import Segment


def why_not(segment: Segment, device: Device) -> str | None:
    for expr in segment.exprs:
        found = communication_of(expr)
        if found is not None and not found.is_free:
            return f"{expr.output} is communicated"
        if found is None and not isinstance(expr.op, View | Relabel | StreamSlice) and not _is_view(expr):
            return f"{expr.output} is computed by {expr.op.name}"
    return None


def _is_view(expr: Expr) -> bool:
    return isinstance(expr.op, Call) and TORCH_CALLS[expr.op.name].is_view
