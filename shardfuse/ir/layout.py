"""How one rank stores a tensor: local digits with this rank's extents and strides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .digits import Axis, Digit, Root, digit_value

Coordinates = Mapping[Digit, int]
"""This rank's value of each digit that is parallel on a mesh dimension."""


@dataclass(frozen=True)
class Layout:
    """One rank's storage: digits outermost first, with *this rank's* extents and strides; mesh digits take none.

    An uneven shard has other extents and strides on the last ranks, so a layout is a rank's, never the program's.
    """

    digits: Axis
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def contiguous(order: Iterable[Axis], coordinates: Coordinates) -> Layout:
        """``order``: axes outermost first."""
        digits = tuple(d for axis in order for d in axis if d not in coordinates)
        extents = tuple(local_extent(d, coordinates) for d in digits)
        strides: list[int] = []
        for i in reversed(range(len(digits))):
            strides.insert(0, strides[0] * extents[i + 1] if strides else 1)
        return Layout(digits, extents, tuple(strides))

    def offset(self, index: Mapping[Root, int]) -> int:
        """Elements from the start of the storage to the element at ``index``."""
        return sum(s * digit_value(d, index) for d, s in zip(self.digits, self.strides, strict=True))


def local_extent(d: Digit, coordinates: Coordinates) -> int:
    """How many values ``d`` takes on the rank at ``coordinates``: fewer than its extent at the end of an uneven cut.

    Only where mesh digits are all that stands above ``d`` is it known which part of the base the rank holds.
    """
    above = {m.weight: (m, k) for m, k in coordinates.items() if m.base == d.base}
    top, start = d.weight * d.extent, 0
    while top < d.base.extent:
        if top not in above:
            return d.extent
        m, k = above[top]
        start += k * m.weight
        top = m.weight * m.extent
    return max(0, min(d.extent, -(-(_base_extent(d, coordinates) - start) // d.weight)))


def _base_extent(d: Digit, coordinates: Coordinates) -> int:
    return d.base.extent if isinstance(d.base, Root) else local_extent(d.base, coordinates)


def is_uneven(d: Digit, mesh_digits: Iterable[Digit]) -> bool:
    """May some rank have fewer values of ``d`` than its extent?  ``mesh_digits``: all that are parallel on the mesh.

    As ``local_extent``: mesh digits that are all that is above ``d`` span more than the base where some rank has less.
    """
    parallel = tuple(mesh_digits)
    is_of_short = isinstance(d.base, Digit) and is_uneven(d.base, parallel)
    if d.is_top:
        return is_of_short
    above = {m.weight: m for m in parallel if m.base == d.base}
    top = d.weight * d.extent
    while top < d.base.extent:
        if top not in above:
            return False
        top = above[top].weight * above[top].extent
    return is_of_short or top != d.base.extent


def is_present(coordinates: Coordinates) -> bool:
    """Does the rank hold anything?  5 rows over 4 ranks are 2, 2, 1 and none: a mesh digit of 3 values, not 4."""
    return all(k < min(d.extent, local_extent(d, coordinates)) for d, k in coordinates.items())
