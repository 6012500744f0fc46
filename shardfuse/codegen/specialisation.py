"""Which sizes stand in a kernel's text, and which are arguments: a kernel serves every size of the latter.

An index over several atoms is taken apart by the extents of those inside of others, and an offset is a multiple of what
lies inside in memory (``indexing``); what a program holds of a row is cut into blocks when the text is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod

from ..ir.digits import Axis, Digit, extent
from ..ir.expr import reads_of
from ..ir.layout import Coordinates, local_extent
from ..ir.op import Iota, Random
from ..schedulers.plan import KernelPlan
from ..segments.space import stored_atoms
from .indexing import Strides, runs
from .tile import Layouts, Tile, coordinates_on


@dataclass(frozen=True)
class Size:
    """An axis of one rank's piece of ``tensor``; ``literal``: what of its extent stands in the text, or ``None``."""

    tensor: str
    axis: int
    literal: int | None

    def __str__(self) -> str:
        where = f"axis {self.axis} of {self.tensor}"
        return where if self.literal is None else f"{self.literal} ({where})"


@dataclass(frozen=True)
class Specialisation:
    """Every axis of what ``kernel`` reads and writes, once."""

    kernel: str
    sizes: tuple[Size, ...]

    def __str__(self) -> str:
        literal = [str(s) for s in self.sizes if s.literal is not None]
        free = [str(s) for s in self.sizes if s.literal is None]
        parts = [f"{word}: {', '.join(found)}" for word, found in (("literal", literal), ("any", free)) if found]
        return f"{self.kernel}: {'; '.join(parts) or 'no sizes'}"


def specialised(plan: KernelPlan, layouts: Layouts, rank: int) -> tuple[Specialisation, ...]:
    """Of the kernel of ``plan``, or of each of its stages, for ``rank``, whose storage ``layouts`` says."""
    if plan.stages:
        return tuple(s for stage in plan.stages for s in specialised(stage, layouts, rank))
    coordinates = coordinates_on(plan.segment, rank)
    literal = _literal(plan, layouts, coordinates)
    seen: dict[Axis, None] = {}
    sizes: list[Size] = []
    for tensor in (*plan.segment.inputs, *plan.segment.loads, *plan.segment.outputs):
        for k, axis in enumerate(tensor.domain.local_axes()):
            if not axis or axis in seen:
                continue
            seen[axis] = None
            if any(d not in plan.space.pieces for d in axis):  # of what is read through windows: their bounds
                sizes.append(Size(str(tensor), k, prod(local_extent(d, coordinates) for d in axis)))
                continue
            atoms = [a for d in axis for a in plan.space.pieces[d]]
            found = [local_extent(a, coordinates) for a in atoms if a in literal]
            if plan.split not in atoms:
                sizes.append(Size(str(tensor), k, prod(found) if found else None))
    return (Specialisation(plan.name, tuple(sizes)),)


def _literal(plan: KernelPlan, layouts: Layouts, coordinates: Coordinates) -> dict[Digit, None]:
    """The atoms whose extents stand in the text."""
    space, tile = plan.space, Tile(plan, layouts, coordinates)
    found: dict[Digit, None] = {}
    if space.walked or plan.schedule.is_held:
        found.update(dict.fromkeys(space.r))
    if space.grouped:
        columns = takewhile(lambda k: extent(space.x[k + 1 :]) < space.grouped, range(len(space.x))[::-1])
        found.update(dict.fromkeys(space.x[k] for k in columns))
    for tensor, strides in tile.strides.items():
        found.update(_in_offset(plan, strides, stored_atoms(tensor, space.pieces), coordinates))
    for tensor, window in tile.windows.items():
        order = stored_atoms(tensor, space.pieces)
        found.update(_in_offset(plan, window.strides, order, coordinates))
        bounded = [tensor.domain.local_axes()[r.axis] for r in reads_of(plan.segment.windows[tensor])]
        found.update(dict.fromkeys(a for axis in bounded for d in axis for a in space.pieces[d]))
    for expr in plan.segment.exprs:
        if isinstance(expr.op, Iota | Random):
            order = tuple(a for axis in expr.output.domain.local_axes() for d in axis for a in space.pieces[d])
            found.update(_in_offset(plan, tile.index_strides(expr)[0], order, coordinates))
    return found


def _in_offset(plan: KernelPlan, strides: Strides, order: Axis, coordinates: Coordinates) -> dict[Digit, None]:
    """Of one tensor, whose atoms lie in memory in ``order``."""
    found: dict[Digit, None] = {}
    for side in _sides(plan, strides):
        extents = [local_extent(a, coordinates) for a in side]
        below = [prod(extents[k + 1 :]) for k in range(len(side))]
        for g in runs(extents, [strides.get(a, 0) for a in side]):
            inside = [a for a, n in zip(side, below, strict=True) if n < g.below]
            own = [a for a, n in zip(side, below, strict=True) if g.below <= n < g.below * g.extent]
            found.update(dict.fromkeys((*inside, *([] if g.is_outermost else own))))
            last = [a for a in own if a in order][-1:]
            found.update(dict.fromkeys(a for a in order[order.index(last[0]) + 1 :]) if last else {})
    return found


def _sides(plan: KernelPlan, strides: Strides) -> Sequence[Axis]:
    """The atoms that one index each walks."""
    space = plan.space
    if space.sides[1]:
        return space.around, *space.sides
    if space.walked and not any(strides.get(a) for a in space.walked):
        return tuple(a for a in space.x if a not in space.walked), space.r
    return space.x, space.r
