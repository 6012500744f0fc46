"""Ops that torch does better than generated code: one call each."""

from __future__ import annotations

from .segment import Segment
from .space import refusal_of


def why_not(segment: Segment) -> str | None:
    if len(segment.exprs) != 1:
        return "a torch call stands alone"
    (expr,) = segment.exprs
    return f"{expr.op} is not a torch call" if refusal_of(expr) is None else None
