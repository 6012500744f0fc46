"""persistent: reductions whose input is used again, read once and held in registers.

Inner reductions hold rows: a warp, or a program of up to 16 warps, for each, in unrolled chunks.  Outer ones hold short
columns, as tiles ``[r, x]``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..device import MAX_THREADS, Device, InvariantRows
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.op import Random, Reduce
from ..segments.online_reductions import online, takes_one_walk
from ..segments.segment import Segment, leading_to
from ..segments.space import Space, analyse_reduction, analysed, run_below
from .lagged_group import is_cut_short, lagged_group
from .limits import (
    MAX_WARPS,
    WARP,
    WIDEST_LOAD,
    WIDEST_WARPS,
    may_align_down,
    power_of_two,
    power_of_two_within,
    vector,
    widest,
)
from .plan import KernelPlan, kernel_name
from .resources import held_values
from .schedule import Access, Launch, Registers, Schedule, Tile
from .team import are_few_held, columns_held_by_team, held_by_team, in_columns, paired_team, why_not_held

UNPACKED = (DataType.BFloat16, DataType.Half)
"""Types that are held two in a word."""


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` is not persistent; ``None`` where it is."""
    space = analyse_reduction(segment)
    if isinstance(space, str):
        return space
    if not space.rereads:
        return "nothing is read again after the reduction"
    if space.reduced > device.measured.rows.long and takes_one_walk(segment):
        return "running statistics take one walk over its long rows, which need not be held"
    space = in_columns(space, device)
    if space.grouped:
        return why_not_held(space, device)
    refusal = too_long(space, device)
    return refusal and why_not_held(space, device)


def too_long(space: Space, device: Device) -> str | None:
    """Why the registers of one program do not hold the reduced elements."""
    if not space.is_inner:
        held, longest = max(len(space.streamed), 1), device.measured.columns.longest
        if space.reduced * held > longest:
            return f"a column of {held} x {space.reduced} elements is longer than {longest}"
        return None
    row = space.reduced * space.element_bytes
    if row > device.row_bytes:
        return f"a row of {space.reduced} elements is {row} bytes of input, more than {device.row_bytes}"
    return None


def propose(segment: Segment, device: Device) -> Schedule:
    """Registers decide: how many warps share a row, or how many rows share a program."""
    space = in_columns(analysed(segment), device)
    if space.grouped:
        return columns_held_by_team(space, device)
    joined = online(segment)
    held = packed_row(space, device) or paired_team(analysed(joined), device)
    if held is not None:
        return held
    if too_long(space, device) is not None:
        late = lagged_group(analysed(joined), device, are_few_held=are_few_held(space, device))
        return late or held_by_team(space, device)
    few = _invariant_row(space, device)
    few = few or _all_at_once(space, device) or _pair(space, device)
    return few or in_registers(space, device)


def by_one_program(space: Space, device: Device) -> Schedule:
    """Rows that registers of one program hold, one by one or several."""
    return _all_at_once(space, device) or in_registers(space, device)


def in_registers(space: Space, device: Device) -> Schedule:
    """Blocks with all reduced elements unrolled."""
    tuned = device.measured
    inputs = space.streamed
    held = max(held_values(space, device), 1)
    if not space.is_inner:
        r_block = power_of_two(space.reduced)
        if space.reduced * held <= tuned.columns.rows:
            return Schedule(Tile(min(MAX_THREADS, power_of_two(space.kept)), 1))
        if r_block <= tuned.columns.short:
            return Schedule(
                Tile(power_of_two_within(min(max(tuned.columns.tile // (r_block * held), 16), 256)), r_block)
            )
        warps = 4 if r_block <= tuned.columns.longest // 2 else 8
        fits = power_of_two(tuned.columns.tall_tile // (space.reduced * held) + 1) // 2
        columns = power_of_two_within(max(min(fits, tuned.columns.tall_lanes * warps * WARP // (r_block * held)), 16))
        return Schedule(Tile(min(columns, power_of_two(space.kept)), r_block), launch=Launch(warps))
    n = space.reduced
    draws = any(isinstance(e.op, Random) for e in space.segment.exprs)
    if draws:
        held = max(held, tuned.rows.drawn)
    width = widest(inputs, n, device)
    if n * held <= tuned.rows.short * WARP:
        return _several_rows(n, width, device, is_shared=bool(space.beside))
    loads = n * held if width > 1 else 2 * n * held  # an element each: more threads have more of them on their way
    if space.phases > tuned.chains.phases:
        return _chain(n, held, loads, width, _rows_alike(space), device)
    is_narrow = all(t.dtype.itemsize <= 2 for t in inputs)
    warps = min(power_of_two(-(-loads // (tuned.rows.held * WARP))), MAX_WARPS)
    if held == 1 and is_narrow:
        warps = _or_four(warps, loads, space.phases, device)
    if held == 1 and n > tuned.rows.narrow * WARP * MAX_WARPS and space.phases == 2:
        warps = WIDEST_WARPS
    block = max(warps * WARP * width, power_of_two(-(-n // device.measured.rows.chunks)))
    by_channel = any(map(space.has_x, space.beside))
    if by_channel and n % block and n % (block // 2) == 0:
        block //= 2  # no masks: the gradient of a group norm of 8 x 320 x 32 x 32, float16, took 8.7 us so, else 10.3
    bound, few = None, tuned.rows.narrow * WARP * warps
    if held == 1 and loads > few and warps < MAX_WARPS and is_narrow:
        is_most = loads > tuned.rows.held * WARP * warps
        bound = device.bound(tuned.rows.most_held_resident if is_most else tuned.rows.held_resident)
    elif held == 1 and warps == MAX_WARPS and n <= few:
        bound = device.bound(tuned.rows.narrow_resident)
    return Schedule(Tile(1, min(block, power_of_two(n))), launch=Launch(warps, registers=bound))


def _chain(n: int, held: int, loads: int, width: int, alike: int, device: Device) -> Schedule:
    """Few warps for a row, and several rows, of which each has vectors of its own where they are not ``alike``."""
    tuned = device.measured
    few, wanted = (power_of_two(-(-loads // (each * WARP))) for each in (tuned.rows.short, tuned.chains.held))
    warps = min(max(min(few, tuned.chains.warps), wanted), MAX_WARPS)
    block = min(max(warps * WARP * width, power_of_two(-(-n // device.measured.rows.chunks))), power_of_two(n))
    rows = power_of_two(tuned.chains.rows_held * WARP * warps // (n * held) + 1) // 2 if warps < MAX_WARPS else 1
    most = min(2 if n % block else rows, alike)
    return Schedule(Tile(max(min(rows, most), 1), block), launch=Launch(warps))


def _rows_alike(space: Space) -> int:
    """Rows, a power of two, that read the same vectors wherever their block begins; all where nothing tells them apart.

    Two layer norms in a row with a scale and a shift for each of 8 samples, 8 x 1023 x 5120 of bfloat16, spilled 2584
    bytes in blocks of 4 rows, which two samples share.
    """
    found = power_of_two(space.kept)
    for t in space.beside:
        if space.has_x(t):
            rows = run_below(t, space.x, space)
            found = min(found, rows & -rows)
    return found


def _or_four(warps: int, values: int, phases: int, device: Device) -> int:
    """``warps`` for a row of so many ``values``; four where two would hold many, and where four can for eight."""
    tuned = device.measured.rows
    is_many = warps == 2 and values > 2 * tuned.narrow * WARP
    return 4 if is_many or (warps == 8 and phases > 2 and values <= 4 * tuned.most_held * WARP) else warps


def _pair(space: Space, device: Device) -> Schedule | None:
    """Two rows a program; ``None`` where a thread would hold too much of them, or too many lanes would be masked."""
    tuned = device.measured
    n, inputs = space.reduced, space.streamed
    if (
        not space.is_inner
        or n <= tuned.rows.short * WARP
        or space.phases > tuned.chains.phases
        or len(space.beside) <= tuned.pairs.many * len(inputs)
    ):
        return None
    if space.segment.has_indices or held_values(space, device) != 1:
        return None
    if widest(inputs, n, device) != WIDEST_LOAD:
        return None
    for warps in (4, 8):
        block = warps * WARP * WIDEST_LOAD
        whole = -(-n // block) * block
        if 2 * n <= tuned.rows.paired * WARP * warps and (warps == 4 or tuned.rows.paired_lanes * whole <= n):
            return Schedule(Tile(2, block), launch=Launch(warps))
    return None


def packed_row(space: Space, device: Device) -> Schedule | None:
    """One program for each row, whose registers hold its bits; ``None`` where that does not fit or pay.

    Softmax of 8192 x 32768, bfloat16, took 254 us on an H200 so, held as float32 321; its gradient 371, by a team 502;
    the gradient of a batch norm of 16 x 512 x 28 x 28, float16, 17.1, held as float32 19.6.
    """
    tuned = device.measured.packed
    walked, n = space.streamed, space.reduced
    if (
        space.segment.loads != space.segment.inputs
        or not space.is_inner
        or not walked
        or is_cut_short(walked, space, device)
    ):
        return None  # windows, and a place of its own for each element
    if space.segment.has_indices or any(t.dtype not in UNPACKED for t in walked):
        return None
    width, aligned = vector(walked[0].dtype, n, device), may_align_down(walked[0].dtype, space, device)
    if space.run != n and space.kept <= device.multiprocessors:
        return None  # one program a multiprocessor, which holds it wide
    if aligned:
        width = device.access_bytes // walked[0].dtype.itemsize
        n += width - 1
    size = n * space.element_bytes
    warps = power_of_two(-(-size // (4 * tuned.words * WARP)))
    vectors = space.beside
    odd_bytes = tuned.odd_bytes if len(vectors) < 2 else tuned.odd_weighted_bytes
    if size <= (odd_bytes if aligned else tuned.bytes) or warps > WIDEST_WARPS or width < 4:
        return None
    if warps == WIDEST_WARPS and space.kept < tuned.turns * device.multiprocessors:
        return None
    again = beside_again(space.segment, vectors, space)
    if any(map(space.has_x, vectors)) or again > (warps == WIDEST_WARPS):
        return None
    registers = device.bound(tuned.resident)
    if aligned and size > tuned.bytes and (vectors or warps < WIDEST_WARPS):
        warps, registers = warps // 2, 2 * registers
    return Schedule(
        Tile(1, warps * WARP * width),
        Registers(packed=True),
        access=Access.ALIGN_DOWN if aligned else Access.NATIVE,
        launch=Launch(warps, registers=registers),
    )


def beside_again(segment: Segment, vectors: Sequence[BoundTensor], space: Space) -> int:
    """How many of the ``vectors`` beside a row are read for a reduction, and so before each and after the last."""
    wanted = [e.tensors[0] for e in segment.exprs if isinstance(e.op, Reduce) and not space.has_r(e.output)]
    behind = {t for e in leading_to(segment.exprs, wanted) for t in e.tensors}
    return len([t for t in vectors if t in behind])


def _all_at_once(space: Space, device: Device) -> Schedule | None:
    """A program for each of few rows; ``None`` where they are not few."""
    tuned = device.measured
    n, width = space.reduced, widest(space.streamed, space.reduced, device)
    rows = -(-space.kept // device.multiprocessors)
    if not space.is_inner or rows > tuned.rows.few_turns or rows * n > tuned.rows.few_elements:
        return None
    if space.phases > tuned.chains.phases or space.segment.has_indices:
        return None
    if any(map(space.has_x, space.beside)):
        return None  # a number for each channel: fewer are loaded where each chunk is one channel's
    warps = min(power_of_two(-(-n // (WARP * max(width, tuned.rows.few_each)))), MAX_WARPS)
    return Schedule(Tile(1, min(warps * WARP * width, power_of_two(n))), Registers(eager=True), launch=Launch(warps))


def _several_rows(n: int, width: int, device: Device, *, is_shared: bool) -> Schedule:
    """A warp takes whole rows, so that a reduction crosses no warp: chunks of one warp's load.

    Two warps take a row where that leaves a thread 8 to 16 values and rows share vectors: LayerNorm of 8192 x 1024,
    float16, with 4 of them, took 13.4 us so, 14.5 with a warp for each row; softmax 37.4 and 36.5.
    """
    whole = WARP * width
    if is_shared and 2 * whole < n <= 4 * whole:
        return Schedule(Tile(2, n if n == power_of_two(n) else whole), launch=Launch(4))
    block = min(whole, power_of_two(n))
    while n % block and block * 4 > whole:
        block //= 2
    if n % block or -(-n // block) > device.measured.rows.chunks:
        block = max(min(whole, power_of_two(n)), power_of_two(-(-n // device.measured.rows.chunks)))
    return Schedule(Tile(max(4 * whole // block, 4), block), launch=Launch(4))


def _invariant_row(space: Space, device: Device) -> Schedule | None:
    """A program for each row, whose sums are in one order whatever the number of rows; ``None`` where many rows are so.

    On an under-occupied grid many threads for each row are fastest, else few: this number is no more than a tenth
    behind either.  Times on an H200, as shares of the best for 1, 128 and 8192 rows: LayerNorm of 4096, bfloat16, with
    8 warps 1.10, 1.07 and 1.00, with 4 1.26, 1.22 and 1.01, with 16 1.03, 1.02 and 1.24.
    """
    n, tuned = space.reduced, device.measured.invariant_rows
    if not (space.is_invariant and space.is_inner) or n <= tuned.short or space.phases > tuned.phases:
        return None
    inputs = space.streamed
    width = widest(inputs, n, device)
    warps = min(power_of_two(-(-n // (tuned.each * WARP))), MAX_WARPS)
    lanes = warps * WARP * width
    if warps > tuned.eager_warps and _used(n, lanes) < tuned.used <= _used(n, lanes // 2):
        warps //= 2
    block = min(max(warps * WARP * width, power_of_two(-(-n // device.measured.rows.chunks))), power_of_two(n))
    is_eager = _is_eager(space, inputs, warps, tuned)
    return Schedule(Tile(1, block), Registers(eager=is_eager), launch=Launch(warps))


def _used(n: int, block: int) -> float:
    """The part of the lanes of a row's blocks that have an element."""
    return n / (-(-n // block) * block)


def _is_eager(space: Space, inputs: Sequence[BoundTensor], warps: int, tuned: InvariantRows) -> bool:
    if space.segment.has_indices or any(map(space.has_x, space.beside)):
        return False
    return warps <= tuned.eager_warps or min((t.dtype.itemsize for t in inputs), default=0) >= tuned.wide_bytes


def kernels(segment: Segment, schedule: Schedule, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel.  A team exchanges what belongs together at once."""
    if schedule.group or schedule.is_packed:
        segment = online(segment)
    space = in_columns(analysed(segment), device)
    return (KernelPlan(kernel_name("persistent", segment), segment, space, schedule, device),)
