"""looped: what no program holds: its input is read again for each phase, so that the second read hits L2.

A maximum and the sum of the exponentials below it, or a mean and the squares around it, are one phase
(``online_reductions``).
"""

from __future__ import annotations

from ..device import Device
from ..segments.online_reductions import counts_lanes
from ..segments.segment import Segment
from .features import Features, features, reduction_or_refusal
from .lagged_group import lagged_group
from .limits import LONG_WARPS, WARP, WARPS, in_powers_of_two, power_of_two, power_of_two_within
from .plan import KernelPlan
from .resources import within_shared
from .row_groups import looping_group, paired_group
from .schedule import Access, Launch, Loop, Schedule, Tile


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` has no loop over reduced elements; ``None`` where it has."""
    space = reduction_or_refusal(segment, device)
    return space if isinstance(space, str) else None


def propose(segment: Segment, device: Device) -> Schedule:
    """Whole rows, or columns as wide as a warp's load.

    Of rows whose variance is wanted, a lagged group holds what loops would read twice: group norm of 1 x 512 x 256 x
    256, float16, took 47 us on an H200 so, 58 us in a loop.
    """
    space = features(segment, device)
    joined = space.joined
    if joined.is_variance and joined.rereads and space.why_no_exchange is None:
        held = paired_group(joined) or lagged_group(joined)
        if held is not None:
            return held
    space = space.in_columns
    schedule = within_shared(space, in_loop(space))
    if space.is_inner and space.takes_one_walk:
        schedule = schedule.with_stages(1)  # few registers: all warps are resident, and hide their loads
    if space.why_no_exchange is None:
        schedule = within_shared(space, looping_group(space, schedule))
    return schedule if schedule.group else aligned(space, schedule) or schedule


def aligned(space: Features, schedule: Schedule) -> Schedule | None:
    """``schedule`` of a walk with wide loads over rows that are too odd for them; ``None`` where that is not for it."""
    walked, again = space.streamed, space.joined
    if not space.is_inner or schedule.kept != 1 or space.has_windows or space.beside:
        return None
    if len(walked) != 1 or space.inside != len(space.r) or any(map(space.has_r, space.segment.outputs)):
        return None
    if again.segment.has_indices or any(map(counts_lanes, again.segment.exprs)):
        return None  # the lanes of a turn are counted, or are told apart by their indices
    if not space.may_align_down(rows=1) or space.reduced < 2 * schedule.reduced:
        return None
    return Schedule(
        Tile(1, WARPS * WARP * space.tuned.loops.row_each),
        Loop(space.device.access_bytes // walked[0].dtype.itemsize),
        access=Access.ALIGN_DOWN,
        launch=Launch(WARPS, 1, schedule.launch.registers),
    )


def in_loop(space: Features) -> Schedule:
    """Blocks of a loop over the reduced elements; a thread folds those of one load, or one of each of its loads."""
    tuned = space.tuned.loops
    elements = LONG_WARPS * WARP * tuned.row_each
    if space.is_inner:
        rows = 1 if space.reduced >= elements // 4 else min(elements // power_of_two(space.reduced), 16)
        block = min(elements // rows, power_of_two(space.reduced))
        fold = max(space.width, tuned.row_each // space.width)
        return Schedule(Tile(rows, block), Loop(min(fold, block)), launch=Launch(LONG_WARPS))
    if space.grouped:
        columns, lanes = space.columns
        widths = in_powers_of_two(columns)
        row = sum(widths) * max(space.element_bytes, 1)  # there may be none
        r_block = power_of_two_within(tuned.grouped_bytes // row) or 1
        fold = _folded(space, r_block * widths[0] // WARPS, r_block)
        return Schedule(Tile(lanes, r_block, columns), Loop(fold), launch=Launch(WARPS))
    return down_columns(space, tuned.each)


def down_columns(space: Features, each: int, across: int = 2) -> Schedule:
    """Tiles of columns, ``across`` wide loads of a warp along a row, ``each`` elements of all inputs a thread."""
    x_block = min(across * WARP * space.width, power_of_two(space.kept))
    elements = WARPS * WARP * each // power_of_two(max(len(space.streamed), 1))
    r_block = min(max(elements // x_block, 1), power_of_two(space.reduced))
    fold = _folded(space, x_block * r_block // WARPS, r_block)
    return Schedule(Tile(x_block, r_block), Loop(fold), launch=Launch(WARPS))


def _folded(space: Features, of_a_warp: int, r_block: int) -> int:
    """Of a tile of columns: how many rows a thread has, whose loads are as wide as the columns allow."""
    return min(max(of_a_warp // (WARP * space.width), 1), r_block)


def kernels(segment: Segment, schedule: Schedule, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel."""
    space = features(segment, device).joined.in_columns
    return (KernelPlan.of("looped", space, schedule),)
