"""group: programs that share one row, each with its part of it, and exchange their partial results.

For rows that no program holds, and for rows so few and long that a program each would leave multiprocessors idle.
"""

from __future__ import annotations

from dataclasses import replace

from ..device import LINE_BYTES
from .features import Features, itemsizes
from .limits import LONG_WARPS, MAX_WARPS, WARP, WARPS, WIDEST_LOAD, in_powers_of_two, power_of_two
from .resources import resident, resident_copies, turn_bytes
from .schedule import Group, Immediate, Launch, Schedule, Tile
from .schedule_parts import MAX_MEMBERS

_EXCHANGED_BYTES = 16
"""Bytes of the results that a member gives another at once, of a softmax or a variance: two words of 64 bits."""


def _held(space: Features) -> int:
    """Elements of a row that a thread of a group holds; half of them beside much else that is held."""
    tuned = space.tuned.groups
    is_pair = len(space.streamed) == 2 and space.is_narrow
    held = tuned.pair_held if is_pair and not space.grouped else tuned.held // max(len(space.streamed), 1)
    many_weights = space.phases > 2 and len([t for t in space.segment.loads if space.has_r(t)]) > 4
    if space.segment.has_indices:
        return held // 4
    return held // 2 if many_weights or space.grouped else held


def _registers(space: Features) -> int:
    """Of a thread of a group that holds rows."""
    tuned = space.tuned.groups
    return space.device.bound(tuned.resident if space.is_narrow else tuned.wide_resident)


def why_not_held(space: Features) -> str | None:
    """Why the registers of a group do not hold the reduced elements."""
    if space.why_no_exchange is not None:
        return space.why_no_exchange
    if not space.is_inner and not space.grouped:
        return "its columns are next to each other in memory"
    rows = space.kept // space.columns[0] if space.grouped else space.kept
    if (space.phases > 2 or space.grouped) and rows <= space.device.multiprocessors and not space.are_few_held:
        return f"its {rows} rows are few: small groups that loop wait less for each other"
    if space.phases > 2 and space.segment.has_indices:
        return "its indices take the registers: large groups that wait for each other more than once"
    longest = MAX_MEMBERS * _held(space) * WARP
    longest = longest * LONG_WARPS // space.columns[1] if space.grouped else longest * MAX_WARPS
    if space.reduced > longest:
        return (
            f"a row of {space.reduced} elements is longer than {longest}, what a group of {MAX_MEMBERS} programs holds"
        )
    members, warps, registers = (_columns_alone if space.grouped else _rows_alone)(space)
    if members > MAX_MEMBERS:
        return f"a row of {space.reduced} elements takes {members} programs, a group has {MAX_MEMBERS} at most"
    programs = resident(space.device, warps, registers)
    if members > programs:
        return f"a row of {space.reduced} elements takes {members} programs, {programs} run at once"
    return None


_Smallest = tuple[int, int, int]
"""The smallest group that holds a row: its members, the warps of each, and the registers of a thread."""


def _rows_alone(space: Features) -> _Smallest:
    tuned = space.tuned.groups
    if space.block and len(space.streamed) == 2:
        return _blocks_alone(space)
    n, held, registers = space.reduced, _held(space), _registers(space)
    if space.are_few_held:
        held, registers = tuned.few_held, space.device.bound(tuned.few_resident)
    warps = LONG_WARPS if n <= MAX_MEMBERS * LONG_WARPS * WARP * held else MAX_WARPS
    return max(power_of_two(-(-n // (warps * WARP * held))), 2), warps, registers


def _blocks_alone(space: Features) -> _Smallest:
    """Few warps, since each meets the others of its program less often than it adds up blocks of its own."""
    lanes, tuned = WARPS * WARP, space.tuned.groups.of_blocks
    members = max(power_of_two(-(-space.reduced // (lanes * tuned[-1][0]))), 2)
    warps = next(warps for held, warps in tuned if space.reduced <= members * lanes * held)
    return members, WARPS, space.device.bound(warps)


def _columns_alone(space: Features) -> _Smallest:
    _, lanes = space.columns
    members = max(power_of_two(-(-space.reduced * lanes // (LONG_WARPS * WARP * _held(space)))), 1)
    return members, LONG_WARPS, _registers(space)


def held_by_group(space: Features) -> Schedule:
    """The smallest group that holds a row; a larger one where rows are too few to fill the machine."""
    device, tuned = space.device, space.tuned.groups
    members, warps, registers = _rows_alone(space)
    schedule = Schedule(Tile(1, warps * WARP * space.width), launch=Launch(warps, registers=registers))
    group = _filling(schedule, members, space, resident(device, warps, registers), schedule.reduced, space.kept)
    is_once = group.at_once >= space.kept
    exchange = Immediate(prefetches=not is_once and registers > device.bound(tuned.few_resident))
    return replace(schedule, group=replace(group, exchange=exchange))


def columns_held_by_group(space: Features) -> Schedule:
    """Columns in groups, held as tiles ``[r, columns]``."""
    device, (columns, lanes) = space.device, space.columns
    members, _, registers = _columns_alone(space)
    block = max(LONG_WARPS * WARP * 8 // in_powers_of_two(columns)[0], 1)
    schedule = Schedule(Tile(lanes, block, columns), launch=Launch(LONG_WARPS, registers=registers))
    wide = device.bound(space.tuned.groups.wide_resident)
    if members == 2 and space.kept // columns >= resident(device, LONG_WARPS, wide):
        return schedule.with_registers(None)  # 64 x 2048 x 7 x 7's gradient: 24 us on an H200, by groups of 2 42
    return _shared(
        schedule, _filling(schedule, members, space, resident(device, LONG_WARPS, registers), block, space.kept)
    )


def _shared(schedule: Schedule, group: Group) -> Schedule:
    """``schedule`` by ``group``; by programs on their own where that has one member."""
    return replace(schedule, group=group if group.members > 1 else None)


def looping_group(space: Features, schedule: Schedule) -> Schedule:
    """``schedule`` of a loop over whole rows or columns, each shared by so many programs that the machine is full."""
    tuned = space.tuned.groups
    if space.is_inner and schedule.kept != 1:
        return schedule
    if space.grouped:
        return _looping_over_groups(space, schedule)
    is_small = space.is_inner and len(space.streamed) == 1
    warps = tuned.few_resident if is_small else tuned.loop_resident
    if not space.is_inner:
        # a word for each lane of each member: no more than a line
        lanes = min(schedule.kept, LINE_BYTES // space.narrowest)
        schedule = _narrowed(space, schedule, lanes)
        while schedule.launch.warps < MAX_WARPS and _is_for_wider(schedule, _filled(space, schedule, warps), space):
            schedule = schedule.with_warps(2 * schedule.launch.warps).sized(reduced=2 * schedule.reduced)
    group = _filled(space, schedule, warps)
    while group.members * schedule.kept > tuned.collected * schedule.launch.warps * WARP:
        schedule = _narrowed(space, schedule, schedule.kept // 2)
        group = _filled(space, schedule, warps)
    if not (space.is_inner or space.takes_one_walk):
        group = _in_cache(space, schedule, group)
    bound = space.device.bound(warps, schedule.launch.warps)
    return _shared(schedule.with_registers(bound), group) if group.members > 1 else schedule


def _looping_over_groups(space: Features, schedule: Schedule) -> Schedule:
    """``looping_group`` of columns in groups: where a member has few turns, what they wait for is each other."""
    device, tuned = space.device, space.tuned.groups

    def turns() -> int:
        return -(-space.reduced // (group.members * schedule.reduced))

    group = _filled(space, schedule, tuned.loop_resident)
    if schedule.reduced > 1 and turns() <= tuned.short_turns:
        schedule = halved(schedule)
        group = _filled(space, schedule, tuned.loop_resident)
        while _words(schedule, group, space) > tuned.polled[-1]:
            group = replace(group, members=group.members // 2)
    if group.members == 1:
        return schedule
    used = schedule.blocks(space.kept) * group.members
    is_small = turns() <= tuned.turns and schedule.reduced > 1 and len(space.streamed) == 1
    is_full = used > tuned.full * group.programs and 2 * _words(schedule, group, space) <= tuned.polled[-1]
    if is_small and schedule.launch.warps == 2 and is_full:
        schedule = halved(schedule)
        group = replace(group, programs=resident(device, 1, device.bound(tuned.loop_resident)))
    roomy = _filled(space, schedule, tuned.roomy_resident).programs
    is_roomy = roomy >= used and schedule.launch.warps > 1
    programs, warps = (roomy, tuned.roomy_resident) if is_roomy else (group.programs, tuned.loop_resident)
    fewest, most = tuned.polled
    is_polled = fewest <= _words(schedule, group, space) <= most
    group = Group(group.members, programs, Immediate(counted=not is_polled))
    return replace(schedule.with_registers(device.bound(warps, schedule.launch.warps)), group=group)


def halved(schedule: Schedule) -> Schedule:
    """Half the threads, and half as much at once."""
    half = schedule.reduced // 2
    halved = schedule.with_warps(schedule.launch.warps // 2).sized(reduced=half)
    return halved.accumulating(min(schedule.accumulated, half))


def _words(schedule: Schedule, group: Group, space: Features) -> float:
    """Of each result of a group's channel groups, for each thread."""
    return group.members * power_of_two(-(-schedule.columns // space.grouped)) / (schedule.launch.warps * WARP)


def _filled(space: Features, schedule: Schedule, warps: int) -> Group:
    """Who shares the rows of a loop, where so many ``warps`` are resident on a multiprocessor."""
    own, device = schedule.launch.warps, space.device
    copied = turn_bytes(space, schedule) * max(schedule.launch.stages - 1, 1)
    by_shared = max(resident_copies(device, copied), device.multiprocessors)
    programs = min(resident(device, own, device.bound(warps, own)), by_shared)
    return _filling(schedule, 1, space, programs, space.tuned.groups.turns * schedule.reduced, space.kept_to_fill)


def _is_for_wider(schedule: Schedule, group: Group, space: Features) -> bool:
    """Would more warps in fewer programs leave fewer words to exchange, or use programs that the group cannot have?

    Batch norm of 8 x 64 x 256 x 256, float16, channels-last, took 62 us on an H200 so, in tiles of fewer columns 95.
    """
    if group.members * schedule.kept > space.tuned.groups.collected * schedule.launch.warps * WARP:
        return True
    return group.members == MAX_MEMBERS and 2 * MAX_MEMBERS * schedule.blocks(space.kept) <= group.programs


def _narrowed(space: Features, schedule: Schedule, lanes: int) -> Schedule:
    """Tiles of so many lanes, and as many elements.

    Where the last tile would be part empty, and the group that has it idle, all have equally many columns, in whole
    loads: batch norm of 96 x 96 x 112 x 112, bfloat16, channels-last, took 227 us on an H200 so, with 64 and 32 260.
    """
    tiles = -(-space.kept // lanes)
    even = -(-space.kept // (tiles * space.width)) * space.width
    order = Tile(lanes, schedule.reduced * schedule.kept // lanes, even if tiles > 1 and even < lanes else 0)
    return replace(schedule, order=order)


def _filling(schedule: Schedule, members: int, space: Features, programs: int, least: int, kept: int) -> Group:
    """A group of ``members``, or of more, if ``kept`` at once leave programs idle and each still gets ``least``."""
    rows = schedule.blocks(kept)
    while members < MAX_MEMBERS and 2 * members * rows <= programs and space.reduced >= 2 * members * least:
        members *= 2
    return Group(members, programs)


def _in_cache(space: Features, schedule: Schedule, group: Group) -> Group:
    """A larger group for columns, where what all groups walk at once then stays in L2 until it is read again.

    ``group`` where that takes members of too few turns, or more words of an exchange than elements make up for.
    """
    tuned = space.tuned.groups
    columns, lanes = schedule.columns or schedule.kept, schedule.kept
    one = columns * space.reduced * space.element_bytes
    members = group.members
    while min(schedule.blocks(space.kept), group.programs // members) * one > tuned.cached * space.device.l2_bytes:
        members *= 2
        words = members * lanes * _EXCHANGED_BYTES
        if members > min(MAX_MEMBERS, group.programs) or space.reduced < members * tuned.turns * schedule.reduced:
            return group
        if words > tuned.exchanged * one / members:
            return group
    return replace(group, members=members)


def paired_group(space: Features) -> Schedule | None:
    """A group that takes two rows at a time, all threads along each, and reads vectors beside them once for both.

    ``space``: of the segment with its statistics joined.  ``None`` where that loses, as
    where all of the vectors stay in the first cache of a multiprocessor.
    """
    device, tuned, n = space.device, space.tuned.pairs, space.reduced
    is_row = space.is_inner and space.inside == len(space.r) and not space.grouped and len(space.streamed) == 1
    if not is_row or space.phases != 2 or space.width != WIDEST_LOAD:
        return None
    if space.has_windows or space.segment.has_indices or space.why_no_exchange is not None or space.is_by_sample:
        return None
    if len(space.beside) <= tuned.many or n * itemsizes(space.beside) <= int(tuned.cached * device.shared_bytes):
        return None
    warps, members = LONG_WARPS, max(power_of_two(-(-n // (LONG_WARPS * WARP * tuned.held))), 2)
    each = -(-n // (members * warps * WARP))
    few, most = tuned.resident[0][0], tuned.resident[-1][0]
    if each <= most // 2 and (each > few or each % WIDEST_LOAD == WIDEST_LOAD // 2):
        warps, each = warps // 2, 2 * each  # as many in each thread, or no half of a load masked
    registers = device.bound(next(n for held, n in tuned.resident if each <= held))
    programs = resident(device, warps, registers)
    if members > min(MAX_MEMBERS, programs) or space.kept * members < 2 * tuned.turns * programs:
        return None
    return Schedule(
        Tile(2, warps * WARP * WIDEST_LOAD),
        group=Group(members, programs, Immediate(counted=each <= few, prefetches=True)),
        launch=Launch(warps, registers=registers),
    )
