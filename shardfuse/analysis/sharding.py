"""What sharding an Expr computes in, and what each of its tensors must have for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import cast

from ..ir.digits import Axis, CutError, cut_out, extent, merge, overlaps, split
from ..ir.domain import BoundDomain, Sharding
from ..ir.expr import REDUCTIONS, BoundTensor, Expr
from ..mesh import DeviceMesh, ParallelType
from ..ops.torch_calls import TORCH_CALLS


def carries(logical: Sequence[Axis], digits: Axis) -> bool:
    """Does a tensor of these axes hold every one of ``digits`` whole?"""
    return all(any(cut_out(axis, d) is not None for axis in logical) for d in digits)


def unsharded_bytes(tensor: BoundTensor) -> int:
    return prod(extent(axis) for axis in tensor.domain.logical) * tensor.dtype.itemsize


def join(shardings: Iterable[Sharding]) -> Sharding:
    """All entries that can stand together: an earlier one wins a mesh dimension, or digits that overlap."""
    taken: dict[ParallelType, Axis] = {}
    for sharding in shardings:
        for parallel_type, digits in sharding:
            if parallel_type in taken or overlaps([*taken.values(), digits]):
                continue
            taken[parallel_type] = digits
    return ordered(taken.items())


def ordered(entries: Iterable[tuple[ParallelType, Axis]]) -> Sharding:
    """Outermost mesh dimension first."""
    return tuple(sorted(entries, key=lambda entry: -entry[0].mesh_index))


def restrict(sharding: Sharding, logical: Sequence[Axis]) -> Sharding:
    """The entries whose digits a tensor of these axes holds; it is replicated over the other mesh dimensions."""
    return tuple((p, digits) for p, digits in sharding if carries(logical, digits))


def is_opaque(expr: Expr) -> bool:
    """Does ``expr`` take its input's elements to unrelated roots (``relabel``, a reshape that shares no cut)?"""
    if expr.op == "relabel":
        return True
    if expr.op != "reshape":
        return False
    return merge(*expr.tensors[0].domain.logical) != merge(*expr.output.domain.logical)


def mesh_of(tensors: Iterable[BoundTensor]) -> DeviceMesh | None:
    return next((t.domain.mesh for t in tensors if t.domain.mesh is not None), None)


def computed_in(expr: Expr) -> Sharding:
    """The sharding of the iteration space that follows from the inputs: the largest input decides a conflict."""
    if is_opaque(expr):
        return _through_relabel(expr) if expr.op == "relabel" else ()
    inputs = sorted(expr.tensors, key=unsharded_bytes, reverse=True)
    joined = join(t.domain.sharding for t in inputs)
    if expr.op in TORCH_CALLS:
        kept = _shardable(expr)
        return tuple((p, digits) for p, digits in joined if carries(kept, digits))
    if expr.op in REDUCTIONS:
        reduced, rest = reduced_axes(expr), expr.output.domain.logical
        return tuple((p, d) for p, d in joined if carries(reduced, d) or carries(rest, d))
    return joined


def reduced_axes(expr: Expr) -> tuple[Axis, ...]:
    """The logical axes of the input that a reduction reduces, or that a torch call contracts."""
    if expr.op in REDUCTIONS:
        logical = expr.tensors[0].domain.logical
        return tuple(logical[k] for k in cast(tuple[int, ...], expr.attributes["axes"]))
    if expr.op in TORCH_CALLS:
        *ins, outs = TORCH_CALLS[expr.op].names([t.ndim for t in expr.tensors])
        named = ((name, t.domain.logical[k]) for t, names in zip(expr.tensors, ins, strict=True) for k, name in enumerate(names))
        return tuple(axis for name, axis in named if name not in outs and not name.endswith("*"))
    return ()


def _shardable(expr: Expr) -> tuple[Axis, ...]:
    *ins, _ = TORCH_CALLS[expr.op].names([t.ndim for t in expr.tensors])
    return tuple(
        t.domain.logical[k]
        for t, names in zip(expr.tensors, ins, strict=True)
        for k, name in enumerate(names)
        if not name.endswith("*")
    )


def _through_relabel(expr: Expr) -> Sharding:
    """The input's sharding said in the output's digits: the same positions along the same logical axes."""
    source, target = expr.tensors[0].domain, expr.output.domain
    found = [(p, same_place(source.logical, target.logical, digits)) for p, digits in source.sharding]
    return ordered((p, digits) for p, digits in found if digits)


def same_place(source: Sequence[Axis], target: Sequence[Axis], digits: Axis) -> Axis:
    """The digits of ``target`` at the positions that ``digits`` have in ``source``; empty where there is no such cut."""
    out: list[Axis] = []
    for d in digits:
        for a, b in zip(source, target, strict=True):
            found = cut_out(a, d)
            if found is None:
                continue
            try:
                upper, _ = split(b, extent(found[1]), uneven=True)
                out.append(upper if extent(upper) <= d.extent else split(upper, d.extent)[1])
            except CutError:
                return ()
    return merge(*out)


def outermost(logical: Sequence[Axis], digits: Axis) -> int | None:
    """The axis whose outermost part is the one digit of ``digits``, or ``None``."""
    if len(digits) != 1:
        return None
    for k, axis in enumerate(logical):
        found = cut_out(axis, digits[0])
        if found is not None:
            return k if not found[0] else None
    return None


def is_even(digits: Axis, ranks: int) -> bool:
    """Does each of ``ranks`` hold as much as every other?"""
    return extent(digits) == ranks and all(d.base.extent % d.weight == 0 and (d.base.extent // d.weight) % d.extent == 0 for d in digits)


def with_sharding(domain: BoundDomain, mesh: DeviceMesh | None, sharding: Sharding) -> BoundDomain:
    return replace(domain, mesh=mesh, sharding=sharding)
