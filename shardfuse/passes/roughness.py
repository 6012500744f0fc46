"""Which ops may take their rough text, for fusions that promise the same bits on any number of ranks.

A kernel of any other fusion says by itself whether the rounding of what it makes of a result hides an error of 1e-6
(``segments/rounding.py``).  With other ranks the same ops are in other kernels, which would say otherwise: so it is
said once, of the whole fusion, before it is cut into kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.expr import BoundFusion, BoundTensor, Expr
from ..ir.op import Pointwise, Relabel
from ..ops.table import POINTWISE
from ..segments.rounding import is_lost, is_of_statistic
from ..segments.segment import Segment


def say_what_is_rough(fusion: BoundFusion) -> None:
    """Say of each op that has a rough text whether it may take that."""
    if fusion.promises.ranks:
        whole, bare = _without_relabels(fusion.exprs, fusion.outputs)
        fusion.exprs = [_told(whole, bare.get(e.output, e), e) for e in fusion.exprs]


def _without_relabels(exprs: Sequence[Expr], outputs: Sequence[BoundTensor]) -> tuple[Segment, dict[BoundTensor, Expr]]:
    """The ops as they are on one rank, and that which makes each tensor: a mesh may ask for other roots of an axis."""
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


def _told(whole: Segment, bare: Expr, expr: Expr) -> Expr:
    op = expr.op
    if not isinstance(op, Pointwise) or POINTWISE[op.name].rough is None:
        return expr
    return replace(expr, op=replace(op, is_rough=is_of_statistic(whole, bare) or is_lost(whole, bare)))
