"""persistent: reductions whose input is used again, read once and held in registers.

Inner reductions hold rows: a warp, or a program of up to 16 warps, for each, in unrolled chunks.  Outer ones hold short
columns, as tiles ``[r, x]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..device import LINE_BYTES, MAX_THREADS, Device
from ..ir.digits import extent
from ..segments.segment import Segment
from .features import Features, features, features_or_refusal, reduction_or_refusal
from .lagged_group import lagged_group
from .limits import (
    MAX_WARPS,
    REGISTER_BYTES,
    TWO_IN_A_WORD,
    WARP,
    WARPS,
    WIDEST_LOAD,
    WIDEST_WARPS,
    power_of_two,
    power_of_two_within,
    vector,
)
from .plan import KernelPlan
from .row_groups import columns_held_by_group, held_by_group, paired_group, why_not_held
from .schedule import Access, Launch, Registers, Schedule, ScheduleError, Tile


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` is not persistent; ``None`` where it is."""
    space = features_or_refusal(segment, device)
    if not isinstance(space, str) and space.block:
        return _why_no_blocks(space)
    if not isinstance(space, str) and space.adds_in_pairs:
        return too_long(space) if space.rereads else None  # the sum alone takes each element as it comes
    space = reduction_or_refusal(segment, device)
    if isinstance(space, str):
        return space
    if not space.rereads:
        return "nothing is read again after the reduction"
    if space.reduced > space.tuned.rows.long and space.takes_one_walk:
        return "running statistics take one walk over its long rows, which need not be held"
    space = space.in_columns
    if space.grouped:
        return why_not_held(space)
    refusal = too_long(space)
    return refusal and why_not_held(space)


def _why_no_blocks(space: Features) -> str | None:
    """Why neither a program nor a group holds rows whose blocks are reduced.

    A group only where elements are needed again; and each block has to be one warp's, for members have parts of a row.
    """
    if not space.holds_elements and not any(map(space.reduces_rows, space.segment.exprs)):
        return "nothing of a row but what its blocks are reduced to is read again"
    refusal = None if packed_row(space) else too_long(space)
    if refusal is None or not space.holds_elements:
        return refusal
    if space.block_size > WARP * space.width:
        return f"blocks of {space.block_size} elements are more than a warp of a group loads at once"
    return why_not_held(space)


def too_long(space: Features) -> str | None:
    """Why the registers of one program do not hold the reduced elements."""
    if not space.is_inner:
        held, longest = max(len(space.streamed), 1), space.tuned.columns.longest
        if space.reduced * held > longest:
            return f"a column of {held} x {space.reduced} elements is longer than {longest}"
        return None
    if space.row_bytes > space.device.row_bytes:
        most = space.device.row_bytes
        return f"a row of {space.reduced} elements is {space.row_bytes} bytes of input, more than {most}"
    return None


def propose(segment: Segment, device: Device) -> Schedule:
    """Registers decide: how many warps share a row, or how many rows share a program."""
    return next(ways(segment, device))


def ways(segment: Segment, device: Device) -> Iterator[Schedule]:
    """Of each form that holds the segment the schedule that is best, in the order of preference."""
    space = features(segment, device).in_columns
    return (in_whole_blocks(s, space) for s in _forms(space) if s)


def in_whole_blocks(schedule: Schedule, space: Features) -> Schedule:
    """``schedule`` with chunks of a row that are not shorter than the blocks which are reduced by themselves."""
    return schedule if schedule.reduced >= space.block_size else schedule.sized(reduced=space.block_size)


def _forms(space: Features) -> Iterator[Schedule | None]:
    if space.grouped:
        yield columns_held_by_group(space)
        return
    if space.adds_in_pairs:
        if not space.is_inner or too_long(space) is not None:
            yield _in_one_piece(space)
            return
        packed, held = _packed_in_pairs(space), by_one_program(space)
        yield packed and in_branches(packed, space)
        yield in_branches(held, space) if held.kept == 1 else _in_one_piece(space)
        return
    yield packed_row(space)
    yield None if space.block else paired_group(space.joined)
    if too_long(space) is not None:
        yield None if space.sums_slow_blocks else lagged_group(space.joined, are_few_held=space.are_few_held)
        yield held_by_group(space)
        return
    yield _invariant_row(space)
    yield _all_at_once(space)
    yield _pair(space)
    yield in_registers(space)


def by_one_program(space: Features) -> Schedule:
    """Rows that registers of one program hold, one by one or several."""
    return _all_at_once(space) or in_registers(space)


def _in_one_piece(space: Features) -> Schedule:
    """Rows, or columns, in chunks of all the lanes that a part of their runs takes.

    Rows that one warp or two add up are held by programs of four warps, as long as those are as many as
    multiprocessors: a multiprocessor has no more than 32 programs at a time.  8192 rows of 768 elements, bfloat16, took
    1.32 x (RMSNorm) and 1.24 x (LayerNorm) their time without a promise with a program for each row, of one warp; 2048
    of them 1.42 and 1.35 x, and with two warps 1.27 and 1.12 x.
    Columns are lines of memory at the least, more where multiprocessors have them all the same; unless they are so long
    that shared memory, through which threads add them up, would not hold them.
    """
    n, each, device = space.row_lanes, space.tuned.invariant_rows.each, space.device
    held = n * space.row_parts
    if space.is_inner:
        warps = power_of_two_within(max(held // (each * WARP), 1))
        if 2 * space.kept * warps <= device.multiprocessors * device.warps:  # half of the machine would idle
            warps *= 2
        row = in_branches(Schedule(Tile(1, n), launch=Launch(min(warps, WIDEST_WARPS))), space)
        return _side_by_side(row, space)
    most = power_of_two_within(device.shared_bytes // REGISTER_BYTES) // n
    line = max(min(LINE_BYTES // space.narrowest, most), 1)
    shared_out = power_of_two_within(max(space.kept // device.multiprocessors, 1))
    kept = max(min(power_of_two_within(max(each * WARP * WARPS // held, 1)), shared_out), line)
    warps = power_of_two_within(max(kept * n // (each * WARP), WARPS))
    return Schedule(Tile(kept, n), launch=Launch(min(warps, WIDEST_WARPS)))


def _side_by_side(row: Schedule, space: Features) -> Schedule:
    """Rows like ``row``, of one chunk, so many that each of four warps has one, and a thread one load of the widest of
    each part; fewer where multiprocessors would have none.

    Lanes of padded runs load element by element.  Long rows of them are faster alone, the more so the more elements a
    lane has: RMSNorm of 8192 x 1000 took 12.5 us by one warp a row, 14.8 by two, 17.8 by one with four rows in a
    program; 7.5 without a promise.
    """
    warps = row.launch.warps
    if space.is_padded and row.reduced > space.tuned.invariant_rows.each * WARP:
        return replace(row, launch=Launch(max(warps // 2, 1))) if warps < WARPS else row
    if warps >= WARPS or row.reduced != space.row_lanes:
        return row
    kept = max(WARPS, power_of_two_within(max(WARPS * WARP * space.width // row.reduced, 1)))
    kept = min(kept, power_of_two_within(max(space.kept // space.device.multiprocessors, 1)))
    return row if kept == 1 else replace(row.sized(kept=kept), launch=Launch(WARPS))


def in_branches(schedule: Schedule, space: Features) -> Schedule:
    """``schedule`` with chunks that are branches, and lanes of half a wide load for each thread."""
    warps = min(schedule.launch.warps, max(2 * space.row_lanes // (WARP * max(space.width, 2)), 1))
    found = schedule.sized(reduced=space.as_branch(schedule.reduced))
    return replace(found, launch=replace(schedule.launch, warps=warps))


def in_registers(space: Features) -> Schedule:
    """Blocks with all reduced elements unrolled."""
    if not space.is_inner:
        return _columns(space)
    device, tuned, n = space.device, space.tuned, space.reduced
    held = max(space.held, tuned.rows.drawn if space.draws else 1)
    if n * held <= tuned.rows.short * WARP:
        return _several_rows(space)
    loads = (
        n * held if space.width > 1 else 2 * n * held
    )  # an element each: more threads have more of them on their way
    if space.is_chain:
        return _chain(space, held, loads)
    warps = min(power_of_two(-(-loads // (tuned.rows.held * WARP))), MAX_WARPS)
    if held == 1 and space.is_narrow:
        warps = _or_four(warps, loads, space)
    if held == 1 and n > tuned.rows.narrow * WARP * MAX_WARPS and space.phases == 2:
        warps = WIDEST_WARPS
    block = _row_chunk(space, warps)
    if space.is_by_sample and n % block and n % (block // 2) == 0:
        block //= 2  # no masks: the gradient of a group norm of 8 x 320 x 32 x 32, float16, took 8.7 us so, else 10.3
    bound, few = None, tuned.rows.narrow * WARP * warps
    if held == 1 and loads > few and warps < MAX_WARPS and space.is_narrow:
        is_most = loads > tuned.rows.held * WARP * warps
        bound = device.bound(tuned.rows.most_held_resident if is_most else tuned.rows.held_resident)
    elif held == 1 and warps == MAX_WARPS and n <= few:
        bound = device.bound(tuned.rows.narrow_resident)
    return Schedule(Tile(1, min(block, power_of_two(n))), launch=Launch(warps, registers=bound))


def _columns(space: Features) -> Schedule:
    """Short columns: by a thread each, or as tiles ``[r, x]``."""
    tuned = space.tuned.columns
    held, r_block, kept = max(space.held, 1), power_of_two(space.reduced), power_of_two(space.kept)
    if space.reduced * held <= tuned.rows:
        return Schedule(Tile(min(MAX_THREADS, kept), 1))
    if r_block <= tuned.short:
        return Schedule(Tile(power_of_two_within(min(max(tuned.tile // (r_block * held), 16), 256)), r_block))
    warps = 4 if r_block <= tuned.longest // 2 else 8
    fits = power_of_two_within(tuned.tall_tile // (space.reduced * held))
    columns = power_of_two_within(max(min(fits, tuned.tall_lanes * warps * WARP // (r_block * held)), 16))
    return Schedule(Tile(min(columns, kept), r_block), launch=Launch(warps))


def _row_chunk(space: Features, warps: int) -> int:
    """Elements of a chunk of a row: a load of every thread, more where that would be too many chunks."""
    return max(warps * WARP * space.width, power_of_two(-(-space.reduced // space.tuned.rows.chunks)))


def _chain(space: Features, held: int, loads: int) -> Schedule:
    """Few warps for a row, and several rows, of which each has vectors of its own where they are not alike."""
    tuned, n = space.tuned, space.reduced
    few, wanted = (power_of_two(-(-loads // (each * WARP))) for each in (tuned.rows.short, tuned.chains.held))
    warps = min(max(min(few, tuned.chains.warps), wanted), MAX_WARPS)
    block = min(_row_chunk(space, warps), power_of_two(n))
    rows = power_of_two_within(tuned.chains.rows_held * WARP * warps // (n * held)) if warps < MAX_WARPS else 1
    most = min(2 if n % block else rows, space.rows_alike)
    return Schedule(Tile(max(min(rows, most), 1), block), launch=Launch(warps))


def _or_four(warps: int, values: int, space: Features) -> int:
    """``warps`` for a row of so many ``values``; four where two would hold many, and where four can for eight."""
    tuned = space.tuned.rows
    is_many = warps == 2 and values > 2 * tuned.narrow * WARP
    return 4 if is_many or (warps == 8 and space.phases > 2 and values <= 4 * tuned.most_held * WARP) else warps


def _pair(space: Features) -> Schedule | None:
    """Two rows a program; ``None`` where a thread would hold too much of them, or too many lanes would be masked."""
    tuned, n = space.tuned, space.reduced
    is_long = space.is_inner and n > tuned.rows.short * WARP and not space.is_chain
    if not is_long or len(space.beside) <= tuned.pairs.many * len(space.streamed):
        return None
    if space.segment.has_indices or space.held != 1 or space.width != WIDEST_LOAD:
        return None
    for warps in (4, 8):
        block = warps * WARP * WIDEST_LOAD
        whole = -(-n // block) * block
        if 2 * n <= tuned.rows.paired * WARP * warps and (warps == 4 or tuned.rows.paired_lanes * whole <= n):
            return Schedule(Tile(2, block), launch=Launch(warps))
    return None


def packed_row(space: Features) -> Schedule | None:
    """One program for each row, whose registers hold its bits; ``None`` where that does not fit or pay.

    Softmax of 8192 x 32768, bfloat16, took 254 us on an H200 so, held as float32 321; its gradient 371, by a group 502;
    the gradient of a batch norm of 16 x 512 x 28 x 28, float16, 17.1, held as float32 19.6.
    """
    device, tuned = space.device, space.tuned.packed
    walked, n, vectors = space.streamed, space.reduced, space.beside
    if space.has_windows or not space.is_inner or not walked or space.is_cut_short:
        return None  # windows, and a place of its own for each element
    if space.segment.has_indices or any(t.dtype not in TWO_IN_A_WORD for t in walked):
        return None
    if space.run != n and space.kept <= device.multiprocessors:
        return None  # one program a multiprocessor, which holds it wide
    width, aligned = vector(walked[0].dtype, n, device), space.may_align_down()
    if aligned:
        width = device.access_bytes // walked[0].dtype.itemsize
        n += width - 1
    size = n * space.element_bytes
    warps = power_of_two(-(-size // (4 * tuned.words * WARP)))
    odd_bytes = tuned.odd_bytes if len(vectors) < 2 else tuned.odd_weighted_bytes
    if size <= (odd_bytes if aligned else tuned.bytes) or warps > WIDEST_WARPS or width < 4:
        return None
    if warps == WIDEST_WARPS and space.kept < tuned.turns * device.multiprocessors:
        return None
    if warps == WIDEST_WARPS and space.is_invariant and not vectors:
        return None  # softmax of 1 x 65536 took 11.0 us on an H200, by a group 6.7
    if space.is_by_sample or space.beside_again > (warps == WIDEST_WARPS):
        return None
    if space.evaluates and space.held * REGISTER_BYTES <= space.element_bytes and too_long(space) is None:
        return None  # each phase would evaluate it again, and the bits take the registers that its results do
    registers = device.bound(tuned.resident)
    if aligned and size > tuned.bytes and (vectors or warps < WIDEST_WARPS):
        warps, registers = warps // 2, 2 * registers
    return Schedule(
        Tile(1, warps * WARP * width),
        Registers(packed=True),
        access=Access.ALIGN_DOWN if aligned else Access.NATIVE,
        launch=Launch(warps, registers=registers),
    )


def _packed_in_pairs(space: Features) -> Schedule | None:
    """A packed row as without a promise where it has two chunks for each part, else with twice the warps.

    Registers hold the sums of all chunks too until lanes have added them, which of a single chunk spills
    (``sum_in_pairs``), and of two does not (``sum_both_in_pairs``).  Softmax of 2048 rows of 16384, bfloat16, took 34.0
    us so on an H200, 33.8 without a promise, with twice the warps 36.5; its gradient of 8192 rows of 8192, one chunk
    for each part, 110 with as many warps and 80 bytes spilled, 94 without a promise and with twice the warps.
    """
    found = packed_row(space)
    if found is None or 2 * space.as_branch(found.reduced) == space.row_lanes:
        return found
    if found.launch.warps == WIDEST_WARPS:
        return None
    return replace(found.sized(reduced=2 * found.reduced), launch=Launch(2 * found.launch.warps))


def _all_at_once(space: Features) -> Schedule | None:
    """A program for each of few rows; ``None`` where they are not few."""
    tuned, n = space.tuned.rows, space.reduced
    rows = -(-space.kept // space.device.multiprocessors)
    if not space.is_inner or rows > tuned.few_turns or rows * n > tuned.few_elements:
        return None
    if space.is_chain or space.segment.has_indices or space.is_by_sample:
        return None  # of a number for each channel fewer are loaded where each chunk is one channel's
    warps = min(power_of_two(-(-n // (WARP * max(space.width, tuned.few_each)))), MAX_WARPS)
    block = min(warps * WARP * space.width, power_of_two(n))
    return Schedule(Tile(1, block), Registers(eager=True), launch=Launch(warps))


def _several_rows(space: Features) -> Schedule:
    """A warp takes whole rows, so that a reduction crosses no warp: chunks of one warp's load.

    Two warps take a row where that leaves a thread 8 to 16 values and rows share vectors: LayerNorm of 8192 x 1024,
    float16, with 4 of them, took 13.4 us so, 14.5 with a warp for each row; softmax 37.4 and 36.5.
    """
    n, whole = space.reduced, WARP * space.width
    if space.beside and 2 * whole < n <= 4 * whole:
        return Schedule(Tile(2, n if n == power_of_two(n) else whole), launch=Launch(4))
    block = min(whole, power_of_two(n))
    while n % block and block * 4 > whole:
        block //= 2
    if n % block or -(-n // block) > space.tuned.rows.chunks:
        least = power_of_two(-(-n // space.tuned.rows.chunks))
        block = max(min(whole, power_of_two(n)), least)
    return Schedule(Tile(max(4 * whole // block, 4), block), launch=Launch(4))


def _invariant_row(space: Features) -> Schedule | None:
    """A program for each row, whose sums are in one order whatever the number of rows; ``None`` where many rows are so.

    On an under-occupied grid many threads for each row are fastest, else few: this number is no more than a tenth
    behind either.  Times on an H200, as shares of the best for 1, 128 and 8192 rows: LayerNorm of 4096, bfloat16, with
    8 warps 1.10, 1.07 and 1.00, with 4 1.26, 1.22 and 1.01, with 16 1.03, 1.02 and 1.24.  What comes first of loads and
    sums changes no sum: all loads, where the programs of all rows are on the machine at once.
    """
    n, tuned = space.reduced, space.tuned.invariant_rows
    if not (space.is_invariant and space.is_inner) or n <= tuned.short or space.phases > tuned.phases:
        return None
    warps = min(power_of_two(-(-n // (tuned.each * WARP))), MAX_WARPS)
    while warps > 1 and _used(space, warps // 2) - _used(space, warps) >= tuned.spared:
        warps //= 2
    block = min(_row_chunk(space, warps), power_of_two(n))
    is_alike = not (space.segment.has_indices or space.is_by_sample)
    # Of one warp no more programs than this run on a multiprocessor, however many rows there are.
    is_at_once = warps == 1 or extent(space.x) * warps <= tuned.resident * space.device.multiprocessors
    return Schedule(Tile(1, block), Registers(eager=is_alike and is_at_once), launch=Launch(warps))


def _used(space: Features, warps: int) -> float:
    """The part of the lanes of a row's loads that have an element."""
    n, load = space.reduced, warps * WARP * space.width
    return n / (-(-n // load) * load)


def kernels(segment: Segment, schedule: Schedule, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel.  A group exchanges what belongs together at once.

    Of rows of which only a softmax's statistics are wanted no exponential is needed again, and no index is compared.
    """
    space = features(segment, device)
    if space.adds_in_pairs:
        _check_pairs(space, schedule)
    if schedule.group or schedule.is_packed or (space.takes_one_walk and not space.joined.is_variance):
        space = space.joined
    return (KernelPlan.of("persistent", space.in_columns, schedule),)


def _check_pairs(space: Features, schedule: Schedule) -> None:
    """Raise ScheduleError where a program would not have the branches of the tree that sums in pairs are."""
    is_branch = schedule.reduced == space.as_branch(schedule.reduced)
    is_cut = space.is_inner and schedule.kept > 1 and schedule.reduced != space.row_lanes
    is_shared = schedule.members or schedule.parts > 1
    if is_shared or is_cut or schedule.is_aligned_down or not schedule.is_held or not is_branch:
        raise ScheduleError(f"{schedule}: sums in pairs are of a row of {space.row_lanes} lanes that one program holds")
