"""Ops that torch does better than generated code, and those of which a tensor has no elements: one call each."""

from __future__ import annotations

from ..device import Device
from .segment import Segment, touches_empty
from .space import refusal_of


def why_not(segment: Segment, device: Device) -> str | None:
    if len(segment.exprs) != 1:
        return "a torch call stands alone"
    (expr,) = segment.exprs
    if touches_empty(expr):
        return None  # there is little to do, and a kernel walks at least one element
    return f"{expr.op.name} is not a torch call" if refusal_of(expr) is None else None
