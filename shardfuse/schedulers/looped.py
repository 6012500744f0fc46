"""looped: what no program holds: its input is read again for each phase, so that the second read hits L2.

A maximum and the sum of the exponentials below it, or a mean and the squares around it, are one phase
(``online_reductions``).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..device import Device
from ..ir.expr import BoundTensor
from ..ir.op import Iota, Random, is_statistic
from ..segments.online_reductions import online, takes_one_walk
from ..segments.segment import Segment
from ..segments.space import Space, analyse_reduction, analysed
from .lagged_group import lagged_group
from .limits import LONG_WARPS, WARP, WARPS, in_powers_of_two, may_align_down, power_of_two, widest
from .plan import KernelPlan, kernel_name
from .resources import within_shared
from .schedule import Access, Launch, Loop, Schedule, Tile
from .team import cannot_exchange, columns_of, in_columns, looping_team, paired_team


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` has no loop over reduced elements; ``None`` where it has."""
    space = analyse_reduction(segment)
    return space if isinstance(space, str) else None


def propose(segment: Segment, device: Device) -> Schedule:
    """Whole rows, or columns as wide as a warp's load.

    Of rows whose variance is wanted, a late team holds what loops would read twice: group norm of 1 x 512 x 256 x 256,
    float16, took 47 us on an H200 so, 58 us in a loop.
    """
    space, joined = analysed(segment), online(segment)
    again = analysed(joined)
    if any(is_statistic(e.op, "welford") for e in joined.exprs) and again.rereads and cannot_exchange(space) is None:
        held = paired_team(again, device) or lagged_group(again, device)
        if held is not None:
            return held
    space = in_columns(space, device)
    schedule = within_shared(space, in_loop(space, device), device)
    if space.is_inner and takes_one_walk(segment):
        schedule = schedule.with_stages(1)  # few registers: all warps are resident, and hide their loads
    if not cannot_exchange(space):
        schedule = looping_team(space, schedule, device)
        schedule = within_shared(space, schedule, device)
    return schedule if schedule.group else aligned(space, schedule, device) or schedule


def aligned(space: Space, schedule: Schedule, device: Device) -> Schedule | None:
    """``schedule`` of a walk with wide loads over rows that are too odd for them; ``None`` where that is not for it."""
    tuned = device.measured.loops
    walked = space.streamed
    rows = [t for t in space.segment.loads if space.has_r(t)]
    again = online(space.segment)
    if not space.is_inner or schedule.kept != 1 or space.segment.loads != space.segment.inputs or rows != walked:
        return None
    if len(walked) != 1 or space.inside != len(space.r) or any(map(space.has_r, space.segment.outputs)):
        return None
    if any(len(e.outputs) > 2 or is_statistic(e.op, "welford") or isinstance(e.op, Iota | Random) for e in again.exprs):
        return None  # the lanes of a turn are counted, or are told apart by their indices
    width = device.access_bytes // walked[0].dtype.itemsize
    if not may_align_down(walked[0].dtype, space, device, rows=1) or space.reduced < 2 * schedule.reduced:
        return None
    return Schedule(
        Tile(1, WARPS * WARP * tuned.row_each),
        Loop(width),
        access=Access.ALIGN_DOWN,
        launch=Launch(WARPS, 1, schedule.launch.registers),
    )


def in_loop(space: Space, device: Device) -> Schedule:
    """Blocks of a loop over the reduced elements; a thread folds those of one load, or one of each of its loads."""
    tuned = device.measured.loops
    inputs = space.streamed
    elements = LONG_WARPS * WARP * tuned.row_each
    if space.is_inner:
        rows = 1 if space.reduced >= elements // 4 else min(elements // power_of_two(space.reduced), 16)
        block = min(elements // rows, power_of_two(space.reduced))
        width = widest(inputs, space.reduced, device)
        fold = width if width >= tuned.row_each // width else tuned.row_each // width
        return Schedule(Tile(rows, block), Loop(min(fold, block)), launch=Launch(LONG_WARPS))
    if space.grouped:
        columns, lanes = columns_of(space, device)
        widths = in_powers_of_two(columns)
        row = sum(widths) * max(space.element_bytes, 1)  # there may be none
        r_block = power_of_two(tuned.grouped_bytes // row + 1) // 2 or 1
        fold = _folded(inputs, space, device, r_block * widths[0] // WARPS, r_block)
        return Schedule(Tile(lanes, r_block, columns), Loop(fold), launch=Launch(WARPS))
    return down_columns(inputs, space, device, tuned.each)


def down_columns(inputs: Sequence[BoundTensor], space: Space, device: Device, each: int, across: int = 2) -> Schedule:
    """Tiles of columns, ``across`` wide loads of a warp along a row, ``each`` elements of all inputs a thread."""
    width = widest(inputs, space.kept, device)
    x_block = min(across * WARP * width, power_of_two(space.kept))
    elements = WARPS * WARP * each // power_of_two(max(len(inputs), 1))
    r_block = min(max(elements // x_block, 1), power_of_two(space.reduced))
    fold = _folded(inputs, space, device, x_block * r_block // WARPS, r_block)
    return Schedule(Tile(x_block, r_block), Loop(fold), launch=Launch(WARPS))


def _folded(inputs: Sequence[BoundTensor], space: Space, device: Device, of_a_warp: int, r_block: int) -> int:
    """Of a tile of columns: how many rows a thread has, whose loads are as wide as the columns allow."""
    width = widest(inputs, space.kept, device)
    return min(max(of_a_warp // (WARP * width), 1), r_block)


def kernels(segment: Segment, schedule: Schedule, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel."""
    segment = online(segment)
    space = analysed(segment)
    space = in_columns(space, device)
    return (KernelPlan(kernel_name("looped", segment), segment, space, schedule, device),)
