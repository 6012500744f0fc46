"""propagate_shardings: tensors about which nothing was said get a mesh and a sharding.

before (T0 was given a mesh, T1 and T2 were not)::

    T2[i0, i1] = add(T0[i0@mesh_x, i1], T1[i1])

after::

    T2[i0@mesh_x, i1] = add(T0[i0@mesh_x, i1], T1[i1])

Forward first, in the order of the Exprs: an output holds what its inputs hold.  Then backward, for inputs and what was
made from them alone: a tensor is sharded as the Expr that reads it wants it.
"""

from __future__ import annotations

from ..analysis.sharding import computed_in, is_opaque, join, mesh_of, restrict, same_place, with_sharding
from ..ir.domain import Sharding
from ..ir.expr import BoundFusion, BoundTensor, Expr


def propagate_shardings(fusion: BoundFusion) -> None:
    for expr in fusion.exprs:
        mesh = mesh_of(expr.tensors)
        if mesh is None:
            continue
        sharding = computed_in(expr)
        for out in expr.outputs:
            if out.domain.mesh is None:
                out.domain = with_sharding(out.domain, mesh, restrict(sharding, out.domain.logical))
    for expr in reversed(fusion.exprs):
        mesh = mesh_of((*expr.outputs, *expr.tensors))
        if mesh is None:
            continue
        for t in expr.tensors:
            if t.domain.mesh is None:
                t.domain = with_sharding(t.domain, mesh, _wanted(expr, t))


def _wanted(expr: Expr, tensor: BoundTensor) -> Sharding:
    """What ``expr`` is best served with for its unsaid input ``tensor``."""
    out = expr.output.domain
    if is_opaque(expr):
        if expr.op != "relabel":
            return ()
        moved = ((p, same_place(out.logical, tensor.domain.logical, digits)) for p, digits in out.sharding)
        return tuple((p, digits) for p, digits in moved if digits)
    return restrict(join([out.sharding, computed_in(expr)]), tensor.domain.logical)
