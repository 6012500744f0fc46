"""remove_dead_code: Exprs that no output needs go.

before::

    inputs: T0[i0]:Float
    T1[i0]:Float = neg(T0)
    T2[i0]:Float = exp(T0)
    outputs: T2

after::

    inputs: T0[i0]:Float
    T2[i0]:Float = exp(T0)
    outputs: T2
"""

from __future__ import annotations

from ..ir.expr import BoundFusion, Expr


def remove_dead_code(fusion: BoundFusion) -> None:
    needed = dict.fromkeys(fusion.outputs)
    kept: list[Expr] = []
    for expr in reversed(fusion.exprs):
        if any(out in needed for out in expr.outputs):
            kept.append(expr)
            needed.update(dict.fromkeys(expr.tensors))
    fusion.exprs = kept[::-1]
