"""Where results may be off by 1e-6 of themselves, for fusions that promise the same bits on any number of ranks.

A kernel of any other fusion says by itself whether the rounding of what it makes of a result hides such an error
(``segments/rounding.py``).  With other ranks the same ops are in other kernels, which would say otherwise: so it is
said once, of the whole fusion, before it is cut into kernels.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import BoundFusion, Expr
from ..ir.op import Pointwise
from ..ops.table import POINTWISE
from ..segments.rounding import is_lost, is_of_statistic
from ..segments.segment import Segment


def let_be_rough(fusion: BoundFusion) -> None:
    """Mark the pointwise ops whose text may be the rough one."""
    if fusion.promises.ranks:
        whole = Segment.of(fusion.exprs, fusion.outputs)
        fusion.exprs = [_marked(whole, expr) for expr in fusion.exprs]


def _marked(whole: Segment, expr: Expr) -> Expr:
    op = expr.op
    if not isinstance(op, Pointwise) or POINTWISE[op.name].rough is None:
        return expr
    is_rough = is_of_statistic(whole, expr) or is_lost(whole, expr)
    return replace(expr, op=replace(op, is_rough=True)) if is_rough else expr
