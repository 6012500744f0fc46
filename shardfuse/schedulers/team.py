"""team: programs that share one row, each with its part of it, and exchange their partial results.

For rows that no program holds, and for rows so few and long that a program each would leave multiprocessors idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import REDUCTIONS, BoundTensor, Expr
from .limits import MAX_TEAM, MAX_WARPS, TEAM_LANES, WARP, Target, power_of_two, resident, vector
from .plan import Params
from .segment import Segment
from .space import Space

_HELD = 32
"""Elements of its row that a thread holds, all inputs together."""
_HELD_BYTES = 64
"""Up to so many of them, and one exchange, fit in the fewer registers."""
_REGISTERS = (64, 80)
_LOOP_REGISTERS = 128
_WARPS = 8
_TURNS = 4
"""A member has at least so many turns of its loop."""


def cannot_exchange(segment: Segment, space: Space) -> str | None:
    """Why the programs of a team cannot finish the reductions of ``segment``."""
    if not space.is_inner:
        return "its columns are next to each other in memory"
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


def why_not_held(segment: Segment, space: Space) -> str | None:
    """Why the registers of a team do not hold the reduced elements."""
    refusal = cannot_exchange(segment, space)
    if refusal is not None:
        return refusal
    held = max(sum(space.is_streamed(t) for t in segment.inputs), 1)
    longest = MAX_TEAM * MAX_WARPS * WARP * (_HELD // held)
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


def looping_team(space: Space, params: Params, target: Target) -> Params:
    """``params`` of a loop over whole rows, each shared by so many programs that the machine is full."""
    if params.x_block != 1:
        return params
    programs = resident(target, params.num_warps, _LOOP_REGISTERS)
    members = 1
    while (
        members < MAX_TEAM
        and 2 * members * space.kept <= programs
        and space.reduced >= 2 * members * _TURNS * params.r_block
    ):
        members *= 2
    if members == 1:
        return params
    return replace(params, team=members, programs=programs, max_registers=_LOOP_REGISTERS)
