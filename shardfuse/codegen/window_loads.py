"""Loads at other places: how far a window's atoms move in the memory of what it reads, and where it holds anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.digits import Digit, extent
from ..ir.expr import Expr, reads_of
from ..ir.layout import Layout
from ..segments.space import Space
from .indexing import Strides, moved_by, row_major


@dataclass(frozen=True)
class Bound:
    """There are elements where ``start <= index < stop``; ``strides``: how far each atom moves the index, ``total``:
    how many there are."""

    strides: Strides
    start: int
    stop: int
    total: int


@dataclass(frozen=True)
class Window:
    """``strides``: elements that one step of each atom moves in the memory of the input, from ``first`` on."""

    strides: Strides
    first: int
    bounds: tuple[Bound, ...]

    def conditions(self, index: Callable[[Strides], str], part: Callable[[Strides], range | None]) -> list[str] | None:
        """Text of what must hold for an element to be there; ``None`` where none is.

        ``index``: text of an index with these strides; ``part``: which values it takes, where that is known.
        """
        found: list[str] = []
        for bound in self.bounds:
            here = part(bound.strides) or range(bound.total)
            if here.start >= bound.stop or here.stop <= bound.start:
                return None
            text = index(bound.strides)
            found += [f"{text} >= {bound.start}"] if here.start < bound.start else []
            found += [f"{text} < {bound.stop}"] if here.stop > bound.stop else []
        return found if len(found) == 1 else [f"({text})" for text in found]


def window_of(expr: Expr, layout: Layout, space: Space) -> Window:
    """The ``window`` ``expr``; ``layout``: of its input on this rank."""
    source, target = expr.tensors[0].domain, expr.output.domain
    steps = dict(zip(layout.digits, layout.strides, strict=True))
    strides: dict[Digit, int] = {}
    first, bounds = 0, list[Bound]()
    gone: set[Digit] = set()
    for r in reads_of(expr):
        old, new = source.logical[r.axis], target.logical[r.axis]
        gone.update(old)
        step = steps[old[-1]] if old else 0
        whole = row_major(new)
        index = {a: moved_by(a, whole) for d in new for a in space.pieces[d]}
        strides |= {a: n * r.step * step for a, n in index.items()}
        first += r.offset * step
        if r.start > 0 or r.stop < extent(new):
            bounds.append(Bound(index, r.start, r.stop, extent(new)))
    rest = {d: n for d, n in steps.items() if d not in gone}
    strides |= {atom: moved_by(atom, rest) for atom in space.atoms[expr.output] if atom not in strides}
    return Window(strides, first, tuple(bounds))
