"""pointwise: every stored element is computed on its own; one flat walk over the kept elements, or one in rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from ..device import Device
from ..ir.digits import Axis, extent
from ..ir.expr import Expr, reads_of
from ..segments.segment import Segment
from ..segments.space import Space
from .features import Features, features, features_or_refusal
from .limits import WARP, WARPS, vector
from .plan import KernelPlan
from .schedule import Launch, Schedule, Tile


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` is not pointwise; ``None`` where it is."""
    space = features_or_refusal(segment, device)
    if isinstance(space, str):
        return space
    return f"it reduces {', '.join(map(str, space.r))}" if space.r else None


def propose(segment: Segment, device: Device) -> Schedule:
    """Two 16-byte loads a thread of the widest streamed tensor; less where that would not fill the machine."""
    space = features(segment, device)
    streamed = [t for t in (*segment.loads, *segment.outputs) if space.is_streamed(t)]
    widest = max((t.dtype.itemsize for t in streamed), default=4)
    each = max(device.access_bytes // widest, 1) * (2 if len(streamed) <= 4 else 1)
    block = WARPS * WARP * each
    while block > WARPS * WARP and space.kept < block * device.filling:
        block //= 2
    return Schedule(Tile(block), launch=Launch(WARPS))


def kernels(segment: Segment, schedule: Schedule, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel."""
    space = in_rows(features(segment, device), schedule.kept)
    return (KernelPlan.of("pointwise", space, schedule),)


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
