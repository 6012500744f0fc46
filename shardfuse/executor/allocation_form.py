"""Tensors handed over by allocation rank: one dim per allocation axis, a mesh axis being 1.

logical ``[6]`` stored as ``merge(i%3, i/3)`` comes as ``[0, 3, 1, 4, 2, 5]`` and is ``[0..5]`` to every op.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..ir.digits import Axis, refine
from ..ir.domain import BoundDomain
from ..ir.layout import local_extent

Convert = Callable[[torch.Tensor], torch.Tensor]


def _digits(domain: BoundDomain, rank: int) -> tuple[list[int], list[int], list[int], tuple[int, ...]]:
    """Atom extents in storage order and in logical order, the way from the first to the second, the logical shape."""
    storage = [d for axis in domain.storage() for d in axis]
    logical = [d for axis in domain.local_axes() for d in axis]
    cuts = refine([*storage, *logical])
    stored: Axis = tuple(atom for d in storage for atom in cuts[d])
    wanted: Axis = tuple(atom for d in logical for atom in cuts[d])
    coordinates = domain.coordinates(rank)
    extents = [local_extent(atom, coordinates) for atom in stored]
    order = [stored.index(atom) for atom in wanted]
    return extents, [extents[k] for k in order], order, domain.local_shape(rank)


def from_allocation(domain: BoundDomain, rank: int) -> Convert:
    """From allocation rank to a logical-rank tensor."""
    extents, _, order, shape = _digits(domain, rank)
    if 0 in shape:
        return lambda x: x.reshape(shape)
    return lambda x: x.reshape(extents).permute(order).reshape(shape).contiguous()


def to_allocation(domain: BoundDomain, rank: int, shape: tuple[int, ...]) -> Convert:
    """From a logical-rank tensor to allocation rank, of ``shape``."""
    if 0 in shape:
        return lambda x: x.reshape(shape)
    _, extents, order, _ = _digits(domain, rank)
    back = [order.index(k) for k in range(len(order))]
    return lambda x: x.reshape(extents).permute(back).reshape(shape).contiguous()
