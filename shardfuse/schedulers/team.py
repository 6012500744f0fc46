"""team: programs that share one row, each with its part of it, and exchange their partial results.

For rows that no program holds, and for rows so few and long that a program each would leave multiprocessors idle.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import DRAWS, REDUCTIONS, BoundTensor, Expr
from .limits import LINE_BYTES, MAX_TEAM, MAX_WARPS, WARP, Target, power_of_two, resident, vector
from .plan import Params
from .segment import Segment
from .space import Space, as_columns

_HELD = 64
"""Elements of its row that a thread holds, all inputs together: the more, the fewer exchanges.  32 in twice as many
programs took 322 us for 4096 x 65536 of bfloat16 where 64 took 313."""
_REGISTERS = 96
_LOOP_REGISTERS = 128
_WARPS = 8
_MAX_COLUMNS = 512
_FEW_ROWS = 132
"""A row for each multiprocessor: then looping teams take every row once, and read it again from L2.  Group norm of
2 x 320 x 128 x 128, float16, took 27 us on an H200, held in registers 39; 1 x 512 x 256 x 256 86 and 126."""
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
    has_indices = any(e.op in ("iota", *DRAWS) for e in segment.exprs)  # 64-bit
    if has_indices:
        return held // 4
    return held // 2 if many_weights or space.grouped else held


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
    if space.phases > 2 and rows <= _FEW_ROWS:
        return f"its {rows} rows are few: teams that loop exchange less often"
    longest = MAX_TEAM * _held(segment, space) * WARP
    longest = longest * _WARPS // columns_of(segment, space)[1] if space.grouped else longest * MAX_WARPS
    if space.reduced > longest:
        return f"a row of {space.reduced} elements is longer than {longest}, what a team of {MAX_TEAM} programs holds"
    return None


def held_by_team(segment: Segment, space: Space, target: Target) -> Params:
    """The smallest team that holds a row; a larger one where rows are too few to fill the machine."""
    n, held = space.reduced, _held(segment, space)
    warps = _WARPS if n <= MAX_TEAM * _WARPS * WARP * held else MAX_WARPS
    lanes = warps * WARP
    width = max((vector(t.dtype, n, target) for t in _streamed(segment, space)), default=4)
    members = max(power_of_two(-(-n // (lanes * held))), 2)
    params = Params(x_block=1, r_block=lanes * width, num_warps=warps, max_registers=_REGISTERS)
    return _filling(params, members, space, resident(target, warps, _REGISTERS), lanes * width)


def columns_held_by_team(segment: Segment, space: Space, target: Target) -> Params:
    """Columns in groups, held as tiles ``[r, columns]``."""
    columns, lanes = columns_of(segment, space)
    threads = _WARPS * WARP
    members = max(power_of_two(-(-space.reduced * lanes // (threads * _held(segment, space)))), 1)
    block = max(threads * 8 // lanes, 1)
    params = Params(
        x_block=lanes, columns=columns, r_block=block, num_warps=_WARPS, max_registers=_REGISTERS, prefetch=False
    )
    params = _filling(params, members, space, resident(target, _WARPS, _REGISTERS), block)
    return params if params.team > 1 else replace(params, team=0, programs=0)


def looping_team(segment: Segment, space: Space, params: Params, target: Target) -> Params:
    """``params`` of a loop over whole rows or columns, each shared by so many programs that the machine is full."""
    if space.is_inner and params.x_block != 1:
        return params
    programs = resident(target, params.num_warps, _LOOP_REGISTERS)
    if not space.is_inner and not space.grouped:
        itemsize = min((t.dtype.itemsize for t in _streamed(segment, space)), default=4)
        lanes = min(params.x_block, LINE_BYTES // itemsize)  # a word for each lane of each member: no more than a line
        params = replace(params, x_block=lanes, r_block=params.r_block * params.x_block // lanes)
    full = _filling(params, 1, space, programs, _TURNS * params.r_block)
    return replace(full, max_registers=_LOOP_REGISTERS) if full.team > 1 else replace(full, team=0, programs=0)


def _filling(params: Params, members: int, space: Space, programs: int, least: int) -> Params:
    """A team of ``members``, or of more, if all rows at once leave programs idle and each still gets ``least``."""
    rows = -(-space.kept // (params.columns or params.x_block))
    while members < MAX_TEAM and 2 * members * rows <= programs and space.reduced >= 2 * members * least:
        members *= 2
    return replace(params, team=members, programs=programs)


def columns_of(segment: Segment, space: Space) -> tuple[int, int]:
    """Of columns in groups: how many a program takes, whole groups and a line of memory, and in how many lanes."""
    itemsize = min((t.dtype.itemsize for t in _streamed(segment, space)), default=4)
    groups = space.x[-1 - space.inside].extent
    sizes = [n * space.grouped for n in range(1, groups + 1) if groups % n == 0 and n * space.grouped <= _MAX_COLUMNS]
    whole = [n for n in sizes if n * itemsize >= LINE_BYTES] or sizes[-1:]
    best = max(whole, key=lambda n: (n / power_of_two(n), -n))
    return best, power_of_two(best)
