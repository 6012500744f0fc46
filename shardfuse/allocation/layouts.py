"""Layouts from torch strides and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..ir.digits import Digit, refine
from ..ir.domain import BoundDomain
from ..ir.layout import Layout, local_extent


def layout_of(domain: BoundDomain, rank: int, strides: Sequence[int]) -> Layout:
    """The layout of a local tensor of logical rank with these strides (in elements)."""
    coordinates = domain.coordinates(rank)
    digits: list[Digit] = []
    extents: list[int] = []
    steps: list[int] = []
    for axis, stride in zip(domain.local_axes(), strides, strict=True):
        inner: list[int] = []
        for d in reversed(axis):
            inner.insert(0, stride)
            stride *= local_extent(d, coordinates)
        digits += axis
        extents += [local_extent(d, coordinates) for d in axis]
        steps += inner
    return Layout(tuple(digits), tuple(extents), tuple(steps))


def strides_of(domain: BoundDomain, rank: int) -> tuple[int, ...] | None:
    """Strides in which a logical-rank tensor has ``rank``'s storage; ``None`` where no strides can say it."""
    coordinates = domain.coordinates(rank)
    layout = domain.layout(rank)
    cuts = refine([*layout.digits, *(d for axis in domain.local_axes() for d in axis)])
    step: dict[Digit, int] = {}
    for d, stride in zip(layout.digits, layout.strides, strict=True):
        for atom in reversed(cuts[d]):
            step[atom] = stride
            stride *= local_extent(atom, coordinates)
    strides: list[int] = []
    for axis in domain.local_axes():
        atoms = [atom for d in axis for atom in cuts[d]]
        for outer, inner in pairwise(atoms):
            if step[outer] != step[inner] * local_extent(inner, coordinates) and local_extent(outer, coordinates) > 1:
                return None
        strides.append(step[atoms[-1]] if atoms else 1)
    ones = [k for k, axis in enumerate(domain.local_axes()) if not axis]
    for k, stride in zip(ones, _strides_of_ones(domain, rank), strict=False):
        strides[k] = stride
    return tuple(strides)


def _strides_of_ones(domain: BoundDomain, rank: int) -> list[int]:
    """Strides of the axes of extent 1, in storage order: what lies inside of them, as torch has it."""
    coordinates = domain.coordinates(rank)
    found: list[int] = []
    inside = 1
    for axis in reversed(domain.storage()):
        if not axis:
            found.insert(0, inside)
        for d in axis:
            inside *= local_extent(d, coordinates)
    return found
