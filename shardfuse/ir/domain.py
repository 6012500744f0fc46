"""Domains: how a TensorView's axes are seen, cut and stored.

``TensorDomain`` is symbolic: the logical axes of a definition and the transforms that its author recorded.
``BoundDomain`` is the same with sizes: every axis a tuple of digits.  Both are frozen and swapped whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ..mesh import DeviceMesh, ParallelType
from .digits import Axis, CutError, Digit, cut_out, extent, joined, parted, split
from .layout import Coordinates, Layout, is_present, local_extent


@dataclass(frozen=True, eq=False)
class IterDomain:
    """One axis of a definition, compared by identity.  ``extent`` is -1 where the size is symbolic.

    ``is_reduction``: an op has reduced it; it stands in a loop domain for the author's eye and says nothing.
    """

    name: str
    extent: int
    is_reduction: bool = False

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Split:
    """``axis`` cut in two.  ``factor`` is the inner part's extent, or the outer's where ``inner`` is false.

    ``uneven`` lets the last outer index be short, as ``torch.chunk`` cuts.
    """

    axis: IterDomain
    factor: int
    inner: bool
    uneven: bool
    out: tuple[IterDomain, IterDomain]

    @property
    def is_reduction(self) -> bool:
        return self.axis.is_reduction


@dataclass(frozen=True)
class Merge:
    """Two axes, outer first, become one."""

    axes: tuple[IterDomain, IterDomain]
    out: IterDomain

    @property
    def is_reduction(self) -> bool:
        return self.out.is_reduction


@dataclass(frozen=True)
class TensorDomain:
    """The symbolic domain of a definition's TensorView."""

    logical: tuple[IterDomain, ...]
    loop: tuple[IterDomain, ...]
    transforms: tuple[Split | Merge, ...] = ()
    allocation: tuple[IterDomain, ...] | None = None
    contiguity: tuple[bool | None, ...] = ()
    """One entry per allocation axis, outermost first: is it laid out without a gap before the next?"""
    parallel: Mapping[IterDomain, ParallelType] = field(default_factory=dict[IterDomain, ParallelType])
    mesh: DeviceMesh | None = None
    swizzles: Mapping[IterDomain, ParallelType] = field(default_factory=dict[IterDomain, ParallelType])
    """Axes in chunks of which each rank takes its own first: its index on that mesh dimension."""
    reduced: tuple[tuple[int, IterDomain], ...] = ()
    """Reduction axes that stand in ``loop``, and the places that they began at."""

    def mesh_axes(self) -> dict[ParallelType, IterDomain]:
        """The loop axes that are parallel on a mesh dimension."""
        walked = [i for i in self.loop if i in self.parallel and not i.is_reduction]
        return {self.parallel[i]: i for i in walked if self.parallel[i].is_mesh}

    def is_whole(self, axes: Sequence[IterDomain]) -> bool:
        """Do ``axes`` hold each element once?  They are logical ones, or what transforms have made of these."""
        found = set(self.logical)
        for t in self.transforms:
            before = t.axes if isinstance(t, Merge) else (t.axis,)
            if found.issuperset(before) and not set(before) & set(axes):
                found = (found - set(before)) | set(t.out if isinstance(t, Split) else (t.out,))
        kept = [axis for axis in axes if not axis.is_reduction]
        return len(kept) == len(found) and found == set(kept)

    def replay(self, logical: Mapping[IterDomain, Axis]) -> dict[IterDomain, Axis]:
        """Every axis that the transforms make, in digits.  Raises ``CutError`` where sizes do not allow a cut."""
        axes = dict(logical)
        singles = self._singles([extent(logical[axis]) for axis in self.logical])
        for transform in self.transforms:
            if transform.is_reduction:
                continue
            if isinstance(transform, Merge):
                axes[transform.out] = joined(axes[i] for i in transform.axes)
            else:
                parts = self._parts(transform.axis, extent(axes[transform.axis]))
                cut = _cut(axes[transform.axis], transform, singles.get(transform.out[0], 0), parts)
                axes.update(zip(transform.out, cut, strict=True))
        return axes

    def shared_singles(self, shape: Sequence[int]) -> tuple[int, ...]:
        """For each logical axis of these extents, how many mesh dimensions have one index of it to share out.

        The first rank of each has it: the element of an axis of one element; of 2 rows in 4 parts, which are split into
        2 x 2, the first 2 parts.
        """
        singles = self._singles(shape)
        return tuple(singles.get(axis, 0) for axis in self.logical)

    def _singles(self, shape: Sequence[int]) -> dict[IterDomain, int]:
        """As ``shared_singles``, of every axis that the transforms make, but for those of several others."""
        shared_out = self._shared_out()
        if not shared_out:
            return {}
        extents = dict(zip(self.logical, shape, strict=True))
        splits = [t for t in self.transforms if isinstance(t, Split) and not t.is_reduction]
        for t in splits:
            if t.axis in extents:  # else a part of a flattened axis
                parts = self._parts(t.axis, extents[t.axis])
                extents.update(zip(t.out, _extents(extents[t.axis], t, parts), strict=True))
        made = [t for t in splits if t.axis in extents]
        counts = {
            axis: 1
            for t in made
            for axis in t.out
            if axis in shared_out and extents[axis] == 1 and all(extents[i] for i in t.out)
        }
        for t in reversed(made):
            counts[t.axis] = sum(counts.get(i, 0) for i in t.out)
        return counts

    def _parts(self, axis: IterDomain, present: int) -> int:
        """How many indices ``axis`` was cut into: of 7 rows in 6 parts of 2, the last 2 of 6 have none.

        A split of such an axis is one of all its parts, so that part k is where the first split has put it.
        """
        return max(present, axis.extent) if present and axis in self._part_axes() else present

    def _part_axes(self) -> set[IterDomain]:
        """The outer parts of all splits, and what these are split into."""
        found: set[IterDomain] = set()
        for t in self.transforms:
            if isinstance(t, Split):
                found.update(t.out if t.axis in found else t.out[:1])
        return found

    def _shared_out(self) -> tuple[IterDomain, ...]:
        """The outer parts, allowed to be short, that are on a mesh dimension of several ranks.

        Short may also be what such parts are split into, as the last of them may have nothing.
        """
        mesh = self.mesh
        if mesh is None:
            return ()
        cut: set[IterDomain] = set()
        for t in self.transforms:
            if isinstance(t, Split) and t.axis in cut:
                cut.update(t.out)
            elif isinstance(t, Split) and t.uneven:
                cut.add(t.out[0])
        on = self.mesh_axes().items() if cut else ()
        return tuple(axis for p, axis in on if axis in cut and p in mesh.parallel_types and mesh.extent(p) > 1)


def _extents(total: int, transform: Split, parts: int) -> tuple[int, int]:
    """Of the outer and the inner part.  ``total``: of ``parts`` indices, how many there are."""
    if total == 0:
        return 1, 0
    inner = min(transform.factor if transform.inner else -(-parts // transform.factor), total)
    return -(-total // inner), inner


def _cut(axis: Axis, transform: Split, singles: int, parts: int) -> tuple[Axis, Axis]:
    """``singles``: how many single elements go to the outer part.  ``parts``: as of ``_extents``."""
    total = extent(axis)
    if total == 0:
        return (), axis
    if not (transform.inner or transform.uneven) and parts % transform.factor:
        raise CutError(f"{transform.factor} does not divide {parts}")
    plain, own = parted(axis)
    # parts that have nothing are the last ones: an even cut of all parts is an uneven one of the others
    is_short = transform.uneven or (parts > total and parts % transform.factor == 0)
    outer, inner = split(plain, _extents(total, transform, parts)[1], uneven=is_short)
    return (*outer, *own[:singles]), (*inner, *own[singles:])


Sharding = tuple[tuple[ParallelType, Axis], ...]
"""The digits that each mesh dimension walks, outermost mesh dimension first; a mesh dimension left out is replicated.

Mostly one digit; two where a flattened axis was cut across its parts.
"""


@dataclass(frozen=True)
class BoundDomain:
    """The domain of a tensor with sizes.

    ``allocation``: axes in storage order, outermost first; ``None`` is the logical order.
    ``dim_order``: of an input that was declared in a stride order, its dims as they lie in memory, outermost first.
    What its strides are is known in a call only: schedulers choose by this, and are right for any strides.
    """

    logical: tuple[Axis, ...]
    mesh: DeviceMesh | None = None
    sharding: Sharding = ()
    allocation: tuple[Axis, ...] | None = None
    dim_order: tuple[int, ...] = ()

    def __hash__(self) -> int:
        """Kept, as a digit's is."""
        kept: dict[str, int] = self.__dict__
        if "_hash" not in kept:
            kept["_hash"] = hash((self.logical, self.mesh, self.sharding, self.allocation, self.dim_order))
        return kept["_hash"]

    def digits_on(self, parallel_type: ParallelType) -> Axis:
        """The digits that ``parallel_type`` walks; empty where the tensor is replicated over it."""
        return next((digits for p, digits in self.sharding if p is parallel_type), ())

    @cached_property
    def mesh_digits(self) -> Axis:
        return tuple(d for _, digits in self.sharding for d in digits)

    @cached_property
    def is_empty(self) -> bool:
        """Has the tensor no elements?"""
        return any(d.extent == 0 for axis in self.logical for d in axis)

    @cached_property
    def local_elements(self) -> int:
        """Of one rank's piece; of the largest where shards are uneven."""
        return prod(d.extent for axis in self.local_axes() for d in axis)

    def local_axes(self) -> tuple[Axis, ...]:
        """The logical axes less their mesh digits: what one rank walks.  Digits stay cut at a mesh digit."""
        return self._local_axes

    @cached_property
    def _local_axes(self) -> tuple[Axis, ...]:
        gone = self.mesh_digits
        return tuple(without(axis, gone) for axis in self.logical) if gone else self.logical

    def coordinates(self, rank: int) -> Coordinates:
        """``rank``'s value of each mesh digit; empty without a mesh, or outside of it."""
        at = self.mesh.coordinate(rank) if self.mesh else None
        if self.mesh is None or at is None:
            return {}
        values: dict[Digit, int] = {}
        for parallel_type, digits in self.sharding:
            k = at[parallel_type.mesh_dim(self.mesh.ndim)]
            for i, d in reversed(list(enumerate(digits))):
                k, values[d] = divmod(k, d.extent) if i else (0, k)
        return values

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of ``rank``'s piece, one extent per logical axis."""
        known = self._local_shapes
        if rank not in known:
            known[rank] = self._local_shape(rank)
        return known[rank]

    @cached_property
    def _local_shapes(self) -> dict[int, tuple[int, ...]]:
        return {}

    def _local_shape(self, rank: int) -> tuple[int, ...]:
        coordinates = self.coordinates(rank)
        shape: list[int] = []
        for whole, axis in zip(self.logical, self.local_axes(), strict=True):
            here = {d: k for d, k in coordinates.items() if cut_out(whole, d) is not None}
            size = 1 if is_present(here) else 0
            for d in axis:
                size *= local_extent(d, here)
            shape.append(size)
        return tuple(shape)

    def storage(self) -> tuple[Axis, ...]:
        """Local axes in storage order, outermost first."""
        return self._storage

    @cached_property
    def _storage(self) -> tuple[Axis, ...]:
        if self.allocation is None:
            return self.local_axes()
        gone = self.mesh_digits
        return tuple(without(axis, gone) for axis in self.allocation) if gone else self.allocation

    def in_memory(self) -> tuple[Axis, ...]:
        """Local axes as they are expected in memory, outermost first."""
        if self.allocation is not None or not self.dim_order:
            return self.storage()
        local = self.local_axes()
        return tuple(local[d] for d in self.dim_order)

    def layout(self, rank: int) -> Layout:
        """``rank``'s contiguous storage in allocation order."""
        return Layout.contiguous(self.storage(), self.coordinates(rank))


def without(axis: Axis, mesh_digits: tuple[Digit, ...]) -> Axis:
    """``axis`` with ``mesh_digits`` cut out; what lies above and below is not joined across the gap."""
    pieces = [axis]
    for digit in mesh_digits:
        for k, piece in enumerate(pieces):
            found = cut_out(piece, digit)
            if found is not None:
                pieces[k : k + 1] = found
                break
    return tuple(d for piece in pieces for d in piece)
