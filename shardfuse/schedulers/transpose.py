"""transpose: pointwise work on tensors that are contiguous along different axes; tiles with a side along each.

A flat walk would read one of them an element at a time.  A tile ``[across, along]`` is read and written in whole
segments of memory on either side; the compiler turns it round in shared memory in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ..device import LINE_BYTES, Device
from ..ir.digits import Axis, Digit, extent
from ..segments.segment import Segment
from ..segments.space import stored_atoms
from .features import Features, accepted, features_or_refusal
from .limits import LONG_WARPS, power_of_two
from .plan import KernelPlan
from .schedule import Launch, Schedule, Sides

_SIDE = LINE_BYTES
"""Elements of a side at most: a line of the narrowest."""


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` has no two fastest axes; ``None`` where it has."""
    space = two_sided(segment, device)
    return space if isinstance(space, str) else None


def propose(segment: Segment, device: Device) -> Schedule:
    """Square tiles; where one side is short the other is longer."""
    space = accepted(two_sided(segment, device))
    widest = max(t.dtype.itemsize for t in (*segment.loads, *segment.outputs) if space.is_streamed(t))
    side = min(2 * LINE_BYTES // widest, _SIDE)
    across, along = (power_of_two(extent(one)) for one in space.sides)
    x_block = min(along, max(side, side * side // across))
    y_block = min(across, max(side, side * side // x_block))
    programs = -(-space.kept // (x_block * y_block))
    wanted, smallest = device.filling, device.measured.maps.smallest
    while programs < wanted and x_block * y_block > smallest:
        x_block, y_block = (x_block // 2, y_block) if x_block > y_block else (x_block, y_block // 2)
        programs *= 2
    return Schedule(Sides(x_block, y_block), launch=Launch(LONG_WARPS))


def kernels(segment: Segment, schedule: Schedule, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel."""
    space = accepted(two_sided(segment, device))
    return (KernelPlan.of("transpose", space, schedule),)


@lru_cache(maxsize=64)
def two_sided(segment: Segment, device: Device) -> Features | str:
    """The space with its two sides, or why one is enough."""
    space = features_or_refusal(segment, device)
    if isinstance(space, str):
        return space
    if space.r:
        return f"it reduces {', '.join(map(str, space.r))}"
    whole = [t for t in (*segment.outputs, *segment.loads) if space.is_streamed(t)]
    orders = {t: stored_atoms(t, space.pieces) for t in whole}
    if not whole or not space.x:
        return "it has no axes"
    main = orders[whole[0]]
    others = [t for t in whole if orders[t][-1] != main[-1]]
    if not others:
        return f"{main[-1]} is fastest in every tensor"
    other = orders[max(others, key=lambda t: t.dtype.itemsize)]
    across = _side(other, frozenset((main[-1],)))
    along = _side(main, frozenset(across))
    both = (*across, *along)
    return replace(space, x=(*(a for a in space.x if a not in both), *both), sides=(across, along))


def _side(order: Sequence[Digit], taken: frozenset[Digit]) -> Axis:
    """Atoms that follow one another in memory up to the fastest, until they are a tile's side."""
    side: list[Digit] = []
    for atom in reversed(order):
        if atom in taken or extent(side) >= _SIDE * _SIDE:
            break
        side.insert(0, atom)
    return tuple(side)
