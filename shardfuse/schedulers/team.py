"""team: programs that share one row, each with its part of it, and exchange their partial results.

For rows that no program holds, and for rows so few and long that a program each would leave multiprocessors idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import DRAWS, REDUCTIONS, BoundTensor, Expr
from .copies import turn_bytes
from .limits import (
    LINE_BYTES,
    MAX_TEAM,
    MAX_WARPS,
    SHARED,
    WARP,
    Target,
    in_powers_of_two,
    is_odd,
    power_of_two,
    resident,
    vector,
)
from .online import takes_one_walk
from .plan import Params
from .segment import Segment
from .space import Space, as_columns, run_below

_HELD = 64
"""Elements of its row that a thread holds, all inputs together: the more, the fewer exchanges.  32 in twice as many
programs took 322 us for 4096 x 65536 of bfloat16 where 64 took 313."""
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
with 96 registers 24.5, in a loop 22.4."""
_FEW_MEMBERS = 16
"""The largest team that holds one of few rows; others loop, and read it again from L2.  1 x 512 x 256 x 256 took 61 us
so, held by 128 programs 68."""
_LATE_WARPS = 4
_LATE_BYTES = 64
"""Bytes of a row that a thread of a late team holds, and as many of the next row; twice as many in larger teams."""
_LATE_REGISTERS = 80
_TWO_AHEAD_BYTES = 128
_TWO_AHEAD_REGISTERS = 168
"""Of a thread that holds so much of each of three rows: loads are under way while it takes exponentials and waits.
Softmax of 2048 x 131072, 1024 x 262144, bfloat16, took 279 and 273 us so, with two rows of half as much 302 and 316;
RMSNorm, which the compiler copies ahead of time, 322 where that takes 286."""
_ODD_WARPS = 8
_ODD_BYTES = 128
"""Of rows that begin within a word, with no vector beside them: the masks of their ends are fewer threads' work.
Softmax's gradient of 4096 x 50257, 2048 x 128257, bfloat16, took 353 and 415 us so, with 4 warps 405 and 439; softmax
of 2048 x 128257 324, two rows ahead 339; RMSNorm, with a vector, 387, with 4 warps 373.  Pairs of elements are loads
enough: softmax of 2048 x 128258 took 300 us so, in whole words 313; RMSNorm 380 and 305."""
_ODD_WEIGHTED_BYTES = 128 * 1024
"""Of rows with vectors beside them: RMSNorm of 2048 x 128257 took 371 us so, element by element 401; 300 x 50257 36.7
and 32.8."""
_SINGLE_BYTES = 64
_SINGLE_REGISTERS = 96
_SINGLE_EACH = 4
"""Of rows of a variance that come in a few bytes, which nothing is gained from copying ahead: vectors beside them are
read so many elements at a time.  LayerNorm of 4096 x 50257, 50258 and 50260, with 4 vectors, bfloat16, took 492, 416
and 375 us so, copied ahead 779, 760 and 658."""
_LATE_MEMBERS = 16
_LATE_INPUTS = 2
_LATE_FOLDED_MEMBERS = 2
"""Of teams that take a variance in load by load, where shared memory does: LayerNorm of 4096 x 65536, bfloat16, took
295 us with 8 members, 306 with 16; RMSNorm 289 and 283."""
_LATE_MOST_MEMBERS = 256
"""Two for each multiprocessor; group norm of 1 x 128 x 20 x 256 x 256, bfloat16, took 223 us so, in a loop 263."""
_LATE_MOST = 160
"""Bytes of a row that a thread holds in the largest teams: with as many of the next row, 80 registers of 128."""
_LATE_FOLD = 8
"""Elements of a load from which a variance is taken in load by load, so that no row is unpacked at once."""
_LATE_TURNS = 4
"""Rows that a late team takes one after the other, at the least."""
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


def _streamed(segment: Segment, space: Space) -> list[BoundTensor]:
    return [t for t in segment.loads if space.is_streamed(t)]


def _held(segment: Segment, space: Space) -> int:
    """Elements of a row that a thread of a team holds; half of them beside much else that is held."""
    held = _HELD // max(len(_streamed(segment, space)), 1)
    many_weights = space.phases > 2 and len(segment.loads) > 4
    if _has_indices(segment):
        return held // 4
    return held // 2 if many_weights or space.grouped else held


def _has_indices(segment: Segment) -> bool:
    """Indices are 64 bits each."""
    return any(e.op in ("iota", *DRAWS) for e in segment.exprs)


def _registers(segment: Segment, space: Space) -> int:
    """Of a thread of a team that holds rows."""
    return _WIDE_REGISTERS if any(t.dtype.itemsize > 2 for t in _streamed(segment, space)) else _REGISTERS


def in_columns(segment: Segment, space: Space) -> Space:
    """``space`` as it is walked: runs of memory that are shorter than a line stand side by side."""
    itemsize = min((t.dtype.itemsize for t in _streamed(segment, space)), default=4)
    return as_columns(space, LINE_BYTES // itemsize)


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
    """Are there few rows of one input, and does a small team hold each?"""
    if space.grouped or space.phases <= 2 or space.kept > _FEW_ROWS or len(_streamed(segment, space)) != 1:
        return False
    return space.reduced <= _FEW_MEMBERS * _WARPS * WARP * _FEW_HELD


def is_cut_short(walked: Sequence[BoundTensor], space: Space, target: Target) -> bool:
    """Do rows lie in pieces that loads of 128 bits do not divide?"""
    widths = (vector(t.dtype, space.run, target) * t.dtype.itemsize for t in walked)
    return space.run != space.reduced and min(widths, default=0) < target.vector_bytes


def late_team(segment: Segment, space: Space, target: Target) -> Params | None:
    """A team that reads its next row before it waits for this one; ``None`` where that does not pay.

    ``space``: of the segment with its statistics joined.  RMSNorm of 4096 x 65536, bfloat16, took 284 us on an H200 so,
    323 us where programs wait for the row that they have just read; the gradient of batch norm of 64 x 64 x 112 x 112,
    float16, 110 and 165, batch norm of 32 x 256 x 56 x 56 34 and 57.
    """
    walked, n = _streamed(segment, space), space.reduced
    if segment.loads != segment.inputs or is_cut_short(walked, space, target):
        return None  # windows, and a place of its own for each element
    beside = [t for t in segment.inputs if space.r[-1] in space.atoms[t] and t not in walked]
    if space.phases != 2 or space.grouped or not space.is_inner or any(map(space.has_x, beside)):
        return None
    if not 1 <= len(walked) <= _LATE_INPUTS or any(t.dtype is not walked[0].dtype for t in walked):
        return None
    kinds = {e.op for e in segment.exprs}
    loaded = vector(walked[0].dtype, n, target)
    width = max(loaded, 2)
    is_narrow = walked[0].dtype.itemsize == 2
    aligned = is_narrow and "welford" not in kinds and is_odd(walked[0].dtype, n, target) and space.kept > 1
    aligned = aligned and (n * walked[0].dtype.itemsize > _ODD_WEIGHTED_BYTES if beside else loaded == 1)
    is_single = is_narrow and "welford" in kinds and loaded < _LATE_FOLD
    if aligned or is_single:
        width = target.vector_bytes // walked[0].dtype.itemsize if aligned else max(width, _SINGLE_EACH)
    is_folded = "welford" in kinds and len(walked) == 1 and width >= _LATE_FOLD
    held = len(walked) * max(walked[0].dtype.itemsize, 2)
    copied = sum(t.dtype.itemsize for t in (*walked, *beside))
    rows = 1
    if aligned and not beside:
        size = _sized(n * held, _ODD_WARPS, _ODD_BYTES, _LOOP_REGISTERS)
    elif is_single:
        size = _sized(n * held, _LATE_WARPS, _SINGLE_BYTES, _SINGLE_REGISTERS)
    elif "online_softmax" in kinds and is_narrow and len(walked) == 1:
        rows, size = 2, _sized(n * held, _LATE_WARPS, _TWO_AHEAD_BYTES, _TWO_AHEAD_REGISTERS)
    else:
        size = _late_size(n * held, _few_members(kinds, held, copied, target, is_folded=is_folded))
        size = size if size is None or size[0] == _LATE_WARPS or is_folded or len(walked) > 1 else None
    if size is None:
        return None
    warps, members, registers = size
    block = warps * WARP * width
    by_channel = [t for t in segment.inputs if space.has_r(t) and t not in (*walked, *beside)]
    share, run = (width, width) if is_folded else (members * block, block)
    if by_channel and (n % share or any(run_below(t, space.r, space) % run for t in by_channel)):
        return None  # not one number for all of a load; of two inputs, for all of a chunk
    by_shared = int(SHARED * target.shared_bytes) // (copied * -(-n // members)) * target.multiprocessors
    programs = resident(target, warps, registers)
    is_deep = is_folded and registers > _LATE_REGISTERS and by_shared >= 2 * min(programs, by_shared)
    stages = 1 if "online_softmax" in kinds or len(walked) > 1 or aligned or is_single else 3 if is_deep else 2
    if stages > 1:
        programs = min(programs, by_shared)
    if not 2 <= members <= programs or space.kept * members < _LATE_TURNS * programs:
        return None
    return Params(
        1, block, num_warps=warps, num_stages=stages, max_registers=registers, team=members, late=rows,
        fold=width if is_folded else 1, programs=programs, aligned=aligned,
    )  # fmt: skip


def _few_members(kinds: set[str], held: int, copied: int, target: Target, *, is_folded: bool) -> int:
    """Up to how many members a thread has few registers.  ``held``, ``copied``: bytes for each element of a row."""
    if "online_softmax" in kinds:
        return 2 * _LATE_MEMBERS
    shared = _LATE_WARPS * WARP * 2 * _LATE_BYTES // held * copied * resident(target, _LATE_WARPS, _LOOP_REGISTERS)
    fits = shared <= int(SHARED * target.shared_bytes) * target.multiprocessors
    return _LATE_FOLDED_MEMBERS if is_folded and fits else _LATE_MEMBERS


def _late_size(row: int, few: int) -> tuple[int, int, int] | None:
    """Warps of a program, members of a team, and registers of a thread, for a row of so many bytes.

    ``None`` where it is too long.  ``few``: how many members have few registers.
    """
    lanes = _LATE_WARPS * WARP
    members = power_of_two(-(-row // (lanes * _LATE_BYTES)))
    if members <= few:
        return _LATE_WARPS, members, _LATE_REGISTERS
    if members <= 2 * MAX_TEAM:
        return _LATE_WARPS, members // 2, _LOOP_REGISTERS
    members = power_of_two(-(-row // (2 * lanes * _LATE_MOST)))
    return (2 * _LATE_WARPS, members, _LOOP_REGISTERS) if members <= _LATE_MOST_MEMBERS else None


def _sized(row: int, warps: int, held: int, registers: int) -> tuple[int, int, int] | None:
    """``_late_size`` of threads that hold at most so many bytes of a row: no more members than that takes."""
    members = max(-(-row // (warps * WARP * held)), 2)
    return (warps, members, registers) if members <= MAX_TEAM else None


def held_by_team(segment: Segment, space: Space, target: Target) -> Params:
    """The smallest team that holds a row; a larger one where rows are too few to fill the machine."""
    n, held, registers = space.reduced, _held(segment, space), _registers(segment, space)
    if are_few_held(segment, space):
        held, registers = _FEW_HELD, _FEW_REGISTERS
    warps = _WARPS if n <= MAX_TEAM * _WARPS * WARP * held else MAX_WARPS
    lanes = warps * WARP
    width = max((vector(t.dtype, n, target) for t in _streamed(segment, space)), default=4)
    members = max(power_of_two(-(-n // (lanes * held))), 2)
    params = Params(x_block=1, r_block=lanes * width, num_warps=warps, max_registers=registers)
    return _filling(params, members, space, resident(target, warps, registers), lanes * width)


def columns_held_by_team(segment: Segment, space: Space, target: Target) -> Params:
    """Columns in groups, held as tiles ``[r, columns]``."""
    columns, lanes = columns_of(segment, space)
    threads = _WARPS * WARP
    members = max(power_of_two(-(-space.reduced * lanes // (threads * _held(segment, space)))), 1)
    block = max(threads * 8 // in_powers_of_two(columns)[0], 1)
    registers = _registers(segment, space)
    params = Params(
        x_block=lanes, columns=columns, r_block=block, num_warps=_WARPS, max_registers=registers, prefetch=False
    )
    if members == 2 and space.kept // columns >= resident(target, _WARPS, _WIDE_REGISTERS):
        return replace(params, max_registers=None)  # 64 x 2048 x 7 x 7's gradient: 24 us on an H200, by teams of 2 42
    params = _filling(params, members, space, resident(target, _WARPS, registers), block)
    return params if params.team > 1 else replace(params, team=0, programs=0)


def looping_team(segment: Segment, space: Space, params: Params, target: Target) -> Params:
    """``params`` of a loop over whole rows or columns, each shared by so many programs that the machine is full."""
    if space.is_inner and params.x_block != 1:
        return params
    is_small = space.is_inner and not space.grouped and len(_streamed(segment, space)) == 1
    registers = _FEW_REGISTERS if is_small else _LOOP_REGISTERS

    def filled(params: Params) -> Params:
        programs = min(resident(target, params.num_warps, registers), _by_shared(segment, space, params, target))
        return _filling(params, 1, space, programs, _TURNS * params.r_block)

    if not space.is_inner and not space.grouped:
        itemsize = min((t.dtype.itemsize for t in _streamed(segment, space)), default=4)
        lanes = min(params.x_block, LINE_BYTES // itemsize)  # a word for each lane of each member: no more than a line
        params = _narrowed(params, lanes)
        while params.num_warps < MAX_WARPS and _is_for_wider(filled(params), space):
            params = replace(params, num_warps=2 * params.num_warps, r_block=2 * params.r_block)
    full = filled(params)
    while full.team * params.x_block > _COLLECTED * params.num_warps * WARP and not space.grouped:
        params = _narrowed(params, params.x_block // 2)
        full = filled(params)
    if not (space.is_inner or space.grouped or takes_one_walk(segment)):
        full = _in_cache(segment, space, full, target)
    return replace(full, max_registers=registers) if full.team > 1 else replace(full, team=0, programs=0)


def _by_shared(segment: Segment, space: Space, params: Params, target: Target) -> int:
    """Programs of a loop whose copies under way fit: of what differs within a turn, a turn's part in each stage."""
    copied = turn_bytes(segment, space, params)
    copied *= max(params.num_stages - 1, 1)
    return max(int(SHARED * target.shared_bytes) // max(copied, 1), 1) * target.multiprocessors


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


def _in_cache(segment: Segment, space: Space, params: Params, target: Target) -> Params:
    """A larger team for columns, where what all teams walk at once then stays in L2 until it is read again.

    ``params`` where that takes members of too few turns, or more words of an exchange than elements make up for.
    """
    columns, lanes = params.columns or params.x_block, params.x_block
    one = columns * space.reduced * sum(t.dtype.itemsize for t in _streamed(segment, space))
    members = params.team
    while min(-(-space.kept // columns), params.programs // members) * one > _CACHED * target.l2_bytes:
        members *= 2
        words = members * lanes * _WORDS * _RESULTS
        if members > min(MAX_TEAM, params.programs) or space.reduced < members * _TURNS * params.r_block:
            return params
        if words > _EXCHANGED * one / members:
            return params
    return replace(params, team=members)


def columns_of(segment: Segment, space: Space) -> tuple[int, int]:
    """Of columns in groups: how many a program takes, whole groups and a line of memory, and in how many lanes."""
    itemsize = min((t.dtype.itemsize for t in _streamed(segment, space)), default=4)
    groups = space.x[-1 - space.inside].extent
    sizes = [n * space.grouped for n in range(1, groups + 1) if groups % n == 0 and n * space.grouped <= _MAX_COLUMNS]
    whole = [n for n in sizes if n * itemsize >= LINE_BYTES] or sizes[-1:]
    best = max(whole, key=lambda n: (n / power_of_two(n), -n))
    return best, power_of_two(best)
