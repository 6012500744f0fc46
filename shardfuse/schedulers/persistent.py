"""persistent: reductions whose input is used again, read once and held in registers.

Inner reductions hold rows: a warp, or a program of up to 16 warps, for each, in unrolled chunks.  Outer ones hold short
columns, as tiles ``[r, x]``.
"""

from __future__ import annotations

from ..ir.expr import BoundTensor
from .limits import (
    MAX_CHUNKS,
    MAX_COLUMN,
    MAX_ROW_BYTES,
    MAX_WARPS,
    SHORT_COLUMN,
    WARP,
    WIDEST_WARPS,
    Target,
    power_of_two,
    vector,
)
from .online import online, takes_one_walk
from .plan import KernelPlan, Params, kernel_name
from .segment import Segment
from .space import Space, analyse, analysed
from .team import are_few_held, columns_held_by_team, held_by_team, in_columns, late_team, why_not_held

LONG = 8192
"""Rows up to this length are read in one go."""
_HELD = 44
"""Values of a row that a thread holds before the row gets more warps (75 registers were measured for 41)."""
_CHAIN = 4
_CHAINED = 96
"""Values of all rows that a thread holds where so many phases follow one another: several rows wait at once.  Two layer
norms in a row, 8 x 4096 x 3072 of bfloat16, took 117 us with 4 rows, with 2 124, with one 147."""
_NARROW = 40
"""Values of 16 bits that a thread holds in 64 registers."""
_TILE = 4096
"""Elements of a tile of short columns: 32 a thread with 4 warps."""
_FEW_ROWS = 8
"""Rows, of all inputs, that a thread holds whole columns of, one load of each."""
_FEW_LANES = 1024
_TALL_TILE = 24576
"""Elements of a tile of longer columns.  Softmax over dim 0 of 1024 x 65536, bfloat16, took 106 us, in a loop 164; of
700 x 65536 60, half as wide 71; of 256 x 262144 77, in a loop 112."""
_TALL_LANES = 128
"""Lanes of such a tile that a thread has, some of them masked."""


def why_not(segment: Segment) -> str | None:
    """Why ``segment`` is not persistent; ``None`` where it is."""
    space = analyse(segment)
    if isinstance(space, str):
        return space
    if not space.r:
        return "it has no reduction"
    if not rereads(space):
        return "nothing is read again after the reduction"
    if space.reduced > LONG and takes_one_walk(segment):
        return "running statistics take one walk over its long rows, which nobody has to hold"
    space = in_columns(segment, space)
    if space.grouped:
        return why_not_held(segment, space)
    refusal = too_long(segment, space)
    return refusal and why_not_held(segment, space)


def rereads(space: Space) -> bool:
    """Is something of the reduced extent used after a reduction?"""
    return any(phase and space.has_r(t) for t, phase in space.phase.items())


def too_long(segment: Segment, space: Space) -> str | None:
    """Why the registers of one program do not hold the reduced elements."""
    if not space.is_inner:
        held = max(len(streamed(segment, space)), 1)
        if space.reduced * held > MAX_COLUMN:
            return f"a column of {held} x {space.reduced} elements is longer than {MAX_COLUMN}"
        return None
    row = space.reduced * sum(t.dtype.itemsize for t in streamed(segment, space))
    if row > MAX_ROW_BYTES:
        return f"a row of {space.reduced} elements is {row} bytes of input, more than {MAX_ROW_BYTES}"
    return None


def streamed(segment: Segment, space: Space) -> list[BoundTensor]:
    """Inputs that each tile reads its own part of."""
    return [t for t in segment.loads if space.is_streamed(t)]


def propose(segment: Segment, target: Target) -> Params:
    """Registers decide: how many warps share a row, or how many rows share a program."""
    space = in_columns(segment, analysed(segment))
    if space.grouped:
        return columns_held_by_team(segment, space, target)
    if too_long(segment, space) is not None:
        joined = online(segment)
        late = None if are_few_held(segment, space) else late_team(joined, analysed(joined), target)
        return late or held_by_team(segment, space, target)
    return in_registers(segment, space, target)


def in_registers(segment: Segment, space: Space, target: Target) -> Params:
    """Blocks with all reduced elements unrolled."""
    inputs = streamed(segment, space)
    held = max(len(inputs), 1)
    if not space.is_inner:
        r_block = power_of_two(space.reduced)
        if space.reduced * held <= _FEW_ROWS:
            return Params(min(_FEW_LANES, power_of_two(space.kept)), 1)
        if r_block <= SHORT_COLUMN:
            return Params(x_block=min(max(_TILE // (r_block * held), 16), 256), r_block=r_block)
        warps = 4 if r_block <= MAX_COLUMN // 2 else 8
        fits = power_of_two(_TALL_TILE // (space.reduced * held) + 1) // 2
        columns = max(min(fits, _TALL_LANES * warps * WARP // (r_block * held)), 16)
        return Params(min(columns, power_of_two(space.kept)), r_block, num_warps=warps)
    n = space.reduced
    width = max((vector(t.dtype, n, target) for t in inputs), default=4)
    if n * held <= _HELD * WARP:
        return _several_rows(n, width)
    warps = min(power_of_two(-(-n * held // (_HELD * WARP))), MAX_WARPS)
    if held == 1 and n > _NARROW * WARP * MAX_WARPS and space.phases == 2:
        warps = WIDEST_WARPS
    block = max(warps * WARP * width, power_of_two(-(-n // MAX_CHUNKS)))
    bound = 64 if warps == MAX_WARPS and held == 1 and n <= _NARROW * WARP * warps else None
    rows = power_of_two(_CHAINED * WARP * warps // (n * held) + 1) // 2 if space.phases > _CHAIN else 1
    return Params(max(rows, 1), min(block, power_of_two(n)), num_warps=warps, max_registers=bound)


def _several_rows(n: int, width: int) -> Params:
    """A warp takes whole rows, so that a reduction crosses no warp: chunks of one warp's load."""
    whole = WARP * width
    block = min(whole, power_of_two(n))
    while n % block and block * 4 > whole:
        block //= 2
    if n % block or -(-n // block) > MAX_CHUNKS:
        block = max(min(whole, power_of_two(n)), power_of_two(-(-n // MAX_CHUNKS)))
    return Params(x_block=max(4 * whole // block, 4), r_block=block, num_warps=4)


def schedule(segment: Segment, params: Params) -> tuple[KernelPlan, ...]:
    """One kernel.  A team exchanges what belongs together at once."""
    if params.team:
        segment = online(segment)
    space = in_columns(segment, analysed(segment))
    return (KernelPlan(kernel_name("persistent", segment), segment, space, params),)
