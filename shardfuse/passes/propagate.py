"""propagate_shardings: tensors about which nothing was said get a mesh and a sharding.

before (nothing was said of T2)::

    inputs: T0[i0/4@mesh_x i0%4, i1]:Float, T1[i1]:Float
    T2[i0, i1]:Float = add(T0, T1)
    outputs: T2

after::

    inputs: T0[i0/4@mesh_x i0%4, i1]:Float, T1[i1]:Float
    T2[i0/4@mesh_x i0%4, i1]:Float = add(T0, T1)
    outputs: T2

Forward first, in the order of the Exprs: an output holds what its inputs hold.  Then backward: a tensor is sharded
further where everything that reads it wants it so, for replicated to sharded is free and what makes it has less to do.
Outputs of the fusion stay as they came out forward, but for one that partial sums are reduced to: where all who read
it want a part of it over the same mesh dimension, it is scattered.  Both again, until no tensor is reached that had no
mesh.
"""

from __future__ import annotations

from ..analysis.sharding import (
    allowed,
    carries,
    computed_in,
    home_of,
    is_opaque,
    join,
    mesh_of,
    reduced_axes,
    restrict,
    same_place,
    walked_axes,
    with_sharding,
)
from ..ir.digits import Axis
from ..ir.domain import Sharding
from ..ir.expr import BoundFusion, BoundTensor, Expr
from ..ir.op import Relabel
from ..mesh import DeviceMesh, ParallelType


def propagate_shardings(fusion: BoundFusion) -> None:
    said = _on_a_mesh(fusion)
    settled: dict[BoundTensor, None] | None = None
    while settled is None or len(_on_a_mesh(fusion)) > len(
        settled
    ):  # backward may reach what other tensors are made of
        settled = _on_a_mesh(fusion)
        _forward(fusion, settled)
        _backward(fusion, said)


def _on_a_mesh(fusion: BoundFusion) -> dict[BoundTensor, None]:
    return dict.fromkeys(t for t in fusion.tensors() if t.domain.mesh is not None)


def _forward(fusion: BoundFusion, settled: dict[BoundTensor, None]) -> None:
    for expr in fusion.exprs:
        mesh = home_of(expr)
        if mesh is None:
            continue
        sharding = computed_in(expr)
        for out in expr.outputs:
            if out not in settled:
                out.domain = with_sharding(out.domain, mesh, restrict(sharding, out.domain.logical, mesh))


def _backward(fusion: BoundFusion, said: dict[BoundTensor, None]) -> None:
    wants: dict[BoundTensor, list[tuple[DeviceMesh, Sharding]]] = {}
    settled = {**said, **dict.fromkeys(fusion.outputs)}
    for expr in reversed(fusion.exprs):
        for out in expr.outputs:
            if out in fusion.outputs and out not in said and out.domain.mesh is not None:
                over = _partial_dims(expr)
                scattered = [(mesh, tuple(e for e in want if e[0] in over)) for mesh, want in wants.get(out, [])]
                _refine(out, scattered, said)
            else:
                _refine(out, wants.get(out, []), settled)
        mesh = mesh_of((*expr.outputs, *expr.tensors))
        if mesh is not None:
            for t, axes in zip(expr.tensors, walked_axes(expr), strict=True):
                wants.setdefault(t, []).append((mesh, _wanted(expr, t, axes)))
    for value in fusion.inputs if not fusion.is_settled else ():
        if isinstance(value, BoundTensor):
            _refine(value, wants.get(value, []), settled)


def _partial_dims(expr: Expr) -> list[ParallelType]:
    """The mesh dimensions over which ``expr`` leaves partial sums."""
    reduced = reduced_axes(expr)
    return [p for p, digits in computed_in(expr) if carries(reduced, digits)] if reduced else []


def _refine(tensor: BoundTensor, wants: list[tuple[DeviceMesh, Sharding]], settled: dict[BoundTensor, None]) -> None:
    """Add to ``tensor``'s sharding the entries that every reader wants."""
    if not wants or (tensor in settled and tensor.domain.mesh is not None):
        return
    mesh, first = wants[0]
    if any(other != mesh for other, _ in wants) or tensor.domain.mesh not in (None, mesh):
        return
    common = tuple(entry for entry in first if all(entry in sharding for _, sharding in wants))
    joined = restrict(join([tensor.domain.sharding, common]), tensor.domain.logical, mesh)
    tensor.domain = with_sharding(tensor.domain, mesh, joined)


def _wanted(expr: Expr, tensor: BoundTensor, walked: tuple[Axis, ...]) -> Sharding:
    """What ``expr`` is best served with for its input ``tensor``, of which it walks these axes."""
    out = expr.output.domain
    if is_opaque(expr):
        if not isinstance(expr.op, Relabel):
            return ()
        moved = ((p, same_place(out.logical, tensor.domain.logical, digits)) for p, digits in out.sharding)
        return tuple((p, digits) for p, digits in moved if digits)
    mesh = mesh_of((*expr.outputs, *expr.tensors))
    if tensor.domain.mesh not in (None, mesh) or mesh != (home_of(expr) or mesh):
        return ()  # it comes from another mesh, or what is made of it goes to one
    wanted = join([allowed(expr, out.sharding), computed_in(expr)])
    return restrict(wanted, walked, mesh)
