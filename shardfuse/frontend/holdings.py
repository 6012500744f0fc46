"""Who holds what: the unsharded indices of each axis of a tensor that are on a rank."""

from __future__ import annotations

from ..ir.digits import Axis, Digit, Root, cut_out, extent
from ..ir.domain import BoundDomain

_MOST_STEPS = 65536
"""Indices that are looked at one by one; of axes that would take more, only the number is given."""


def held(domain: BoundDomain, dim: int, rank: int) -> tuple[tuple[int, int], ...] | None:
    """Runs ``(start, stop)`` of dim ``dim`` that ``rank`` holds, in order; ``None`` where they are too many to find.

    Of a rank outside of the tensor's mesh, and of one whose part is empty, there are none.
    """
    axis = domain.logical[dim]
    total = extent(axis)
    if domain.mesh is not None and domain.mesh.coordinate(rank) is None:
        return ()
    if not domain.local_shape(rank)[dim]:
        return ()
    here = {d: k for d, k in domain.coordinates(rank).items() if cut_out(axis, d) is not None}
    if not here or not total:
        return ((0, max(total, 1)),)
    step = _step(axis, tuple(here))
    if total // step > _MOST_STEPS:
        return None
    runs: list[tuple[int, int]] = []
    for start in range(0, total, step):
        roots = _roots(axis, start)
        if all(_value(d, roots) == k for d, k in here.items()):
            stop = min(start + step, total)
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
    return tuple(runs)


def held_text(domain: BoundDomain, dim: int, rank: int) -> str:
    """As ``0:256``, ``0:2 8:10 ... 32 of 128``, or ``nothing``."""
    runs = held(domain, dim, rank)
    if runs is None:
        return f"{domain.local_shape(rank)[dim]} of {extent(domain.logical[dim])}"
    if not runs:
        return "nothing"
    shown = [f"{start}:{stop}" for start, stop in runs[:2]]
    count = sum(stop - start for start, stop in runs)
    return " ".join(shown) + (f" ... {count} of {extent(domain.logical[dim])}" if len(runs) > 2 else "")


def _step(axis: Axis, on_mesh: Axis) -> int:
    """Neighbours that are always on the same rank: of one digit, what its parts on the mesh weigh at least."""
    single = len(axis) == 1 and axis[0].weight == 1
    return min(d.weight for d in on_mesh) if single and all(d.base == axis[0].base for d in on_mesh) else 1


def _roots(axis: Axis, index: int) -> dict[Root, int]:
    """The index of each root where the axis is at ``index``."""
    found: dict[Root, int] = {}
    for k, digit in enumerate(axis):
        below = extent(axis[k + 1 :])
        value = index // below % digit.extent if k else index // below
        base, value = digit.base, value * digit.weight
        while isinstance(base, Digit):
            base, value = base.base, value * base.weight
        found[base] = found.get(base, 0) + value
    return found


def _value(digit: Digit, roots: dict[Root, int]) -> int:
    base = roots.get(digit.base, 0) if isinstance(digit.base, Root) else _value(digit.base, roots)
    return base // digit.weight % digit.extent
