"""reduction: reductions whose input is not used again, split over programs where the kept elements are too few.

A split gives two kernels.  Before::

    T2 = mul(T0, T1); T3 = sum(T2); T4 = rsqrt(T3)

after, ``split`` being a fresh axis of the partial results::

    T2 = mul(T0, T1); T3_partial[split] = sum(T2)          each program its share of the reduced elements
    T3 = sum(T3_partial); T4 = rsqrt(T3)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from ..device import LEAST_COPY, MAX_THREADS, Device
from ..ir.digits import Digit, Root, extent
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Pointwise
from ..segments.segment import Segment, segment_of
from ..segments.space import stored_atoms
from .features import Features, features, is_costly, reduction_or_refusal
from .limits import MAX_WARPS, WARP, WARPS, WIDEST_LOAD, WIDEST_WARPS, power_of_two, power_of_two_within, vector
from .looped import down_columns, in_loop
from .persistent import in_registers
from .plan import KernelPlan, one_launch
from .resources import summed_registers
from .schedule import Launch, Loop, Schedule, Tile
from .split_k import (
    evenly,
    finish_of,
    finishing,
    fitting,
    in_full_turns,
    in_parts,
    is_for_one,
    split_of,
    storing,
    workspace,
)

_TANH = Pointwise("tanh")


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` is no plain reduction; ``None`` where it is."""
    space = reduction_or_refusal(segment, device)
    if isinstance(space, str):
        return space
    if space.rereads:
        again = next(t for t, phase in space.phase.items() if phase and space.has_r(t))
        return f"{again} needs reduced elements again after a reduction"
    return None


def propose(segment: Segment, device: Device) -> Schedule:
    """In registers where rows are short, else a loop, split until there are two programs a multiprocessor."""
    space, tuned, wanted = features(segment, device), device.measured, device.filling
    if space.is_turned and not space.is_invariant:
        return _turned(space)
    if not space.is_inner:
        return _columns(space)
    schedule = in_loop(space)
    programs = schedule.blocks(space.kept_to_fill)
    turns = -(-space.reduced // schedule.reduced)
    if _is_unrolled(space):
        held = _rows(space)
        if turns < tuned.splits.worth or space.kept >= wanted * held.kept:
            return held
    splits = 1
    while turns >= tuned.splits.worth and splits < tuned.splits.most and programs * splits < wanted:
        if turns < 2 * splits * tuned.splits.turns:
            break
        splits *= 2
    if schedule.kept == 1 and (splits == 1 or turns <= tuned.reductions.few_turns * splits):
        schedule = replace(schedule.sized(reduced=tuned.reductions.loop_block), launch=Launch(MAX_WARPS, 1))
        while 1 < splits < space.reduced / tuned.reductions.loop_block and 2 * splits * programs <= tuned.splits.most:
            splits *= 2
    return in_parts(space, schedule.split_into(splits))


def _turned(space: Features) -> Schedule:
    """Tiles with runs of memory along either side, turned round in shared memory, as of transposes."""
    device, tuned = space.device, space.tuned.reductions
    columns, rows = tuned.turned_tile
    tile = Tile(min(columns, power_of_two(space.kept)), min(rows, power_of_two(space.reduced)))
    accumulated = min(tuned.turned_accumulated, tile.reduced)
    launch = Launch(WARPS, registers=device.bound(tuned.stored_resident))
    schedule = Schedule(tile, Loop(accumulated), launch=launch)
    return evenly(space, schedule, device.multiprocessors * tuned.turned_programs)


def _is_unrolled(space: Features) -> bool:
    """Does no loop walk a row?  Not a long one whose arithmetic takes registers, which would spill."""
    if space.reduced > space.tuned.rows.long and _needs_registers(space):
        return False
    return space.reduced * max(space.element_bytes, 1) <= space.tuned.reductions.unrolled_bytes


def _rows(space: Features) -> Schedule:
    """Rows that need not be held, unrolled: as many threads as have loads enough on their way."""
    tuned = space.tuned.reductions
    inputs, n, width = space.streamed, space.reduced, space.width
    each = max(tuned.row_bytes // max(space.element_bytes, 1), 1)
    most = MAX_WARPS if n <= space.tuned.rows.long else WIDEST_WARPS
    warps = min(power_of_two(-(-2 * n // (3 * each * WARP))), most)
    loads = 1
    if len(inputs) > 1 and warps > 2 * WARPS:
        # fewer registers: the weight gradients of a group norm of 2 x 960 x 96 x 96 took 27 us so, else 36
        warps, loads = warps // 2, 2
    several = power_of_two_within(WARPS * WARP * each // power_of_two(n))
    if several > WARPS or n <= WARP * width:
        return in_registers(space).sized(kept=max(several, 1))
    rows = max(WARPS // warps, 1)
    block = max(WARP * width * max(warps, WARPS) * loads // rows, power_of_two(-(-n // space.tuned.rows.chunks)))
    if loads > 1 and n == 2 * block:
        block = n  # the weight gradients of a group norm of 2 x 640 x 64 x 64: 11.0 us so, in two chunks 12.2
    return Schedule(Tile(rows, min(block, power_of_two(n))), launch=Launch(max(warps, WARPS)))


def _columns(space: Features) -> Schedule:
    """Tiles of columns, split into as many parts as there are programs wanted."""
    device, tuned = space.device, space.tuned.reductions
    inputs, wanted = space.streamed, device.filling
    if (of_samples := _of_samples(space)) is not None:
        return of_samples
    if space.reduced * max(len(inputs), 1) <= tuned.few_rows:
        lanes = min(MAX_THREADS, power_of_two(space.kept))
        while lanes > WARP * WARPS and space.kept < wanted * lanes:
            lanes //= 2
        return Schedule(Tile(lanes, 1), launch=Launch(WARPS))
    is_stored = any(map(space.has_r, space.segment.outputs))
    if _is_short(space) and not (is_stored or _needs_registers(space)):
        return _short_columns(space)
    rows = _unaligned_rows(space)
    is_wide = rows * space.kept >= tuned.wide_enough
    if rows > 1 and is_wide and (wider := side_by_side(space, rows)) is not None:
        space = wider
    elif rows > 1:
        return _narrow_columns(space)
    is_heavy = sum(map(_weight, space.segment.exprs)) > 1
    across = 2 if is_stored and not is_heavy and space.kept < tuned.many_columns else WARPS
    words = summed_registers(space.segment)
    each = tuned.each // words // (2 if is_heavy else 1)
    if is_stored and space.narrowest_load(space.kept) <= LEAST_COPY:
        each //= 2
    schedule = down_columns(space, each, across)
    if is_heavy and is_stored:
        schedule = _with_full_lanes(space, schedule)
    stored_bound = device.bound(tuned.stored_resident)
    if space.is_by_sample and schedule.kept > tuned.tall_lanes:
        schedule = _taller(schedule, tuned.tall_lanes).with_registers(stored_bound)
    elif _are_planes(space, schedule.kept) and schedule.kept > tuned.plane_lanes:
        schedule = _taller(schedule, tuned.plane_lanes)
    if is_stored and words == 1:
        schedule = schedule.with_registers(stored_bound)
    schedule = evenly(space, schedule, wanted * (2 if is_heavy else 1), rows)
    return in_full_turns(space, schedule) if space.is_by_sample else schedule


def _taller(schedule: Schedule, lanes: int) -> Schedule:
    """As many elements, of so many columns."""
    return schedule.sized(kept=lanes, reduced=schedule.reduced * schedule.kept // lanes)


def _with_full_lanes(space: Features, schedule: Schedule) -> Schedule:
    """A narrower tile of as many elements, where idle lanes of the last one compute for nothing."""
    tuned = space.tuned.reductions
    idle = {lanes: -space.kept % lanes for lanes in (schedule.kept, *tuned.full_lanes) if lanes <= schedule.kept}
    if idle[schedule.kept] < tuned.most_idle * space.kept:
        return schedule
    return _taller(schedule, min(idle, key=lambda lanes: (idle[lanes], -lanes)))


def _are_planes(space: Features, lanes: int) -> bool:
    """Would so many columns be of several samples, far apart in memory, of each of which several tensors are summed?"""
    stored = stored_atoms(space.streamed[0], space.pieces) if len(space.streamed) > 1 else ()
    of_a_sample = tuple(takewhile(lambda a: a in space.x, reversed(stored)))
    return 0 < len(of_a_sample) < len(space.x) and any(a in space.r for a in stored) and extent(of_a_sample) < lanes


def _needs_registers(space: Features) -> bool:
    return space.draws or any(map(_weight, space.segment.exprs))


def _weight(expr: Expr) -> int:
    """How many costly functions it comes to.

    With two of them arithmetic is what takes the time: half as much a thread, twice as many programs.  The bias
    gradient of GELU, 32768 x 4096 of bfloat16, took 446 us so on an H200, else 524.

    With tanh as two, the sum over dim 0 of the gradient of GELU by tanh, stored too, 16384 x 8192 of bfloat16, took
    273 us on an H200, as one 668; of tanh's gradient alone 224 and 369.
    """
    return is_costly(expr) * (2 if expr.op == _TANH else 1)


def _narrow_columns(space: Features) -> Schedule:
    """Loads of few bytes: nothing is copied ahead of time, many programs hide the wait."""
    device, tuned = space.device, space.tuned.reductions
    x_block, r_block = tuned.narrow_tile
    r_block //= summed_registers(space.segment) * (2 if any(map(space.has_r, space.segment.outputs)) else 1)
    warps, programs = WARPS, tuned.narrow_programs
    if len(space.x) > 1:
        r_block //= 2  # each element's place is a division
    elif space.kept <= tuned.few_columns:
        warps, programs = 2 * WARPS, tuned.narrow_programs // 2
    schedule = Schedule(
        Tile(min(x_block, power_of_two(space.kept)), min(r_block, power_of_two(space.reduced))),
        Loop(),
        launch=Launch(warps, 1, device.bound(tuned.narrow_resident)),
    )
    return evenly(space, schedule, device.multiprocessors * programs)


def _unaligned_rows(space: Features) -> int:
    """Rows after which one begins as aligned as the first, where a thread's load would be narrow; else 1."""
    rows = 1
    for t in space.streamed:
        width = vector(t.dtype, _run_of(space), space.device)
        if width == 1 or width * t.dtype.itemsize < LEAST_COPY:  # 8192 x 4095, float32: 47 us so, else 196
            rows = max(rows, space.device.access_bytes // t.dtype.itemsize // width)
    return rows


def _run_of(space: Features) -> int:
    """Kept elements side by side in memory."""
    return space.x[-1].extent if space.x else 1


def _is_short(space: Features) -> bool:
    """Does a program read its columns whole?  Longer ones only where they are so few that their tile is the narrowest:
    parts of them would fill the machine, but have to be added up behind a wait for all programs."""
    read, tuned = space.reduced * max(len(space.streamed), 1), space.tuned
    if read <= tuned.columns.short:
        return True
    lanes, _, _ = _short_tile(space)
    is_narrow = space.narrowest_load(_run_of(space)) <= LEAST_COPY
    if is_narrow or lanes > _least_lanes(space) or space.width > WIDEST_LOAD:
        return False
    reductions = sum(map(space.reduces, space.segment.exprs))  # of all that is unrolled each takes registers
    return read * reductions * summed_registers(space.segment) <= tuned.reductions.longest_whole


def _short_columns(space: Features) -> Schedule:
    """Columns that are reduced in one go: a warp for those of wide loads, and for fewer of them more threads, where
    multiprocessors would idle otherwise; all threads side by side for narrow loads."""
    tuned = space.tuned.reductions
    if space.narrowest_load(_run_of(space)) <= LEAST_COPY:
        x_block, r_block = tuned.narrow_short_tile
        while x_block > tuned.least_lanes and space.kept < x_block * space.device.filling:
            x_block, r_block = x_block // 2, r_block * 2
        return Schedule(Tile(min(x_block, power_of_two(space.kept)), r_block), launch=Launch(WARPS))
    lanes, rows, warps = _short_tile(space)
    return Schedule(
        Tile(min(lanes, power_of_two(space.kept)), min(rows, power_of_two(space.reduced))), launch=Launch(warps)
    )


def _short_tile(space: Features) -> tuple[int, int, int]:
    """Columns and rows of a tile of wide loads, and warps."""
    tuned = space.tuned.reductions
    lanes, rows, warps = tuned.short_lanes * _width(space), tuned.short_rows, 1
    while lanes > _least_lanes(space) and space.kept < lanes * space.device.filling:
        lanes, rows, warps = lanes // 2, rows * 2, WARPS
    return lanes, rows, warps


def _least_lanes(space: Features) -> int:
    """Columns of the narrowest tile."""
    return space.tuned.reductions.least_short_lanes * _width(space)


def _width(space: Features) -> int:
    """Elements of a wide load: of a byte no more than of two, as each takes a register once it is added up."""
    return min(space.width, WIDEST_LOAD)


def _of_samples(space: Features) -> Schedule | None:
    """Columns that are the samples of a batch whose number may change no bits, side by side: how long a row of them is
    says how wide loads are, and that which threads add up what.  Each thread adds up columns of its own, row by row.

    Of a batch that is promised nothing, as many as a thread loads at once, where that leaves programs enough.
    """
    if not (space.is_invariant and space.x):
        return None
    lanes = WARP * WARPS * (1 if "batch" in space.promised else _width(space))
    while lanes > WARP * WARPS and extent(space.x) < lanes * space.device.filling:
        lanes //= 2
    return Schedule(Tile(lanes, 1), Loop(), launch=Launch(WARPS))


def side_by_side(space: Features, rows: int) -> Features | None:
    """``space`` with ``rows`` reduced rows as one, kept for the time being; ``None`` where that is not possible.

    ``r = (i), x = (j)`` becomes ``r = (i // rows), x = (i % rows, j)``.
    """
    if len(space.r) != 1 or space.inside:
        return None
    (row,) = space.r
    whole = row.weight * row.extent
    if not isinstance(row.base, Root) or row.base.extent % whole or row.extent % rows or row.extent < 2 * rows:
        return None
    parts = Digit(row.base, row.weight * rows, row.extent // rows), Digit(row.base, row.weight, rows)
    stored = stored_atoms(next(t for t in space.streamed), space.pieces)
    outside = stored[: stored.index(row)]
    x = (*(a for a in space.x if a in outside), parts[1], *(a for a in space.x if a not in outside))
    atoms = {t: own - {row} | frozenset(parts) if row in own else own for t, own in space.atoms.items()}
    pieces = {d: tuple(p for a in cut for p in (parts if a == row else (a,))) for d, cut in space.pieces.items()}
    return replace(space, x=x, r=parts[:1], atoms=atoms, pieces=pieces)


def kernels(segment: Segment, schedule: Schedule, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel, or two joined by workspaces: the second reads what the first stores."""
    space = features(segment, device)
    if schedule.split is None:
        return (KernelPlan.of("reduction", space, schedule),)
    if schedule.split.side_by_side > 1:
        wider = side_by_side(space, schedule.split.side_by_side)
        assert wider is not None, space
        space = wider
    split = split_of(schedule.parts, space.r)
    axes = ((split,), *((a,) for a in space.x))
    partials = {e: workspace(e, axes) for e in segment.exprs if space.reduces(e)}
    first = storing(space, [t for t in segment.outputs if space.has_r(t)], partials, split)
    second = _second(space, partials)
    second_space = features(second, device)
    finish = finishing(second_space)
    shares = schedule.is_one_launch and is_for_one(schedule, device)
    if shares:
        finish = finish.sized(kept=min(2 * finish.kept, schedule.kept))
    if schedule.is_one_launch and not second_space.is_inner:
        finish = fitting(finish, schedule, summed_registers(second))
    plans = (
        KernelPlan.of("reduction", first, schedule, split),
        KernelPlan.of("finish", second_space, finish),
    )
    if not schedule.is_one_launch or (shares and second_space.x != space.x):
        return plans
    return (one_launch("reduction", segment, plans, shares=shares),)


def _second(space: Features, partials: dict[Expr, BoundTensor]) -> Segment:
    """The reductions of the partial results, and all that follows."""
    kept = [t for t in space.segment.outputs if not space.has_r(t)]
    gone = (0, *(k for k, a in enumerate(space.x, 1) if all(a not in space.atoms[e.output] for e in partials)))
    finished = {e.output: finish_of(e, w, gone) for e, w in partials.items()}
    cut = [finished.get(e.output, e) for e in space.segment.exprs]
    return segment_of(cut, kept)
