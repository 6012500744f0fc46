"""team: programs that share one row, each with its part of it, and exchange their partial results.

For rows that no program holds, and for rows so few and long that a program each would leave multiprocessors idle.
"""

from __future__ import annotations

from dataclasses import replace

from ..device import Device
from ..ir.dtype import DataType
from ..ir.expr import DRAWS, REDUCTIONS, STATISTICS, Expr
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
from .plan import Params
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
    """Is what ``expr`` accumulates float32 or int32?"""
    match expr.op:
        case "any" | "all":
            return True
        case "sum" | "prod":
            return expr.output.dtype.accumulator is DataType.Float
        case _:
            return expr.tensors[0].dtype.compute in (DataType.Float, DataType.Int32)


def _held(segment: Segment, space: Space) -> int:
    """Elements of a row that a thread of a team holds; half of them beside much else that is held."""
    walked = streamed(segment, space)
    is_pair = len(walked) == 2 and all(t.dtype.itemsize <= 2 for t in walked)
    held = _PAIR_HELD if is_pair and not space.grouped else _HELD // max(len(walked), 1)
    many_weights = space.phases > 2 and len([t for t in segment.loads if space.has_r(t)]) > 4
    if _has_indices(segment):
        return held // 4
    return held // 2 if many_weights or space.grouped else held


def _has_indices(segment: Segment) -> bool:
    """Indices are 64 bits each."""
    return any(e.op in ("iota", *DRAWS) for e in segment.exprs)


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


def why_not_held(segment: Segment, space: Space) -> str | None:
    """Why the registers of a team do not hold the reduced elements."""
    refusal = cannot_exchange(segment, space)
    if refusal is not None:
        return refusal
    if not space.is_inner and not space.grouped:
        return "its columns are next to each other in memory"
    rows = space.kept // columns_of(segment, space)[0] if space.grouped else space.kept
    if (space.phases > 2 or space.grouped) and rows <= _FEW_ROWS and not are_few_held(segment, space):
        return f"its {rows} rows are few: small teams that loop wait less for each other"
    if space.phases > 2 and _has_indices(segment):
        return "its indices take the registers: large teams that wait for each other more than once"
    longest = MAX_TEAM * _held(segment, space) * WARP
    longest = longest * _WARPS // columns_of(segment, space)[1] if space.grouped else longest * MAX_WARPS
    if space.reduced > longest:
        return f"a row of {space.reduced} elements is longer than {longest}, what a team of {MAX_TEAM} programs holds"
    return None


def are_few_held(segment: Segment, space: Space) -> bool:
    """Are there few rows of one input that are read three times, and does a small team hold each?

    The same for a segment whose statistics are joined, of which two reads are one.
    """
    reads = space.phases + any(e.op in STATISTICS for e in segment.exprs)
    if space.grouped or reads <= 2 or space.kept > _FEW_ROWS or len(streamed(segment, space)) != 1:
        return False
    return space.reduced <= _FEW_MEMBERS * _WARPS * WARP * _FEW_HELD


def held_by_team(segment: Segment, space: Space, device: Device) -> Params:
    """The smallest team that holds a row; a larger one where rows are too few to fill the machine."""
    n, held, registers = space.reduced, _held(segment, space), _registers(segment, space)
    if are_few_held(segment, space):
        held, registers = _FEW_HELD, _FEW_REGISTERS
    warps = _WARPS if n <= MAX_TEAM * _WARPS * WARP * held else MAX_WARPS
    lanes = warps * WARP
    width = max((vector(t.dtype, n, device) for t in streamed(segment, space)), default=4)
    members = max(power_of_two(-(-n // (lanes * held))), 2)
    params = Params(x_block=1, r_block=lanes * width, num_warps=warps, max_registers=registers)
    params = _filling(params, members, space, resident(device, warps, registers), lanes * width)
    is_once = params.programs // params.team >= space.kept
    return replace(params, prefetch=not is_once and registers > _FEW_REGISTERS)


def columns_held_by_team(segment: Segment, space: Space, device: Device) -> Params:
    """Columns in groups, held as tiles ``[r, columns]``."""
    columns, lanes = columns_of(segment, space)
    threads = _WARPS * WARP
    members = max(power_of_two(-(-space.reduced * lanes // (threads * _held(segment, space)))), 1)
    block = max(threads * 8 // in_powers_of_two(columns)[0], 1)
    registers = _registers(segment, space)
    params = Params(
        x_block=lanes, columns=columns, r_block=block, num_warps=_WARPS, max_registers=registers, prefetch=False
    )
    if members == 2 and space.kept // columns >= resident(device, _WARPS, _WIDE_REGISTERS):
        return replace(params, max_registers=None)  # 64 x 2048 x 7 x 7's gradient: 24 us on an H200, by teams of 2 42
    params = _filling(params, members, space, resident(device, _WARPS, registers), block)
    return params if params.team > 1 else _alone(params)


def looping_team(segment: Segment, space: Space, params: Params, device: Device) -> Params:
    """``params`` of a loop over whole rows or columns, each shared by so many programs that the machine is full."""
    if space.is_inner and params.x_block != 1:
        return params
    if space.grouped:
        return _looping_over_groups(segment, space, params, device)
    is_small = space.is_inner and len(streamed(segment, space)) == 1
    registers = _FEW_REGISTERS if is_small else _LOOP_REGISTERS

    def filled(params: Params) -> Params:
        return _filled(segment, space, params, registers, device)

    if not space.is_inner:
        itemsize = min((t.dtype.itemsize for t in streamed(segment, space)), default=4)
        lanes = min(params.x_block, LINE_BYTES // itemsize)  # a word for each lane of each member: no more than a line
        params = _narrowed(params, lanes)
        while params.num_warps < MAX_WARPS and _is_for_wider(filled(params), space):
            params = replace(params, num_warps=2 * params.num_warps, r_block=2 * params.r_block)
    full = filled(params)
    while full.team * params.x_block > _COLLECTED * params.num_warps * WARP:
        params = _narrowed(params, params.x_block // 2)
        full = filled(params)
    if not (space.is_inner or takes_one_walk(segment)):
        full = _in_cache(segment, space, full, device)
    return replace(full, max_registers=registers) if full.team > 1 else _alone(full)


def _looping_over_groups(segment: Segment, space: Space, params: Params, device: Device) -> Params:
    """``looping_team`` of columns in groups: where a member has few turns, what they wait for is each other."""

    def turns(full: Params) -> int:
        return -(-space.reduced // (full.team * full.r_block))

    full = _filled(segment, space, params, _LOOP_REGISTERS, device)
    if params.r_block > 1 and turns(full) <= _SHORT_TURNS:
        full = _filled(segment, space, _halved(params), _LOOP_REGISTERS, device)
        while _words(full, space) > _POLLED[-1]:
            full = replace(full, team=full.team // 2)
    if full.team == 1:
        return _alone(full)
    used = -(-space.kept // params.columns) * full.team
    is_small = turns(full) <= _TURNS and full.r_block > 1 and len(streamed(segment, space)) == 1
    if is_small and full.num_warps == 2 and used > _FULL * full.programs and 2 * _words(full, space) <= _POLLED[-1]:
        full = replace(_halved(full), programs=resident(device, 1, _LOOP_REGISTERS))
    roomy = _filled(segment, space, full, _ROOMY_REGISTERS, device).programs
    is_roomy = roomy >= used and full.num_warps > 1
    programs, registers = (roomy, _ROOMY_REGISTERS) if is_roomy else (full.programs, _LOOP_REGISTERS)
    fewest, most = _POLLED
    is_polled = fewest <= _words(full, space) <= most
    return replace(full, programs=programs, max_registers=registers, counted=not is_polled)


def _halved(params: Params) -> Params:
    """Half the threads, and half as much at once."""
    half = params.r_block // 2
    return replace(params, num_warps=params.num_warps // 2, r_block=half, fold=min(params.fold, half))


def _words(params: Params, space: Space) -> float:
    """Of each result of a team's groups, for each thread."""
    return params.team * power_of_two(-(-params.columns // space.grouped)) / (params.num_warps * WARP)


def _filled(segment: Segment, space: Space, params: Params, registers: int, device: Device) -> Params:
    """``params`` of a loop, for as many programs as are resident with so many ``registers``."""
    programs = min(resident(device, params.num_warps, registers), _by_shared(segment, space, params, device))
    return _filling(params, 1, space, programs, _TURNS * params.r_block)


def _alone(params: Params) -> Params:
    return replace(params, team=0, programs=0)


def _by_shared(segment: Segment, space: Space, params: Params, device: Device) -> int:
    """Programs of a loop whose copies under way fit: of what differs within a turn, a turn's part in each stage."""
    copied = turn_bytes(segment, space, params)
    copied *= max(params.num_stages - 1, 1)
    return max(int(SHARED * device.shared_bytes) // max(copied, 1), 1) * device.multiprocessors


def _is_for_wider(full: Params, space: Space) -> bool:
    """Would more warps in fewer programs leave fewer words to exchange, or use programs that the team cannot have?

    Batch norm of 8 x 64 x 256 x 256, float16, channels-last, took 62 us on an H200 so, in tiles of fewer columns 95.
    """
    if full.team * full.x_block > _COLLECTED * full.num_warps * WARP:
        return True
    rows = -(-space.kept // full.x_block)
    return full.team == MAX_TEAM and 2 * MAX_TEAM * rows <= full.programs


def _narrowed(params: Params, lanes: int) -> Params:
    """Tiles of fewer columns, and as many elements."""
    return replace(params, x_block=lanes, r_block=params.r_block * params.x_block // lanes)


def _filling(params: Params, members: int, space: Space, programs: int, least: int) -> Params:
    """A team of ``members``, or of more, if all rows at once leave programs idle and each still gets ``least``."""
    rows = -(-space.kept // (params.columns or params.x_block))
    while members < MAX_TEAM and 2 * members * rows <= programs and space.reduced >= 2 * members * least:
        members *= 2
    return replace(params, team=members, programs=programs)


def _in_cache(segment: Segment, space: Space, params: Params, device: Device) -> Params:
    """A larger team for columns, where what all teams walk at once then stays in L2 until it is read again.

    ``params`` where that takes members of too few turns, or more words of an exchange than elements make up for.
    """
    columns, lanes = params.columns or params.x_block, params.x_block
    one = columns * space.reduced * sum(t.dtype.itemsize for t in streamed(segment, space))
    members = params.team
    while min(-(-space.kept // columns), params.programs // members) * one > _CACHED * device.l2_bytes:
        members *= 2
        words = members * lanes * _WORDS * _RESULTS
        if members > min(MAX_TEAM, params.programs) or space.reduced < members * _TURNS * params.r_block:
            return params
        if words > _EXCHANGED * one / members:
            return params
    return replace(params, team=members)


def columns_of(segment: Segment, space: Space) -> tuple[int, int]:
    """Of columns in groups: how many a program takes, whole groups and a line of memory, and in how many lanes."""
    itemsize = min((t.dtype.itemsize for t in streamed(segment, space)), default=4)
    groups = space.x[-1 - space.inside].extent
    sizes = [n * space.grouped for n in range(1, groups + 1) if groups % n == 0 and n * space.grouped <= _MAX_COLUMNS]
    whole = [n for n in sizes if n * itemsize >= LINE_BYTES] or sizes[-1:]
    best = max(whole, key=lambda n: (n / power_of_two(n), -n))
    return best, power_of_two(best)
