"""remove_copies: a copy of what a collective has just made is the collective's own result.

before::

    inputs: T0[i0@mesh_x, i1]:Float
    T1[i1]:Float = sum(T0, axes=(0,), mesh=mesh_x)
    T2[i1]:Float = set(T1)
    outputs: T2

after::

    inputs: T0[i0@mesh_x, i1]:Float
    T2[i1]:Float = sum(T0, axes=(0,), mesh=mesh_x)
    outputs: T2

Collectives return new storage, so nothing is written that somebody else has; what is sliced out of an input is not new.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.communication_table import communication_of
from ..ir.expr import BoundFusion, BoundTensor, Expr, Value
from ..ir.op import Set


def remove_copies(fusion: BoundFusion) -> None:
    made = {out for e in fusion.exprs if _makes_storage(e) for out in e.outputs}
    renamed: dict[BoundTensor, BoundTensor] = {}
    copies: list[Expr] = []
    for expr in fusion.exprs:
        if isinstance(expr.op, Set) and _may_go(expr, made, fusion) and expr.tensors[0] not in renamed:
            renamed[expr.tensors[0]] = expr.output
            copies.append(expr)
    if not copies:
        return

    def name(value: Value) -> Value:
        return renamed.get(value, value) if isinstance(value, BoundTensor) else value

    fusion.exprs = [
        replace(e, inputs=tuple(map(name, e.inputs)), outputs=tuple(renamed.get(t, t) for t in e.outputs))
        for e in fusion.exprs
        if e not in copies
    ]


def _makes_storage(expr: Expr) -> bool:
    found = communication_of(expr)
    return found is not None and not found.is_free


def _may_go(expr: Expr, made: set[BoundTensor], fusion: BoundFusion) -> bool:
    source, target = expr.tensors[0], expr.output
    return (
        source in made
        and source not in fusion.outputs
        and expr.chunk is None
        and source.dtype is target.dtype
        and source.domain == target.domain
    )
