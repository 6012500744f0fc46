"""team: programs that share one row, each with its part of it, and exchange their partial results.

For rows that no program holds, and for rows so few and long that a program each would leave multiprocessors idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import REDUCTIONS, BoundTensor, Expr
from .limits import LINE_BYTES, MAX_TEAM, MAX_WARPS, TEAM_LANES, WARP, Target, power_of_two, resident, vector
from .plan import Params
from .segment import Segment
from .space import Space, as_columns

_HELD = 32
"""Elements of its row that a thread holds, all inputs together."""
_HELD_BYTES = 64
"""Up to so many of them, and one exchange, fit in the fewer registers."""
_REGISTERS = (64, 80)
_LOOP_REGISTERS = 128
_WARPS = 8
_MAX_COLUMNS = 512
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


def in_columns(segment: Segment, space: Space) -> Space:
    """``space`` as it is walked: runs of memory that are shorter than a line stand side by side."""
    itemsize = min((t.dtype.itemsize for t in segment.inputs if space.is_streamed(t)), default=4)
    return as_columns(space, LINE_BYTES // itemsize)


def why_not_held(segment: Segment, space: Space) -> str | None:
    """Why the registers of a team do not hold the reduced elements."""
    refusal = cannot_exchange(segment, space)
    if refusal is not None:
        return refusal
    if not space.is_inner and not space.grouped:
        return "its columns are next to each other in memory"
    held = max(sum(space.is_streamed(t) for t in segment.inputs), 1)
    longest = MAX_TEAM * MAX_WARPS * WARP * (_HELD // held)
    if space.grouped:
        longest = MAX_TEAM * _WARPS * WARP * (_HELD // held) // lanes_of(space, segment)[1]
    if space.reduced > longest:
        return f"a row of {space.reduced} elements is longer than {longest}, what a team of {MAX_TEAM} programs holds"
    return None


def held_by_team(space: Space, inputs: Sequence[BoundTensor], target: Target) -> Params:
    """The smallest team that holds a row; a larger one where rows are too few to fill the machine."""
    n = space.reduced
    held = _HELD // max(len(inputs), 1)
    warps = _WARPS if n <= TEAM_LANES * _WARPS * WARP * held else MAX_WARPS
    lanes = warps * WARP
    width = max((vector(t.dtype, n, target) for t in inputs), default=4)
    row_bytes = held * sum(t.dtype.itemsize for t in inputs)
    registers = _REGISTERS[space.phases > 2 or row_bytes > _HELD_BYTES]
    programs = resident(target, warps, registers)
    members = max(power_of_two(-(-n // (lanes * held))), 2)
    while members < MAX_TEAM and 2 * members * space.kept <= programs and n >= 2 * members * lanes * width:
        members *= 2
    block = max(lanes * width, WARP)
    return Params(
        x_block=1, r_block=block, num_warps=warps, max_registers=registers, team=members, programs=programs
    )  # fmt: skip


def lanes_of(space: Space, segment: Segment) -> tuple[int, int]:
    """Of columns in groups: how many a program takes, whole groups and at least a line of memory, and in how many lanes."""
    groups = space.x[-1 - _pieces(space)].extent
    itemsize = min((t.dtype.itemsize for t in segment.inputs if space.is_streamed(t)), default=4)
    sizes = [n * space.grouped for n in range(1, groups + 1) if groups % n == 0]
    whole = [n for n in sizes if LINE_BYTES <= n * itemsize and n <= _MAX_COLUMNS] or [max(sizes[0], *(n for n in sizes if n <= _MAX_COLUMNS))]
    best = max(whole, key=lambda n: (n / power_of_two(n), -n))
    return best, power_of_two(best)


def _pieces(space: Space) -> int:
    """How many of the innermost atoms of x are a group's columns."""
    count, run = 0, 1
    while run < space.grouped:
        count += 1
        run *= space.x[-count].extent
    return count


def columns_held_by_team(segment: Segment, space: Space, target: Target) -> Params:
    """Columns in groups, held as tiles ``[r, columns]``."""
    columns, lanes = lanes_of(space, segment)
    held = _HELD // max(sum(space.is_streamed(t) for t in segment.inputs), 1)
    threads = _WARPS * WARP
    programs = resident(target, _WARPS, _REGISTERS[1])
    members = max(power_of_two(-(-space.reduced * lanes // (threads * held))), 1)
    block = max(threads * 8 // lanes, 1)
    while members < MAX_TEAM and 2 * members * space.kept <= programs * columns and space.reduced >= 2 * members * block:
        members *= 2
    return Params(
        x_block=lanes, columns=columns, r_block=block, num_warps=_WARPS, max_registers=_REGISTERS[1],
        team=members, programs=programs, prefetch=False,
    )  # fmt: skip


def looping_team(space: Space, params: Params, target: Target) -> Params:
    """``params`` of a loop over whole rows or columns, each shared by so many programs that the machine is full."""
    if space.is_inner and params.x_block != 1:
        return params
    programs = resident(target, params.num_warps, _LOOP_REGISTERS)
    blocks = -(-space.kept // (params.columns or params.x_block))
    members = 1
    while (
        members < MAX_TEAM
        and 2 * members * blocks <= programs
        and space.reduced >= 2 * members * _TURNS * params.r_block
    ):
        members *= 2
    if members == 1:
        return params
    return replace(params, team=members, programs=programs, max_registers=_LOOP_REGISTERS)
