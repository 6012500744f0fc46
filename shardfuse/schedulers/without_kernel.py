"""Segments that no generated kernel runs: a collective, a view, or a call of torch."""

from __future__ import annotations

from ..analysis.communication_table import communication_of, packed
from ..device import Device
from ..ir.call import Call
from ..ir.expr import Expr
from ..ir.op import Relabel, StreamSlice, View
from ..ops.torch_calls import TORCH_CALLS
from ..segments.segment import Segment, touches_empty
from ..segments.space import refusal_of


def why_no_communication(segment: Segment, device: Device) -> str | None:
    """One collective, or one move between two meshes; several small all-reduces are one."""
    if len(segment.exprs) != 1:
        return None if packed(segment.exprs) else "a collective stands alone"
    found = communication_of(segment.exprs[0])
    if found is None:
        return "it changes no sharding"
    return "a slice moves nothing" if found.is_free else None


def why_not_nothing(segment: Segment, device: Device) -> str | None:
    """Views of one tensor, and the free slice of a replicated one."""
    for expr in segment.exprs:
        found = communication_of(expr)
        if found is not None and not found.is_free:
            return f"{expr.output} is communicated"
        if found is None and not isinstance(expr.op, View | Relabel | StreamSlice) and not _is_view(expr):
            return f"{expr.output} is computed by {expr.op.name}"
    return None


def _is_view(expr: Expr) -> bool:
    return isinstance(expr.op, Call) and TORCH_CALLS[expr.op.name].is_view


def why_no_call(segment: Segment, device: Device) -> str | None:
    """One op that torch does better than generated code, or of which a tensor has no elements."""
    if len(segment.exprs) != 1:
        return "a torch call stands alone"
    (expr,) = segment.exprs
    if touches_empty(expr):
        return None  # there is little to do, and a kernel walks at least one element
    return f"{expr.op.name} is not a torch call" if refusal_of(expr) is None else None
