"""Unsharded sizes from the local tensors of one rank.

In this order: what the definition says; what the caller says; local extent times ranks, for an even shard; the extent
of another input's axis that an op makes equal; and last, for an axis declared uneven whose size nothing else gives, the
sum of the local extents, which is an exchange of 8 bytes (``Unknown``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..analysis.extents import equal_extents
from ..ir.domain import IterDomain, Merge, TensorDomain
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView
from ..mesh import ParallelType


@dataclass(frozen=True)
class Unknown:
    """The extent of logical axis ``axis`` is the sum of ``local`` over the ranks along ``mesh_dims``."""

    tv: TensorView
    axis: int
    local: int
    mesh_dims: tuple[ParallelType, ...]


def origin(domain: TensorDomain, axis: IterDomain) -> IterDomain:
    """The logical axis that ``axis`` is a part of: the outer of two merged axes for an outer part, else the inner."""
    made_by = {out: t for t in domain.transforms for out in ((t.out,) if isinstance(t, Merge) else t.out)}
    outer = True
    while axis in made_by:
        transform = made_by[axis]
        if isinstance(transform, Merge):
            axis = transform.axes[0 if outer else 1]
        else:
            outer = axis is transform.out[0]
            axis = transform.axis
    return axis


def is_uneven(domain: TensorDomain, axis: IterDomain) -> bool:
    """Was a part of logical ``axis`` declared to allow short shards?"""
    return any(not isinstance(t, Merge) and t.uneven and origin(domain, t.out[0]) is axis for t in domain.transforms)


def local_logical_sizes(tv: TensorView, shape: Sequence[int]) -> list[int]:
    """Local logical extents of a tensor handed over by allocation rank (a mesh axis is 1)."""
    domain = tv.domain
    order = domain.allocation or domain.loop
    sizes = dict.fromkeys(domain.logical, 1)
    for axis, n in zip(order, shape, strict=True):
        sizes[origin(domain, axis)] *= n
    return [sizes[axis] for axis in domain.logical]


def global_sizes(
    fusion: Fusion, locals_: Mapping[TensorView, Sequence[int]], said: Mapping[TensorView, Sequence[int]]
) -> tuple[dict[TensorView, list[int]], list[Unknown]]:
    """The unsharded shape of every input, and the axes (0 in the shape) that only an exchange can tell.

    ``locals_``: local logical shapes; ``said``: unsharded shapes that the caller gave.
    """
    sizes: dict[TensorView, list[int]] = {}
    unknown: list[Unknown] = []
    for tv, local in locals_.items():
        sizes[tv] = list(said.get(tv, ()))
        if tv in said:
            continue
        for k, n in enumerate(local):
            found = _extent(tv, k, n)
            sizes[tv].append(n if found is None else found)
            if found is None:
                dims = tuple(
                    p for p, axis in tv.domain.mesh_axes().items() if origin(tv.domain, axis) is tv.domain.logical[k]
                )
                unknown.append(Unknown(tv, k, n, dims))
    return sizes, _from_other_inputs(fusion, sizes, unknown) if unknown else []


def _extent(tv: TensorView, k: int, local: int) -> int | None:
    domain = tv.domain
    axis = domain.logical[k]
    if tv.shape[k] >= 0:
        return tv.shape[k]
    if domain.mesh is None:
        return local
    ranks = prod(domain.mesh.extent(p) for p, a in domain.mesh_axes().items() if origin(domain, a) is axis)
    if ranks == 1:
        return local
    return None if is_uneven(domain, axis) else local * ranks


def _from_other_inputs(fusion: Fusion, sizes: dict[TensorView, list[int]], unknown: Sequence[Unknown]) -> list[Unknown]:
    """Fill in what an equal axis of another input tells; return what is left."""
    missing = {(u.tv, u.axis) for u in unknown}
    ones = [
        axis
        for tv, shape in sizes.items()
        for k, (axis, n) in enumerate(zip(tv.domain.logical, shape, strict=True))
        if n == 1 and (tv, k) not in missing
    ]
    classes = equal_extents(fusion, ones)
    known: dict[IterDomain, int] = {}
    for tv, shape in sizes.items():
        for k, n in enumerate(shape):
            if (tv, k) not in missing and n != 1:
                known.setdefault(classes[tv.domain.logical[k]], n)
    left: list[Unknown] = []
    for u in unknown:
        found = known.get(classes[u.tv.domain.logical[u.axis]])
        if found is None:
            left.append(u)
        else:
            sizes[u.tv][u.axis] = found
    return left
