"""The splits, merges and parallelisations that a definition recorded, with sizes: digits, shardings and storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ..analysis.sharding import is_even, restrict
from ..errors import ScheduleError, ShardingError
from ..ir.digits import Axis, CutError, extent, parted, refine, root_of
from ..ir.domain import BoundDomain, IterDomain, Sharding, Split, without
from ..ir.expr import BoundTensor
from ..ir.layout import is_present, local_extent
from ..ir.stream import Stream, Swizzle
from ..ir.tensor_view import TensorView
from ..mesh import ParallelType


def fits(tv: TensorView, axes: Sequence[Axis]) -> bool:
    """Can the recorded splits and merges of ``tv`` be replayed on ``axes``, and mesh dimensions hold what they say?"""
    domain = tv.domain
    if not domain.transforms:
        return True
    counts = domain.shared_singles([extent(axis) for axis in axes])
    if any(len(parted(axis)[1]) < n for axis, n in zip(axes, counts, strict=True)):
        return False
    try:
        made = domain.replay(dict(zip(domain.logical, axes, strict=True)))
    except CutError:
        return False
    if domain.mesh is None or not any(isinstance(t, Split) and t.uneven for t in domain.transforms):
        return True
    on = domain.mesh_axes()
    sharding = tuple((p, made[on[p]]) for p in domain.mesh.parallel_types if p in on and extent(made[on[p]]) > 1)
    return restrict(sharding, axes, domain.mesh) == sharding


def bound_domain(tv: TensorView, tensor: BoundTensor) -> BoundDomain:
    """The recorded transforms of ``tv`` replayed on the digits of ``tensor``."""
    domain = tv.domain
    try:
        axes = domain.replay(dict(zip(domain.logical, tensor.domain.logical, strict=True)))
    except CutError as error:
        raise ShardingError(
            f"{tv.name} of {[extent(a) for a in tensor.domain.logical]}",
            str(error),
            "a recorded split does not fit this size",
            "pad the axis, or allow short shards with uneven=True",
        ) from error
    sharding = _sharding(tv, tensor, axes)
    if restrict(sharding, tensor.domain.logical, domain.mesh) != sharding:
        raise ShardingError(
            f"{tv.name} of {[extent(a) for a in tensor.domain.logical]}",
            f"a part of an axis that is not its outermost is cut unevenly ({tv!r})",
            "only the last shards of an axis may be short",
            "pad the axis, or cut its outermost part with outer_split",
        )
    bound = replace(tensor.domain, mesh=domain.mesh, sharding=sharding)
    order = stored_axes(tv)
    if order is None or is_empty(tensor):
        return bound
    on_mesh = domain.mesh_axes().values()
    return replace(bound, allocation=tuple(without(axes[i], bound.mesh_digits) for i in order if i not in on_mesh))


def check_mesh_has(tv: TensorView) -> None:
    """Is each axis that is parallel on a mesh dimension parallel on one of this tensor's?  Raises ``ScheduleError``."""
    mesh = tv.domain.mesh
    for parallel_type, axis in tv.domain.mesh_axes().items():
        if mesh is None or parallel_type not in mesh.parallel_types:
            has = "no device mesh" if mesh is None else f"{mesh}, of {', '.join(p.name for p in mesh.parallel_types)}"
            raise ScheduleError(
                f"axis {axis} of {tv.name}", f"parallelize({parallel_type.name})", f"{tv.name} has {has}",
                f"call {tv.name}.set_device_mesh with a mesh that has this dimension",
            )  # fmt: skip


def check_strides_say(tv: TensorView, domain: BoundDomain) -> None:
    """Do strides of a tensor of logical rank say how ``domain`` stores it: each axis' parts side by side, in order?

    Raises ``ScheduleError``.
    """
    if domain.allocation is None or tv.allocation_rank:
        return
    storage, local = domain.storage(), domain.local_axes()
    cuts = refine(d for axis in (*storage, *local) for d in axis)
    stored = [atom for axis in storage for d in axis for atom in cuts[d] if atom.extent > 1]
    for k, axis in enumerate(local):
        parts = [atom for d in axis for atom in cuts[d] if atom.extent > 1]
        at = stored.index(parts[0]) if parts else 0
        if stored[at : at + len(parts)] != parts:
            raise ScheduleError(
                f"{tv.name}.set_allocation_domain", f"[{', '.join(str(i) for i in stored_axes(tv) or ())}]",
                f"no stride of a tensor's dim says where the parts of logical axis {k} are",
                f"hand {tv.name} over by allocation rank, with allocation_rank=True where it is defined or added",
            )  # fmt: skip


def streams_of(tv: TensorView, tensor: BoundTensor) -> list[Stream]:
    """The axis that is parallel on ``stream``; none where no axis is, or where it is one chunk.

    Raises ``ShardingError`` for chunks of different sizes, and for a ring that is not of as many ranks as chunks.
    """
    domain = tv.domain
    found = [i for i in domain.loop if domain.parallel.get(i) is ParallelType.stream]
    shape = [extent(axis) for axis in tensor.domain.logical]
    plain = [i for i in domain.swizzles if i not in found]
    if plain:
        raise ShardingError(
            f"{tv.name} of {shape}",
            f"axis {plain[0]} is swizzled and not parallel on stream",
            "swizzle1d orders the chunks of a stream",
            "parallelize the axis on stream",
        )
    if not found or is_empty(tensor):
        return []
    try:
        digits = [domain.replay(dict(zip(domain.logical, tensor.domain.logical, strict=True)))[i] for i in found]
    except CutError as error:
        raise ShardingError(
            f"{tv.name} of {shape}", str(error), "chunks of a stream are of one size", "pad the axis"
        ) from error
    if len(found) > 1:
        raise ShardingError(
            f"{tv.name} of {shape}",
            f"axes {found} are parallel on stream",
            "a tensor has one stream axis",
            "merge them, or parallelize one",
        )
    uneven = [d for own in digits if not is_even(own, extent(own)) for d in own]
    cut_short = [own for p, own in tensor.domain.sharding if not _is_even_on(tensor, p, own)]
    roots = [root_of(d) for own in digits for d in own]
    if uneven or any(root_of(d) in roots for own in cut_short for d in own):
        raise ShardingError(
            f"{tv.name} of {shape}",
            f"{extent(digits[0])} chunks along {found[0]}",
            "chunks of a stream are of one size",
            "pad the axis, or split it by a factor that divides it on every rank",
        )
    swizzle = _swizzle(tv, found[0], extent(digits[0]))
    return [Stream(own, swizzle) for own in digits if extent(own) > 1]


def _swizzle(tv: TensorView, axis: IterDomain, chunks: int) -> Swizzle | None:
    parallel_type, mesh = tv.domain.swizzles.get(axis), tv.domain.mesh
    if parallel_type is None:
        return None
    ranks = mesh.extent(parallel_type) if mesh is not None and parallel_type in mesh.parallel_types else 0
    if mesh is None or ranks != chunks:
        there = f"of {ranks} ranks" if ranks else "not of its mesh"
        raise ShardingError(
            f"axis {axis} of {tv.name}",
            f"it is {chunks} chunks, swizzled on {parallel_type.name}, {there}",
            "each rank begins with a chunk of its own",
            f"set a mesh, and split the axis by the ranks of {parallel_type.name}",
        )
    return Swizzle(mesh, parallel_type)


def _is_even_on(tensor: BoundTensor, p: ParallelType, digits: Axis) -> bool:
    mesh = tensor.domain.mesh
    return mesh is not None and is_even(digits, mesh.extent(p))


def stored_axes(tv: TensorView) -> tuple[IterDomain, ...] | None:
    """The allocation axes, mesh axes among them; ``None`` is the logical order."""
    by_rank = tuple(i for i in tv.domain.loop if not i.is_reduction) if tv.allocation_rank else None
    return tv.domain.allocation or by_rank


def allocation_shape(tv: TensorView, tensor: BoundTensor, rank: int) -> tuple[int, ...]:
    """The shape of ``rank``'s piece by allocation rank: one extent per allocation axis, 1 for a mesh axis.

    A mesh axis is 0 where the rank holds nothing of it.
    """
    logical = dict(zip(tv.domain.logical, tensor.domain.logical, strict=True))
    axes = tv.domain.replay(logical)
    coordinates = tensor.domain.coordinates(rank)
    on_mesh = tv.domain.mesh_axes().values()
    order = stored_axes(tv) or tv.domain.logical

    def size(axis: IterDomain) -> int:
        digits = without(axes[axis], () if axis in on_mesh else tensor.domain.mesh_digits)
        if axis in on_mesh:
            return int(is_present({d: coordinates[d] for d in digits if d in coordinates}))
        return prod(local_extent(d, coordinates) for d in digits)

    return tuple(map(size, order))


def is_empty(tensor: BoundTensor) -> bool:
    return any(extent(axis) == 0 for axis in tensor.domain.logical)


def _sharding(tv: TensorView, tensor: BoundTensor, axes: Mapping[IterDomain, Axis]) -> Sharding:
    domain = tv.domain
    if domain.mesh is None:
        return ()
    on = domain.mesh_axes()
    sharding: list[tuple[ParallelType, Axis]] = []
    for parallel_type in domain.mesh.parallel_types:
        if parallel_type not in on:
            continue
        digits, ranks = axes[on[parallel_type]], domain.mesh.extent(parallel_type)
        if extent(digits) == 0 or ranks == extent(digits) == 1 or (not digits and is_empty(tensor)):
            continue  # nothing to share out
        uneven = extent(digits) < ranks and any(isinstance(t, Split) and t.uneven for t in domain.transforms)
        if extent(digits) != ranks and not (uneven and digits):
            raise ShardingError(
                f"axis {on[parallel_type]} of {tv.name}",
                f"it has extent {extent(digits)}",
                f"mesh dimension {parallel_type.name} has {ranks} ranks",
                f"split the axis with outer_split(axis, {ranks}), uneven=True where the size does not divide"
                if digits
                else "one element goes to the first rank, by outer_split(..., uneven=True)",
            )
        if digits:
            sharding.append((parallel_type, digits))
    return tuple(sharding)
