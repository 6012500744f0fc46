"""team: programs that share one row, each with its part of it, and exchange their partial results.

For rows that no program holds, and for rows so few and long that a program each would leave multiprocessors idle.
"""

from __future__ import annotations

from dataclasses import replace

from ..device import LINE_BYTES, Device
from ..ir.dtype import DataType
from ..ir.expr import Expr
from ..ir.op import Statistic
from ..segments.online_reductions import takes_one_walk
from ..segments.space import Space, as_columns
from .limits import LONG_WARPS, MAX_WARPS, WARP, WIDEST_LOAD, in_powers_of_two, power_of_two, vector, widest
from .resources import carried, resident, resident_copies, turn_bytes
from .schedule import Group, Immediate, Launch, Schedule, Tile
from .schedule_parts import MAX_MEMBERS

_EXCHANGED_BYTES = 16
"""Bytes of the results that a member gives another at once, of a softmax or a variance: two words of 64 bits."""


def cannot_exchange(space: Space) -> str | None:
    """Why the programs of a team cannot finish the reductions of ``segment``."""
    wide = next((e.output for e in space.segment.exprs if space.reduces(e) and not _is_one_word(e)), None)
    return None if wide is None else f"{wide} is accumulated in 64 bits, a word of an exchange holds 32"


def _is_one_word(expr: Expr) -> bool:
    """Is what ``expr`` accumulates float32, int32, or a truth value?"""
    return carried(expr) in (DataType.Float, DataType.Int32, DataType.Bool)


def _held(space: Space, device: Device) -> int:
    """Elements of a row that a thread of a team holds; half of them beside much else that is held."""
    tuned = device.measured.groups
    walked = space.streamed
    is_pair = len(walked) == 2 and all(t.dtype.itemsize <= 2 for t in walked)
    held = tuned.pair_held if is_pair and not space.grouped else tuned.held // max(len(walked), 1)
    many_weights = space.phases > 2 and len([t for t in space.segment.loads if space.has_r(t)]) > 4
    if space.segment.has_indices:
        return held // 4
    return held // 2 if many_weights or space.grouped else held


def _registers(space: Space, device: Device) -> int:
    """Of a thread of a team that holds rows."""
    tuned = device.measured.groups
    is_wide = any(t.dtype.itemsize > 2 for t in space.streamed)
    return device.bound(tuned.wide_resident if is_wide else tuned.resident)


def in_columns(space: Space, device: Device) -> Space:
    """``space`` as it is walked: short runs of memory stand side by side.

    Short is less than a line; more where no program would hold a row, one of few, as its runs would be found twice.
    """
    tuned = device.measured.groups
    run = tuned.short_run if _is_read_twice(space, device) else LINE_BYTES
    return as_columns(space, run // space.narrowest)


def _is_read_twice(space: Space, device: Device) -> bool:
    row = space.reduced * space.element_bytes
    return space.kept <= device.multiprocessors and row > device.row_bytes and not are_few_held(space, device)


def why_not_held(space: Space, device: Device) -> str | None:
    """Why the registers of a team do not hold the reduced elements."""
    refusal = cannot_exchange(space)
    if refusal is not None:
        return refusal
    if not space.is_inner and not space.grouped:
        return "its columns are next to each other in memory"
    rows = space.kept // columns_of(space, device)[0] if space.grouped else space.kept
    if (space.phases > 2 or space.grouped) and rows <= device.multiprocessors and not are_few_held(space, device):
        return f"its {rows} rows are few: small teams that loop wait less for each other"
    if space.phases > 2 and space.segment.has_indices:
        return "its indices take the registers: large teams that wait for each other more than once"
    longest = MAX_MEMBERS * _held(space, device) * WARP
    longest = longest * LONG_WARPS // columns_of(space, device)[1] if space.grouped else longest * MAX_WARPS
    if space.reduced > longest:
        return (
            f"a row of {space.reduced} elements is longer than {longest}, what a team of {MAX_MEMBERS} programs holds"
        )
    members, warps, registers = (_columns_alone if space.grouped else _rows_alone)(space, device)
    programs = resident(device, warps, registers)
    if members > programs:
        return f"a row of {space.reduced} elements takes {members} programs, {programs} run at once"
    return None


_Smallest = tuple[int, int, int]
"""The smallest team that holds a row: its members, the warps of each, and the registers of a thread."""


def _rows_alone(space: Space, device: Device) -> _Smallest:
    tuned = device.measured.groups
    n, held, registers = space.reduced, _held(space, device), _registers(space, device)
    if are_few_held(space, device):
        held, registers = tuned.few_held, device.bound(tuned.few_resident)
    warps = LONG_WARPS if n <= MAX_MEMBERS * LONG_WARPS * WARP * held else MAX_WARPS
    return max(power_of_two(-(-n // (warps * WARP * held))), 2), warps, registers


def _columns_alone(space: Space, device: Device) -> _Smallest:
    _, lanes = columns_of(space, device)
    members = max(power_of_two(-(-space.reduced * lanes // (LONG_WARPS * WARP * _held(space, device)))), 1)
    return members, LONG_WARPS, _registers(space, device)


def are_few_held(space: Space, device: Device) -> bool:
    """Are there few rows of one input that are read three times, and does a small team hold each?

    The same for a segment whose statistics are joined, of which two reads are one.
    """
    tuned = device.measured.groups
    reads = space.phases + any(isinstance(e.op, Statistic) for e in space.segment.exprs)
    if space.grouped or reads <= 2 or space.kept > device.multiprocessors or len(space.streamed) != 1:
        return False
    return space.reduced <= tuned.few_members * LONG_WARPS * WARP * tuned.few_held


def held_by_team(space: Space, device: Device) -> Schedule:
    """The smallest team that holds a row; a larger one where rows are too few to fill the machine."""
    tuned = device.measured.groups
    members, warps, registers = _rows_alone(space, device)
    width = widest(space.streamed, space.reduced, device)
    schedule = Schedule(Tile(1, warps * WARP * width), launch=Launch(warps, registers=registers))
    group = _filling(schedule, members, space, resident(device, warps, registers), schedule.reduced)
    is_once = group.programs // group.members >= space.kept
    exchange = Immediate(prefetches=not is_once and registers > device.bound(tuned.few_resident))
    return replace(schedule, group=replace(group, exchange=exchange))


def columns_held_by_team(space: Space, device: Device) -> Schedule:
    """Columns in groups, held as tiles ``[r, columns]``."""
    tuned = device.measured.groups
    columns, lanes = columns_of(space, device)
    members, _, registers = _columns_alone(space, device)
    block = max(LONG_WARPS * WARP * 8 // in_powers_of_two(columns)[0], 1)
    schedule = Schedule(Tile(lanes, block, columns), launch=Launch(LONG_WARPS, registers=registers))
    if members == 2 and space.kept // columns >= resident(device, LONG_WARPS, device.bound(tuned.wide_resident)):
        return schedule.with_registers(None)  # 64 x 2048 x 7 x 7's gradient: 24 us on an H200, by teams of 2 42
    return _shared(schedule, _filling(schedule, members, space, resident(device, LONG_WARPS, registers), block))


def _shared(schedule: Schedule, group: Group) -> Schedule:
    """``schedule`` by ``group``; by programs on their own where that has one member."""
    return replace(schedule, group=group if group.members > 1 else None)


def looping_team(space: Space, schedule: Schedule, device: Device) -> Schedule:
    """``schedule`` of a loop over whole rows or columns, each shared by so many programs that the machine is full."""
    tuned = device.measured.groups
    if space.is_inner and schedule.kept != 1:
        return schedule
    if space.grouped:
        return _looping_over_groups(space, schedule, device)
    is_small = space.is_inner and len(space.streamed) == 1
    warps = tuned.few_resident if is_small else tuned.loop_resident

    def filled(schedule: Schedule) -> Group:
        return _filled(space, schedule, warps, device)

    if not space.is_inner:
        # a word for each lane of each member: no more than a line
        lanes = min(schedule.kept, LINE_BYTES // space.narrowest)
        schedule = _narrowed(schedule, lanes)
        while schedule.launch.warps < MAX_WARPS and _is_for_wider(schedule, filled(schedule), space, device):
            schedule = schedule.with_warps(2 * schedule.launch.warps).sized(reduced=2 * schedule.reduced)
    group = filled(schedule)
    while group.members * schedule.kept > tuned.collected * schedule.launch.warps * WARP:
        schedule = _narrowed(schedule, schedule.kept // 2)
        group = filled(schedule)
    if not (space.is_inner or takes_one_walk(space.segment)):
        group = _in_cache(space, schedule, group, device)
    bound = device.bound(warps, schedule.launch.warps)
    return _shared(schedule.with_registers(bound), group) if group.members > 1 else schedule


def _looping_over_groups(space: Space, schedule: Schedule, device: Device) -> Schedule:
    """``looping_team`` of columns in groups: where a member has few turns, what they wait for is each other."""
    tuned = device.measured.groups

    def turns() -> int:
        return -(-space.reduced // (group.members * schedule.reduced))

    group = _filled(space, schedule, tuned.loop_resident, device)
    if schedule.reduced > 1 and turns() <= tuned.short_turns:
        schedule = _halved(schedule)
        group = _filled(space, schedule, tuned.loop_resident, device)
        while _words(schedule, group, space) > tuned.polled[-1]:
            group = replace(group, members=group.members // 2)
    if group.members == 1:
        return schedule
    used = -(-space.kept // schedule.columns) * group.members
    is_small = turns() <= tuned.turns and schedule.reduced > 1 and len(space.streamed) == 1
    is_full = used > tuned.full * group.programs and 2 * _words(schedule, group, space) <= tuned.polled[-1]
    if is_small and schedule.launch.warps == 2 and is_full:
        schedule = _halved(schedule)
        group = replace(group, programs=resident(device, 1, device.bound(tuned.loop_resident)))
    roomy = _filled(space, schedule, tuned.roomy_resident, device).programs
    is_roomy = roomy >= used and schedule.launch.warps > 1
    programs, warps = (roomy, tuned.roomy_resident) if is_roomy else (group.programs, tuned.loop_resident)
    fewest, most = tuned.polled
    is_polled = fewest <= _words(schedule, group, space) <= most
    group = Group(group.members, programs, Immediate(counted=not is_polled))
    return replace(schedule.with_registers(device.bound(warps, schedule.launch.warps)), group=group)


def _halved(schedule: Schedule) -> Schedule:
    """Half the threads, and half as much at once."""
    half = schedule.reduced // 2
    halved = schedule.with_warps(schedule.launch.warps // 2).sized(reduced=half)
    return halved.accumulating(min(schedule.accumulated, half))


def _words(schedule: Schedule, group: Group, space: Space) -> float:
    """Of each result of a team's groups, for each thread."""
    return group.members * power_of_two(-(-schedule.columns // space.grouped)) / (schedule.launch.warps * WARP)


def _filled(space: Space, schedule: Schedule, warps: int, device: Device) -> Group:
    """Who shares the rows of a loop, where so many ``warps`` are resident on a multiprocessor."""
    own = schedule.launch.warps
    by_registers = resident(device, own, device.bound(warps, own))
    programs = min(by_registers, _by_shared(space, schedule, device))
    return _filling(schedule, 1, space, programs, device.measured.groups.turns * schedule.reduced)


def _by_shared(space: Space, schedule: Schedule, device: Device) -> int:
    """Programs of a loop whose copies under way fit: of what differs within a turn, a turn's part in each stage."""
    copied = turn_bytes(space, schedule)
    copied *= max(schedule.launch.stages - 1, 1)
    return max(resident_copies(device, copied), device.multiprocessors)


def _is_for_wider(schedule: Schedule, group: Group, space: Space, device: Device) -> bool:
    """Would more warps in fewer programs leave fewer words to exchange, or use programs that the team cannot have?

    Batch norm of 8 x 64 x 256 x 256, float16, channels-last, took 62 us on an H200 so, in tiles of fewer columns 95.
    """
    tuned = device.measured.groups
    if group.members * schedule.kept > tuned.collected * schedule.launch.warps * WARP:
        return True
    rows = -(-space.kept // schedule.kept)
    return group.members == MAX_MEMBERS and 2 * MAX_MEMBERS * rows <= group.programs


def _narrowed(schedule: Schedule, lanes: int) -> Schedule:
    """Tiles of fewer columns, and as many elements."""
    return schedule.sized(kept=lanes, reduced=schedule.reduced * schedule.kept // lanes)


def _filling(schedule: Schedule, members: int, space: Space, programs: int, least: int) -> Group:
    """A team of ``members``, or of more, if all rows at once leave programs idle and each still gets ``least``."""
    rows = -(-space.kept // (schedule.columns or schedule.kept))
    while members < MAX_MEMBERS and 2 * members * rows <= programs and space.reduced >= 2 * members * least:
        members *= 2
    return Group(members, programs)


def _in_cache(space: Space, schedule: Schedule, group: Group, device: Device) -> Group:
    """A larger team for columns, where what all teams walk at once then stays in L2 until it is read again.

    ``group`` where that takes members of too few turns, or more words of an exchange than elements make up for.
    """
    tuned = device.measured.groups
    columns, lanes = schedule.columns or schedule.kept, schedule.kept
    one = columns * space.reduced * space.element_bytes
    members = group.members
    while min(-(-space.kept // columns), group.programs // members) * one > tuned.cached * device.l2_bytes:
        members *= 2
        words = members * lanes * _EXCHANGED_BYTES
        if members > min(MAX_MEMBERS, group.programs) or space.reduced < members * tuned.turns * schedule.reduced:
            return group
        if words > tuned.exchanged * one / members:
            return group
    return replace(group, members=members)


def columns_of(space: Space, device: Device) -> tuple[int, int]:
    """Of columns in groups: how many a program takes, whole groups and a line of memory, and in how many lanes."""
    tuned = device.measured.groups
    itemsize = space.narrowest
    groups = space.x[-1 - space.inside].extent
    sizes = [
        n * space.grouped for n in range(1, groups + 1) if groups % n == 0 and n * space.grouped <= tuned.widest_columns
    ]
    whole = [n for n in sizes if n * itemsize >= LINE_BYTES] or sizes[-1:]
    best = max(whole, key=lambda n: (n / power_of_two(n), -n))
    return best, power_of_two(best)


def paired_team(space: Space, device: Device) -> Schedule | None:
    """A team that takes two rows at a time, all threads along each, and reads vectors beside them once for both.

    ``space``: of the segment with its statistics joined.  ``None`` where that loses, as
    where all of the vectors stay in the first cache of a multiprocessor.
    """
    tuned = device.measured.pairs
    walked, n = space.streamed, space.reduced
    if (
        space.segment.loads != space.segment.inputs
        or space.inside != len(space.r)
        or space.phases != 2
        or space.grouped
    ):
        return None
    if cannot_exchange(space) is not None:
        return None
    vectors = space.beside
    if not space.is_inner or len(walked) != 1 or len(vectors) <= tuned.many or any(map(space.has_x, vectors)):
        return None
    width = vector(walked[0].dtype, n, device)
    if width != WIDEST_LOAD or space.segment.has_indices:
        return None
    if n * sum(t.dtype.itemsize for t in vectors) <= int(tuned.cached * device.shared_bytes):
        return None
    warps, members = LONG_WARPS, max(power_of_two(-(-n // (LONG_WARPS * WARP * tuned.held))), 2)
    each = -(-n // (members * warps * WARP))
    few, most = tuned.resident[0][0], tuned.resident[-1][0]
    if each <= most // 2 and (each > few or each % width == width // 2):
        warps, each = warps // 2, 2 * each  # as many in each thread, or no half of a load masked
    registers = device.bound(next(n for held, n in tuned.resident if each <= held))
    programs = resident(device, warps, registers)
    if members > min(MAX_MEMBERS, programs) or space.kept * members < 2 * tuned.turns * programs:
        return None
    return Schedule(
        Tile(2, warps * WARP * width),
        group=Group(members, programs, Immediate(counted=each <= few, prefetches=True)),
        launch=Launch(warps, registers=registers),
    )
