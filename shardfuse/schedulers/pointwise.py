"""pointwise: every stored element is computed on its own; one flat walk over the kept elements, or one in rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from ..device import Device
from ..ir.digits import Axis, Digit, extent
from ..ir.expr import Expr, reads_of
from ..segments.segment import Segment
from ..segments.space import Space
from .features import Features, features, features_or_refusal
from .limits import WARP, WARPS, vector
from .plan import KernelPlan
from .schedule import Launch, Loop, Schedule, Split, Tile
from .schedule_parts import MAX_PARTS
from .split_k import split_of


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` is not pointwise; ``None`` where it is."""
    space = features_or_refusal(segment, device)
    if isinstance(space, str):
        return space
    return f"it reduces {', '.join(map(str, space.r))}" if space.r else None


def propose(segment: Segment, device: Device) -> Schedule:
    """A walk down the columns where something beside whole tensors is the same along them, else a flat one."""
    space = features(segment, device)
    walked = down_the_columns(space)
    return _flat(space) if walked is None else in_turns(walked)


def ways(segment: Segment, device: Device) -> list[Schedule]:
    """What it may be proposed: a flat walk, and one down the columns."""
    space = features(segment, device)
    walked = down_the_columns(space)
    return [_flat(space), *([] if walked is None else [in_turns(walked)])]


def space_for(space: Features, schedule: Schedule) -> Features:
    """What a kernel of ``schedule`` walks."""
    walked = down_the_columns(space) if isinstance(schedule.residency, Loop) else None
    return space if walked is None else walked


def _flat(space: Features) -> Schedule:
    """Two 16-byte loads a thread of the widest streamed tensor; less where that would not fill the machine."""
    segment, device = space.segment, space.device
    streamed = [t for t in (*segment.loads, *segment.outputs) if space.is_streamed(t)]
    widest = max((t.dtype.itemsize for t in streamed), default=4)
    each = max(device.access_bytes // widest, 1) * (2 if len(streamed) <= 4 else 1)
    block = WARPS * WARP * each
    while block > WARPS * WARP and space.kept < block * device.filling:
        block //= 2
    return Schedule(Tile(block), launch=Launch(WARPS))


def kernels(segment: Segment, schedule: Schedule, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel."""
    space = features(segment, device)
    walked = space_for(space, schedule)
    if walked is not space:
        return (KernelPlan.of("pointwise", walked, schedule, split_of(schedule.parts, walked.r)),)
    return (KernelPlan.of("pointwise", in_rows(space, schedule.kept), schedule),)


def down_the_columns(space: Features) -> Features | None:
    """``space`` with the axes along which all that is read beside whole tensors is the same, walked as reduced ones
    are: of images with channels innermost the pixels; ``None`` where a flat walk is as good.

    A flat walk fetches what channels have anew for every pixel, and what groups of channels have element by element.
    """
    loads, tuned = space.segment.loads, space.tuned.maps
    if 2 * space.kept < tuned.walked * tuned.programs * space.device.multiprocessors:
        return None
    beside = [t for t in loads if space.has_x(t) and not space.is_streamed(t)]
    held = frozenset[Digit]().union(*(space.atoms[t] for t in beside))
    walked, columns = (tuple(a for a in space.x if (a in held) == is_held) for is_held in (False, True))
    gathered = [t for t in beside if space.x[-1] not in space.atoms[t]]
    if not gathered or not walked or space.x[-1] not in held or space.segment.windows:
        return None
    if not all(map(space.is_streamed, space.segment.outputs)) or space.is_promised:
        return None
    side_by_side = extent(tuple(takewhile(lambda a: a in held, reversed(space.x))))
    if side_by_side % (tuned.lanes // 2) or extent(walked) < tuned.deep:
        return None
    return replace(space, x=columns, r=walked, is_inner=False)


def in_turns(space: Features) -> Schedule:
    """Tiles of columns, each walked by so many programs that a few follow one another on every multiprocessor."""
    tuned = space.tuned.maps
    lanes = tuned.lanes
    while lanes > 1 and -space.kept % lanes * tuned.idle > space.kept:
        lanes //= 2
    rows = tuned.walked // lanes
    blocks, turns = -(-space.kept // lanes), -(-space.reduced // rows)
    parts = min(tuned.programs * space.device.multiprocessors // blocks, turns // 2, MAX_PARTS)
    fold = min(max(tuned.walked // (WARPS * WARP * space.width), 1), rows)
    return Schedule(Tile(lanes, rows), Loop(fold), split=Split(parts) if parts > 1 else None, launch=Launch(WARPS))


def in_rows(space: Features, block: int) -> Features:
    """``space`` with the rows that blocks stay within, where some input has one value for each; else as it is.

    A flat walk fetches that value for every element.
    """
    device, tuned = space.device, space.tuned.maps
    by_row = [t for t in space.segment.loads if space.has_x(t) and space.x[-1] not in space.atoms[t]]
    along = tuple(takewhile(lambda a: not any(a in space.atoms[t] for t in by_row), reversed(space.x)))[::-1]
    columns = extent(along)
    walked = [t for t in (*space.segment.loads, *space.segment.outputs) if space.is_streamed(t)]
    idle = -columns % block
    is_aligned = all(vector(t.dtype, columns, device) * t.dtype.itemsize >= device.access_bytes for t in walked)
    least, lanes = (1, tuned.idle) if is_aligned else (tuned.fetched, tuned.odd_idle)
    is_cut = any(not _ends_along(e, along, space) for e in space.segment.windows.values())
    if len(by_row) < least or is_cut or idle * lanes > columns + idle:
        return space
    return replace(space, sides=((), along))


def _ends_along(window: Expr, along: Axis, space: Space) -> bool:
    """Has ``window`` all elements of a row, but for some at its end?"""
    axes = [(r, window.output.domain.logical[r.axis]) for r in reads_of(window)]
    bounded = [axis for r, axis in axes if r.start > 0 or r.stop < extent(axis)]
    atoms = [tuple(a for d in axis for a in space.pieces[d]) for axis in bounded]
    return all(own == along for own in atoms) and all(r.start <= 0 and r.offset == 0 and r.step == 1 for r, _ in axes)
