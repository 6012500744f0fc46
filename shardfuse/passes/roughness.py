"""Which ops may take their rough text, for fusions that promise the same bits on any number of ranks.

A kernel of any other fusion says by itself whether the rounding of what it makes of a result hides an error of 1e-6
(``segments/rounding.py``).  On another number of ranks the same ops are in other kernels, which would decide otherwise.
So this pass decides once, for the whole fusion, before it is cut into kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.expr import BoundFusion, BoundTensor, Expr
from ..ir.op import Pointwise, Relabel
from ..ops.table import POINTWISE
from ..segments.rounding import is_lost, is_of_statistic
from ..segments.segment import Segment


def mark_rough_ops(fusion: BoundFusion) -> None:
    """Set ``Pointwise.is_rough`` of each op that has a rough text."""
    if fusion.promises.ranks:
        whole, bare = _without_relabels(fusion.exprs, fusion.outputs)
        fusion.exprs = [_marked(whole, bare.get(e.output, e), e) for e in fusion.exprs]


def _without_relabels(exprs: Sequence[Expr], outputs: Sequence[BoundTensor]) -> tuple[Segment, dict[BoundTensor, Expr]]:
    """The ops as one rank has them, and by each tensor the op that makes it: relabels differ with the mesh."""
    same: dict[BoundTensor, BoundTensor] = {}
    bare: dict[BoundTensor, Expr] = {}
    for expr in exprs:
        inputs = tuple(same.get(v, v) if isinstance(v, BoundTensor) else v for v in expr.inputs)
        if isinstance(expr.op, Relabel):
            (source,) = (v for v in inputs if isinstance(v, BoundTensor))
            same[expr.output] = source
        else:
            bare[expr.output] = replace(expr, inputs=inputs)
    return Segment.of(list(bare.values()), [same.get(t, t) for t in outputs]), bare


def _marked(whole: Segment, bare: Expr, expr: Expr) -> Expr:
    op = expr.op
    if not isinstance(op, Pointwise) or POINTWISE[op.name].rough is None:
        return expr
    return replace(expr, op=replace(op, is_rough=is_of_statistic(whole, bare) or is_lost(whole, bare)))
