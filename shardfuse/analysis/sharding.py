"""What sharding an Expr computes in, and what each of its tensors must have for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from ..ir.call import Call
from ..ir.digits import Axis, CutError, Digit, cut_out, extent, joined, merge, overlaps, parted, refine, split
from ..ir.domain import BoundDomain, Sharding, without
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce, Relabel, Reshape, StreamCat, StreamSlice
from ..mesh import DeviceMesh, ParallelType
from ..ops.torch_calls import TORCH_CALLS, Signature


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
            if parallel_type in taken or not stand_together([*taken.values(), digits]):
                continue
            taken[parallel_type] = digits
    return ordered(taken.items())


def stand_together(axes: Sequence[Axis]) -> bool:
    """Can one tensor have all of them on mesh dimensions?  They are disjoint, and common cuts part them."""
    if overlaps(axes):
        return False
    try:
        refine(d for axis in axes for d in axis)
    except CutError:
        return False
    return True


def ordered(entries: Iterable[tuple[ParallelType, Axis]]) -> Sharding:
    """Outermost mesh dimension first."""
    return tuple(sorted(entries, key=lambda entry: -entry[0].mesh_index))


def restrict(sharding: Sharding, logical: Sequence[Axis], mesh: DeviceMesh | None) -> Sharding:
    """The entries that a tensor of these axes can have; it is replicated over the other mesh dimensions.

    Each is held by a whole axis too, not only by what other entries leave of it: ``(i0, i1)`` of [2, 3] holds ``i1/2``,
    and never ``i1%2``, which short shards have only where ``i1`` is outermost.
    """
    kept: dict[ParallelType, Axis] = {}
    todo = {p: d for p, d in sharding if mesh is not None and p in mesh.parallel_types and carries(logical, d)}
    while mesh is not None:
        local = [without(axis, tuple(d for digits in kept.values() for d in digits)) for axis in logical]
        found = next((p for p, digits in todo.items() if _holds(local, digits, mesh.extent(p))), None)
        if found is None:
            break
        kept[found] = todo.pop(found)
    return tuple(entry for entry in sharding if entry[0] in kept)


def _holds(local: Sequence[Axis], digits: Axis, ranks: int) -> bool:
    """Can a tensor of which a rank walks ``local`` be cut by ``digits``?  Short shards only of an outermost part."""
    return carries(local, digits) and (is_even(digits, ranks) or outermost(local, digits) is not None)


def is_possible(entries: Mapping[ParallelType, Axis], logical: Sequence[Axis], mesh: DeviceMesh) -> bool:
    """Can a tensor of these axes have all of ``entries``?"""
    return stand_together(list(entries.values())) and len(restrict(tuple(entries.items()), logical, mesh)) == len(
        entries
    )


def is_untouched(logical: Sequence[Axis], digits: Axis) -> bool:
    """Is a tensor of these axes the same for all values of ``digits``?"""
    return not overlaps([*logical, digits])


def is_opaque(expr: Expr) -> bool:
    """Does ``expr`` take its input's elements to unrelated roots (``relabel``, a reshape that shares no cut), or to
    chunks?  No kernel reads through it."""
    if isinstance(expr.op, Relabel | StreamSlice | StreamCat):
        return True
    if not isinstance(expr.op, Reshape):
        return False
    return joined(expr.tensors[0].domain.logical) != joined(expr.output.domain.logical)


def mesh_of(tensors: Iterable[BoundTensor]) -> DeviceMesh | None:
    return next((t.domain.mesh for t in tensors if t.domain.mesh is not None), None)


def home_of(expr: Expr) -> DeviceMesh | None:
    """The mesh that ``expr`` computes on: that of the input with the most dims.  Inputs on others are moved there."""
    return mesh_of(sorted(expr.tensors, key=lambda t: -t.ndim))


def computed_in(expr: Expr) -> Sharding:
    """The sharding of the iteration space that follows from the inputs: the largest input decides a conflict."""
    if is_opaque(expr):
        return _through_relabel(expr) if isinstance(expr.op, Relabel) else ()
    home = home_of(expr)
    inputs = sorted((t for t in expr.tensors if t.domain.mesh == home), key=unsharded_bytes, reverse=True)
    joined = join(t.domain.sharding for t in inputs)
    if isinstance(expr.op, Call):  # a part of what another input lost to the conflict may be no part of any alone
        return allowed(expr, joined if home is None else restrict_to_inputs(joined, expr, home))
    if isinstance(expr.op, Reduce):
        reduced, rest = reduced_axes(expr), expr.output.domain.logical
        return tuple((p, d) for p, d in joined if carries(reduced, d) or carries(rest, d))
    return restrict(joined, expr.output.domain.logical, home)


def reduced_axes(expr: Expr) -> tuple[Axis, ...]:
    """The logical axes of the input that a reduction reduces, or that a torch call contracts."""
    if isinstance(expr.op, Reduce):
        logical = expr.tensors[0].domain.logical
        return tuple(logical[k] for k in expr.op.axes)
    if isinstance(expr.op, Call):
        signature = signature_of(expr, expr.op)
        kept = [name for names in signature.outputs for name in names]
        return tuple(axis for name, axis in _named(expr, signature) if name not in kept and not name.endswith("*"))
    return ()


def walked_axes(expr: Expr) -> list[tuple[Axis, ...]]:
    """For each input tensor the axes that it is read along: of which a rank needs the part that it computes.

    Along the other axes of a torch call it is read at places that anything may tell (indices do), and so whole on every
    rank, also where such an axis has the digits of an axis that is walked: ``index_select(x, i) + x``.
    """
    if not isinstance(expr.op, Call):
        return [t.domain.logical for t in expr.tensors]
    pairs = zip(expr.tensors, signature_of(expr, expr.op).inputs, strict=True)
    return [
        tuple(axis for name, axis in zip(names, t.domain.logical, strict=True) if not name.endswith("*"))
        for t, names in pairs
    ]


def allowed(expr: Expr, sharding: Sharding) -> Sharding:
    """The entries that ``expr`` can be computed in: a torch call says which axes may be sharded.

    An input that walks a part of an entry's digits cannot be cut as the others are.
    """
    if not isinstance(expr.op, Call):
        return sharding
    walked = walked_axes(expr)
    kept = tuple(axis for axes in walked for axis in axes)
    return tuple(
        (p, digits)
        for p, digits in sharding
        if carries(kept, digits) and all(carries(axes, digits) or is_untouched(axes, digits) for axes in walked)
    )


def signature_of(expr: Expr, op: Call) -> Signature:
    """The names of the axes of a torch call; ``op``: that of ``expr``."""
    shapes = [[extent(axis) for axis in t.domain.logical] for t in expr.tensors]
    return TORCH_CALLS[op.name].signature(shapes, op)


def _named(expr: Expr, signature: Signature) -> list[tuple[str, Axis]]:
    """Every axis of the inputs with its name."""
    pairs = zip(expr.tensors, signature.inputs, strict=True)
    return [(name, axis) for t, names in pairs for name, axis in zip(names, t.domain.logical, strict=True)]


def needed_by(expr: Expr, space: Sharding, mesh: DeviceMesh | None) -> list[Sharding]:
    """What each input tensor must have for ``expr`` to be computed in ``space``; one that stands twice may need two."""
    if not isinstance(expr.op, Relabel):
        return [restrict(space, axes, mesh) for axes in walked_axes(expr)]
    kept = dict(space)
    return [tuple(entry for entry in t.domain.sharding if entry[0] in kept) for t in expr.tensors]


def restrict_to_inputs(sharding: Sharding, expr: Expr, mesh: DeviceMesh) -> Sharding:
    """The entries by which every input of ``expr`` can be sharded, or that do not matter to it."""

    held = [(axes, restrict(sharding, axes, mesh)) for axes in walked_axes(expr)]
    return tuple(entry for entry in sharding if all(entry in own or is_untouched(axes, entry[1]) for axes, own in held))


def _through_relabel(expr: Expr) -> Sharding:
    """The input's sharding said in the output's digits: the same positions along the same logical axes."""
    source, target = expr.tensors[0].domain, expr.output.domain
    found = [(p, same_place(source.logical, target.logical, digits)) for p, digits in source.sharding]
    return ordered((p, digits) for p, digits in found if digits)


def same_place(source: Sequence[Axis], target: Sequence[Axis], digits: Axis) -> Axis:
    """The digits of ``target`` at the places that ``digits`` have in ``source``; empty where there is no such cut."""
    try:
        return merge(*(_placed(source, target, d) for d in digits))
    except CutError:
        return ()


def _placed(source: Sequence[Axis], target: Sequence[Axis], d: Digit) -> Axis:
    if isinstance(d.base, Digit):  # an uneven cut: of the same part
        (base,) = _placed(source, target, d.base) or (None,)
        if base is None:
            raise CutError(f"{d} has no place in {target}")
        return (Digit(base, d.weight, d.extent),)
    for a, b in zip(source, target, strict=True):
        found = cut_out(a, d)
        if found is None:
            continue
        (_, singles), (plain, others) = parted(a), parted(b)
        if d in singles:
            return others[singles.index(d) :][:1]
        if found[0] and d.weight * d.extent > d.base.extent:  # short in every run of what stands above it
            raise CutError(f"{d} of {a} has no place in {b}")
        upper, _ = split(plain, extent(found[1]), uneven=True)
        return upper if extent(upper) <= d.extent else split(upper, d.extent)[1]
    raise CutError(f"{d} is not in {source}")


def outermost(logical: Sequence[Axis], digits: Axis) -> int | None:
    """The axis whose outermost part is the one digit of ``digits``, or ``None``.  A single element stands anywhere."""
    if len(digits) != 1:
        return None
    for k, axis in enumerate(logical):
        found = cut_out(axis, digits[0])
        if found is not None:
            return k if not found[0] or digits[0].base.extent == 1 else None
    return None


def is_even(digits: Axis, ranks: int) -> bool:
    """Does each of ``ranks`` hold as much as every other?"""
    return extent(digits) == ranks and all(
        d.base.extent % d.weight == 0 and (d.base.extent // d.weight) % d.extent == 0 for d in digits
    )


def with_sharding(domain: BoundDomain, mesh: DeviceMesh | None, sharding: Sharding) -> BoundDomain:
    """``domain`` on ``mesh``; a declared order in memory loses the digits that go to other ranks."""
    gone = tuple(d for _, digits in sharding for d in digits)
    stored = None if domain.allocation is None else tuple(without(axis, gone) for axis in domain.allocation)
    return replace(domain, mesh=mesh, sharding=sharding, allocation=stored)
