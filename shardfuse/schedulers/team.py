"""team: programs that share one row, each with its part of it, and exchange their partial results.

For rows that no program holds, and for rows so few and long that a program each would leave multiprocessors idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..device import Device
from ..ir.dtype import DataType
from ..ir.expr import REDUCTIONS, STATISTICS, Expr
from .copies import turn_bytes
from .limits import (
    LINE_BYTES,
    MAX_ROW_BYTES,
    MAX_TEAM,
    MAX_WARPS,
    SHARED,
    WARP,
    in_powers_of_two,
    power_of_two,
    resident,
    vector,
)
from .online import takes_one_walk
from .resources import carried
from .schedule import Group, Immediate, Launch, Schedule, Tile
from .segment import Segment
from .space import Space, as_columns, streamed

_HELD = 64
"""Elements of its row that a thread holds, all inputs together: the more, the fewer exchanges.  32 in twice as many
programs took 322 us for 4096 x 65536 of bfloat16 where 64 took 313."""
_PAIR_HELD = 40
"""Of each of two inputs of 16 bits.  The gradient of a group norm of 2 x 640 x 64 x 64, 2 x 960 x 96 x 96, float16,
took 18 and 56 us on an H200 so, with 32 in twice as large teams 21 and 71."""
_REGISTERS = 96
_WIDE_REGISTERS = 128
"""Of 32-bit elements, each of which takes one: as many programs are resident, and 96 spilled up to 300 bytes."""
_LOOP_REGISTERS = 128
_WARPS = 8
_MAX_COLUMNS = 512
_FEW_ROWS = 132
"""A row for each multiprocessor: then teams take every row about once, and what they wait for is each other."""
_FEW_HELD = 40
_FEW_REGISTERS = 64
"""Of few rows: more programs, with less each.  Group norm of 2 x 320 x 128 x 128, float16, took 20.7 us on an H200,
with 96 registers 24.5, in a loop 22.4.  So many hide each other's waiting: LayerNorm of 128 x 65536, bfloat16, took
18.7 us, with the next row fetched ahead 21.1."""
_FEW_MEMBERS = 16
"""The largest team that holds one of few rows; others loop, and read it again from L2.  1 x 512 x 256 x 256 took 61 us
so, held by 128 programs 68."""
_SHORT_RUN = 1024
"""Bytes, of few rows of which no program holds one.  Group norm of 2 x 2560 x 64 x 64, float16, 8 x 256 x 64 x 64 in 2
groups, channels-last, took 45 and 20 us on an H200 in columns, in rows 101 and 49; the gradient of 2 x 1280 x 32 x 32,
float32, 21 and 50."""
_CACHED = 0.7
"""Of L2: what is read now and again soon, beside what is written."""
_EXCHANGED = 0.5
"""Bytes that a member reads of the others, for one of its own."""
_COLLECTED = 16
"""Words of each result that a thread takes from a mailbox: with 32 registers spill."""
_WORDS = 8
_RESULTS = 2
"""Bytes of a word, and results exchanged at once: of a softmax or a variance."""
_TURNS = 4
"""A member has at least so many turns of its loop."""
_SHORT_TURNS = 10
"""Of a loop over columns in groups, up to which half as many threads take half as much at once.  Group norm of 4 x 320
x 64 x 64, 8 x 320 x 32 x 32, float16, channels-last, took 18.4 and 12.5 us on an H200 so, else 22.1 and 17.4; its
gradient 23.9 and 15.4, else 30.4 and 21.3."""
_FULL = 0.75
"""Of the programs that are resident: where so many are used, each of fewest turns, a warp is enough for one.  Group
norm of 2 x 640 x 64 x 64, channels-last, took 16.5 us so, with two 17.8; of 8 x 256 x 64 x 64 in 2 groups 18.4 and
19.7."""
_ROOMY_REGISTERS = 168
"""Where all teams are resident with them.  Group norm of 2 x 1280 x 32 x 32, channels-last, took 13.5 us so, with
the fewer 14.7."""
_POLLED = (0.5, 8)
"""Words of each result for a thread: the fewest and the most where members poll them instead of counting each other in.
The gradient of a group norm of 2 x 320 x 128 x 128, channels-last, took 42.7 us on an H200 so, else 47.5.  Of fewer,
many threads poll the same word; of more, each polls one after the other: a video's took 340 us, else 303."""


def cannot_exchange(segment: Segment, space: Space) -> str | None:
    """Why the programs of a team cannot finish the reductions of ``segment``."""
    wide = next((e.output for e in segment.exprs if _is_reduction(e, space) and not _is_one_word(e)), None)
    return None if wide is None else f"{wide} is accumulated in 64 bits, a word of an exchange holds 32"


def _is_reduction(expr: Expr, space: Space) -> bool:
    return expr.op in REDUCTIONS and space.has_r(expr.tensors[0]) and not space.has_r(expr.output)


def _is_one_word(expr: Expr) -> bool:
    """Is what ``expr`` accumulates float32, int32, or a truth value?"""
    return carried(expr) in (DataType.Float, DataType.Int32, DataType.Bool)


def _held(segment: Segment, space: Space) -> int:
    """Elements of a row that a thread of a team holds; half of them beside much else that is held."""
    walked = streamed(segment, space)
    is_pair = len(walked) == 2 and all(t.dtype.itemsize <= 2 for t in walked)
    held = _PAIR_HELD if is_pair and not space.grouped else _HELD // max(len(walked), 1)
    many_weights = space.phases > 2 and len([t for t in segment.loads if space.has_r(t)]) > 4
    if segment.has_indices:
        return held // 4
    return held // 2 if many_weights or space.grouped else held


def _registers(segment: Segment, space: Space) -> int:
    """Of a thread of a team that holds rows."""
    return _WIDE_REGISTERS if any(t.dtype.itemsize > 2 for t in streamed(segment, space)) else _REGISTERS


def in_columns(segment: Segment, space: Space) -> Space:
    """``space`` as it is walked: short runs of memory stand side by side.

    Short is less than a line; more where nobody would hold a row, one of few, so that its runs would be found twice.
    """
    walked = streamed(segment, space)
    run = _SHORT_RUN if _is_read_twice(segment, space) else LINE_BYTES
    return as_columns(space, run // min((t.dtype.itemsize for t in walked), default=4))


def _is_read_twice(segment: Segment, space: Space) -> bool:
    row = space.reduced * sum(t.dtype.itemsize for t in streamed(segment, space))
    return space.kept <= _FEW_ROWS and row > MAX_ROW_BYTES and not are_few_held(segment, space)


def why_not_held(segment: Segment, space: Space, device: Device) -> str | None:
    """Why the registers of a team do not hold the reduced elements."""
    refusal = cannot_exchange(segment, space)
    if refusal is not None:
        return refusal
    if not space.is_inner and not space.grouped:
        return "its columns are next to each other in memory"
    rows = space.kept // columns_of(segment, space)[0] if space.grouped else space.kept
    if (space.phases > 2 or space.grouped) and rows <= _FEW_ROWS and not are_few_held(segment, space):
        return f"its {rows} rows are few: small teams that loop wait less for each other"
    if space.phases > 2 and segment.has_indices:
        return "its indices take the registers: large teams that wait for each other more than once"
    longest = MAX_TEAM * _held(segment, space) * WARP
    longest = longest * _WARPS // columns_of(segment, space)[1] if space.grouped else longest * MAX_WARPS
    if space.reduced > longest:
        return f"a row of {space.reduced} elements is longer than {longest}, what a team of {MAX_TEAM} programs holds"
    smallest = _columns_alone(segment, space) if space.grouped else _rows_alone(segment, space)
    programs = resident(device, smallest.warps, smallest.registers)
    if smallest.members > programs:
        return f"a row of {space.reduced} elements takes {smallest.members} programs, {programs} run at once"
    return None


@dataclass(frozen=True)
class _Smallest:
    """The smallest team that holds a row: its members, the warps of each, and the registers of a thread."""

    members: int
    warps: int
    registers: int


def _rows_alone(segment: Segment, space: Space) -> _Smallest:
    """Of a row on its own."""
    n, held, registers = space.reduced, _held(segment, space), _registers(segment, space)
    if are_few_held(segment, space):
        held, registers = _FEW_HELD, _FEW_REGISTERS
    warps = _WARPS if n <= MAX_TEAM * _WARPS * WARP * held else MAX_WARPS
    return _Smallest(max(power_of_two(-(-n // (warps * WARP * held))), 2), warps, registers)


def _columns_alone(segment: Segment, space: Space) -> _Smallest:
    """Of columns in groups."""
    _, lanes = columns_of(segment, space)
    members = max(power_of_two(-(-space.reduced * lanes // (_WARPS * WARP * _held(segment, space)))), 1)
    return _Smallest(members, _WARPS, _registers(segment, space))


def are_few_held(segment: Segment, space: Space) -> bool:
    """Are there few rows of one input that are read three times, and does a small team hold each?

    The same for a segment whose statistics are joined, of which two reads are one.
    """
    reads = space.phases + any(e.op in STATISTICS for e in segment.exprs)
    if space.grouped or reads <= 2 or space.kept > _FEW_ROWS or len(streamed(segment, space)) != 1:
        return False
    return space.reduced <= _FEW_MEMBERS * _WARPS * WARP * _FEW_HELD


def held_by_team(segment: Segment, space: Space, device: Device) -> Schedule:
    """The smallest team that holds a row; a larger one where rows are too few to fill the machine."""
    smallest = _rows_alone(segment, space)
    warps, registers = smallest.warps, smallest.registers
    width = max((vector(t.dtype, space.reduced, device) for t in streamed(segment, space)), default=4)
    schedule = Schedule(Tile(1, warps * WARP * width), launch=Launch(warps, registers=registers))
    group = _filling(schedule, smallest.members, space, resident(device, warps, registers), schedule.reduced)
    is_once = group.programs // group.members >= space.kept
    exchange = Immediate(prefetches=not is_once and registers > _FEW_REGISTERS)
    return replace(schedule, group=replace(group, exchange=exchange))


def columns_held_by_team(segment: Segment, space: Space, device: Device) -> Schedule:
    """Columns in groups, held as tiles ``[r, columns]``."""
    columns, lanes = columns_of(segment, space)
    smallest = _columns_alone(segment, space)
    members, registers = smallest.members, smallest.registers
    block = max(_WARPS * WARP * 8 // in_powers_of_two(columns)[0], 1)
    schedule = Schedule(Tile(lanes, block, columns), launch=Launch(_WARPS, registers=registers))
    if members == 2 and space.kept // columns >= resident(device, _WARPS, _WIDE_REGISTERS):
        return schedule.with_registers(None)  # 64 x 2048 x 7 x 7's gradient: 24 us on an H200, by teams of 2 42
    return _shared(schedule, _filling(schedule, members, space, resident(device, _WARPS, registers), block))


def _shared(schedule: Schedule, group: Group) -> Schedule:
    """``schedule`` by ``group``; by programs on their own where that has one member."""
    return replace(schedule, group=group if group.members > 1 else None)


def looping_team(segment: Segment, space: Space, schedule: Schedule, device: Device) -> Schedule:
    """``schedule`` of a loop over whole rows or columns, each shared by so many programs that the machine is full."""
    if space.is_inner and schedule.kept != 1:
        return schedule
    if space.grouped:
        return _looping_over_groups(segment, space, schedule, device)
    is_small = space.is_inner and len(streamed(segment, space)) == 1
    registers = _FEW_REGISTERS if is_small else _LOOP_REGISTERS

    def filled(schedule: Schedule) -> Group:
        return _filled(segment, space, schedule, registers, device)

    if not space.is_inner:
        itemsize = min((t.dtype.itemsize for t in streamed(segment, space)), default=4)
        lanes = min(schedule.kept, LINE_BYTES // itemsize)  # a word for each lane of each member: no more than a line
        schedule = _narrowed(schedule, lanes)
        while schedule.launch.warps < MAX_WARPS and _is_for_wider(schedule, filled(schedule), space):
            schedule = schedule.with_warps(2 * schedule.launch.warps).sized(reduced=2 * schedule.reduced)
    group = filled(schedule)
    while group.members * schedule.kept > _COLLECTED * schedule.launch.warps * WARP:
        schedule = _narrowed(schedule, schedule.kept // 2)
        group = filled(schedule)
    if not (space.is_inner or takes_one_walk(segment)):
        group = _in_cache(segment, space, schedule, group, device)
    return _shared(schedule.with_registers(registers), group) if group.members > 1 else schedule


def _looping_over_groups(segment: Segment, space: Space, schedule: Schedule, device: Device) -> Schedule:
    """``looping_team`` of columns in groups: where a member has few turns, what they wait for is each other."""

    def turns() -> int:
        return -(-space.reduced // (group.members * schedule.reduced))

    group = _filled(segment, space, schedule, _LOOP_REGISTERS, device)
    if schedule.reduced > 1 and turns() <= _SHORT_TURNS:
        schedule = _halved(schedule)
        group = _filled(segment, space, schedule, _LOOP_REGISTERS, device)
        while _words(schedule, group, space) > _POLLED[-1]:
            group = replace(group, members=group.members // 2)
    if group.members == 1:
        return schedule
    used = -(-space.kept // schedule.columns) * group.members
    is_small = turns() <= _TURNS and schedule.reduced > 1 and len(streamed(segment, space)) == 1
    is_full = used > _FULL * group.programs and 2 * _words(schedule, group, space) <= _POLLED[-1]
    if is_small and schedule.launch.warps == 2 and is_full:
        schedule = _halved(schedule)
        group = replace(group, programs=resident(device, 1, _LOOP_REGISTERS))
    roomy = _filled(segment, space, schedule, _ROOMY_REGISTERS, device).programs
    is_roomy = roomy >= used and schedule.launch.warps > 1
    programs, registers = (roomy, _ROOMY_REGISTERS) if is_roomy else (group.programs, _LOOP_REGISTERS)
    fewest, most = _POLLED
    is_polled = fewest <= _words(schedule, group, space) <= most
    group = Group(group.members, programs, Immediate(counted=not is_polled))
    return replace(schedule.with_registers(registers), group=group)


def _halved(schedule: Schedule) -> Schedule:
    """Half the threads, and half as much at once."""
    half = schedule.reduced // 2
    halved = schedule.with_warps(schedule.launch.warps // 2).sized(reduced=half)
    return halved.accumulating(min(schedule.accumulated, half))


def _words(schedule: Schedule, group: Group, space: Space) -> float:
    """Of each result of a team's groups, for each thread."""
    return group.members * power_of_two(-(-schedule.columns // space.grouped)) / (schedule.launch.warps * WARP)


def _filled(segment: Segment, space: Space, schedule: Schedule, registers: int, device: Device) -> Group:
    """Who shares the rows of a loop, where as many programs are resident as so many ``registers`` let be."""
    by_registers = resident(device, schedule.launch.warps, registers)
    programs = min(by_registers, _by_shared(segment, space, schedule, device))
    return _filling(schedule, 1, space, programs, _TURNS * schedule.reduced)


def _by_shared(segment: Segment, space: Space, schedule: Schedule, device: Device) -> int:
    """Programs of a loop whose copies under way fit: of what differs within a turn, a turn's part in each stage."""
    copied = turn_bytes(segment, space, schedule)
    copied *= max(schedule.launch.stages - 1, 1)
    return max(int(SHARED * device.shared_bytes) // max(copied, 1), 1) * device.multiprocessors


def _is_for_wider(schedule: Schedule, group: Group, space: Space) -> bool:
    """Would more warps in fewer programs leave fewer words to exchange, or use programs that the team cannot have?

    Batch norm of 8 x 64 x 256 x 256, float16, channels-last, took 62 us on an H200 so, in tiles of fewer columns 95.
    """
    if group.members * schedule.kept > _COLLECTED * schedule.launch.warps * WARP:
        return True
    rows = -(-space.kept // schedule.kept)
    return group.members == MAX_TEAM and 2 * MAX_TEAM * rows <= group.programs


def _narrowed(schedule: Schedule, lanes: int) -> Schedule:
    """Tiles of fewer columns, and as many elements."""
    return schedule.sized(kept=lanes, reduced=schedule.reduced * schedule.kept // lanes)


def _filling(schedule: Schedule, members: int, space: Space, programs: int, least: int) -> Group:
    """A team of ``members``, or of more, if all rows at once leave programs idle and each still gets ``least``."""
    rows = -(-space.kept // (schedule.columns or schedule.kept))
    while members < MAX_TEAM and 2 * members * rows <= programs and space.reduced >= 2 * members * least:
        members *= 2
    return Group(members, programs)


def _in_cache(segment: Segment, space: Space, schedule: Schedule, group: Group, device: Device) -> Group:
    """A larger team for columns, where what all teams walk at once then stays in L2 until it is read again.

    ``group`` where that takes members of too few turns, or more words of an exchange than elements make up for.
    """
    columns, lanes = schedule.columns or schedule.kept, schedule.kept
    one = columns * space.reduced * sum(t.dtype.itemsize for t in streamed(segment, space))
    members = group.members
    while min(-(-space.kept // columns), group.programs // members) * one > _CACHED * device.l2_bytes:
        members *= 2
        words = members * lanes * _WORDS * _RESULTS
        if members > min(MAX_TEAM, group.programs) or space.reduced < members * _TURNS * schedule.reduced:
            return group
        if words > _EXCHANGED * one / members:
            return group
    return replace(group, members=members)


def columns_of(segment: Segment, space: Space) -> tuple[int, int]:
    """Of columns in groups: how many a program takes, whole groups and a line of memory, and in how many lanes."""
    itemsize = min((t.dtype.itemsize for t in streamed(segment, space)), default=4)
    groups = space.x[-1 - space.inside].extent
    sizes = [n * space.grouped for n in range(1, groups + 1) if groups % n == 0 and n * space.grouped <= _MAX_COLUMNS]
    whole = [n for n in sizes if n * itemsize >= LINE_BYTES] or sizes[-1:]
    best = max(whole, key=lambda n: (n / power_of_two(n), -n))
    return best, power_of_two(best)
