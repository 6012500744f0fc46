"""reduction: reductions whose input is not used again, split over programs where the kept elements are too few.

A split gives two kernels.  Before::

    T2 = mul(T0, T1); T3 = sum(T2); T4 = rsqrt(T3)

after, ``split`` being a fresh axis of the partial results::

    T2 = mul(T0, T1); T3_partial[split] = sum(T2)          each program its share of the reduced elements
    T3 = sum(T3_partial); T4 = rsqrt(T3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..device import LEAST_COPY, MAX_THREADS, Device
from ..ir.digits import Digit, Root
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Pointwise, Random
from ..ops.table import POINTWISE
from ..segments.segment import Segment, segment_of
from ..segments.space import Space, analyse_reduction, analysed, stored_atoms
from .limits import MAX_WARPS, WARP, WARPS, WIDEST_WARPS, power_of_two, vector, widest
from .looped import down_columns, in_loop
from .persistent import in_registers, too_long
from .plan import KernelPlan, kernel_name, one_launch
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
    storing,
    with_partials,
    workspace,
)

_TANH = Pointwise("tanh")
_HEAVY = (*map(Pointwise, ("exp", "erf", "erfc", "log", "pow", "sin", "cos", "lgamma")), _TANH)
"""Two of them, and arithmetic is what takes the time: half as much a thread, twice as many programs.  The bias gradient
of GELU, 32768 x 4096 of bfloat16, took 446 us so on an H200, else 524."""


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` is no plain reduction; ``None`` where it is."""
    space = analyse_reduction(segment)
    if isinstance(space, str):
        return space
    if space.rereads:
        again = next(t for t, phase in space.phase.items() if phase and space.has_r(t))
        return f"{again} needs reduced elements again after a reduction"
    return None


def propose(segment: Segment, device: Device) -> Schedule:
    """In registers where rows are short, else a loop, split until there are two programs a multiprocessor."""
    tuned = device.measured
    space = analysed(segment)
    if not (space.is_inner or space.grouped):
        return _columns(space, device)
    wanted = device.filling
    schedule = in_loop(space, device)
    programs = -(-space.kept // schedule.kept)
    turns = -(-space.reduced // schedule.reduced)
    if _is_unrolled(space, device):
        held = _rows(space, device)
        if turns < tuned.splits.worth or space.kept >= wanted * held.kept:
            return held
    splits = 1
    while turns >= tuned.splits.worth and splits < tuned.splits.most and programs * splits < wanted:
        if turns < 2 * splits * tuned.splits.turns:
            break
        splits *= 2
    if space.is_inner and schedule.kept == 1 and (splits == 1 or turns <= tuned.reductions.few_turns * splits):
        schedule = replace(schedule.sized(reduced=tuned.reductions.loop_block), launch=Launch(MAX_WARPS, 1))
        while 1 < splits < space.reduced / tuned.reductions.loop_block and 2 * splits * programs <= tuned.splits.most:
            splits *= 2
    return in_parts(space, schedule.split_into(splits), device)


def _is_unrolled(space: Space, device: Device) -> bool:
    """Does no loop walk what is reduced?  Not long rows whose arithmetic takes registers, which would spill."""
    tuned = device.measured.reductions
    if space.reduced > device.measured.rows.long and _needs_registers(space.segment):
        return False
    if space.is_inner:
        return space.reduced * max(space.element_bytes, 1) <= tuned.unrolled_bytes
    return space.reduced <= device.measured.rows.long and too_long(space, device) is None


def _rows(space: Space, device: Device) -> Schedule:
    """Rows that need not be held, unrolled: as many threads as have loads enough on their way."""
    tuned = device.measured.reductions
    if not space.is_inner:
        return in_registers(space, device)
    inputs, n = space.streamed, space.reduced
    width = widest(inputs, n, device)
    each = max(tuned.row_bytes // max(space.element_bytes, 1), 1)
    most = MAX_WARPS if n <= device.measured.rows.long else WIDEST_WARPS
    warps = min(power_of_two(-(-2 * n // (3 * each * WARP))), most)
    loads = 1
    if len(inputs) > 1 and warps > 2 * WARPS:
        # fewer registers: the weight gradients of a group norm of 2 x 960 x 96 x 96 took 27 us so, else 36
        warps, loads = warps // 2, 2
    several = power_of_two(WARPS * WARP * each // power_of_two(n) + 1) // 2
    if several > WARPS or n <= WARP * width:
        return in_registers(space, device).sized(kept=max(several, 1))
    rows = max(WARPS // warps, 1)
    block = max(WARP * width * max(warps, WARPS) * loads // rows, power_of_two(-(-n // device.measured.rows.chunks)))
    if loads > 1 and n == 2 * block:
        block = n  # the weight gradients of a group norm of 2 x 640 x 64 x 64: 11.0 us so, in two chunks 12.2
    return Schedule(Tile(rows, min(block, power_of_two(n))), launch=Launch(max(warps, WARPS)))


def _columns(space: Space, device: Device) -> Schedule:
    """Tiles of columns, split into as many parts as there are programs wanted."""
    tuned = device.measured.reductions
    inputs = space.streamed
    wanted = device.filling
    if space.reduced * max(len(inputs), 1) <= tuned.few_rows:
        lanes = min(MAX_THREADS, power_of_two(space.kept))
        while lanes > WARP * WARPS and space.kept < wanted * lanes:
            lanes //= 2
        return Schedule(Tile(lanes, 1), launch=Launch(WARPS))
    is_stored = any(map(space.has_r, space.segment.outputs))
    is_short = space.reduced * max(len(inputs), 1) <= device.measured.columns.short
    if is_short and not (is_stored or _needs_registers(space.segment)):
        return _short_columns(inputs, space, device)
    rows = _unaligned_rows(space, device)
    is_wide = rows * space.kept >= tuned.wide_enough
    if rows > 1 and is_wide and (wider := side_by_side(space, rows)) is not None:
        space = wider
    elif rows > 1:
        return _narrow_columns(space, device)
    is_heavy = sum(map(_weight, space.segment.exprs)) > 1
    across = 2 if is_stored and not is_heavy and space.kept < tuned.many_columns else WARPS
    words = summed_registers(space.segment)
    each = tuned.each // words // (2 if is_heavy else 1)
    if is_stored and any(vector(t.dtype, space.kept, device) * t.dtype.itemsize <= LEAST_COPY for t in inputs):
        each //= 2
    schedule = down_columns(inputs, space, device, each, across)
    by_sample = any(map(space.has_x, space.beside))
    if by_sample and schedule.kept > tuned.tall_lanes:
        height = schedule.reduced * schedule.kept // tuned.tall_lanes
        schedule = schedule.sized(kept=tuned.tall_lanes, reduced=height).with_registers(
            device.bound(tuned.stored_resident)
        )
    if is_stored and words == 1:
        schedule = schedule.with_registers(device.bound(tuned.stored_resident))
    schedule = evenly(space, schedule, device, wanted * (2 if is_heavy else 1), rows)
    return in_full_turns(space, schedule, device) if by_sample else schedule


def _needs_registers(segment: Segment) -> bool:
    return any(_weight(e) or isinstance(e.op, Random) for e in segment.exprs)


def _weight(expr: Expr) -> int:
    """How many heavy functions it comes to.

    With tanh as two, the sum over dim 0 of the gradient of GELU by tanh, stored too, 16384 x 8192 of bfloat16, took
    273 us on an H200, as one 668; of tanh's gradient alone 224 and 369.
    """
    if expr.op not in _HEAVY or POINTWISE[expr.op.name].by_its_number(expr.inputs) is not None:
        return 0
    return 2 if expr.op == _TANH else 1


def _narrow_columns(space: Space, device: Device) -> Schedule:
    """Loads of few bytes: nothing is copied ahead of time, many programs hide the wait."""
    tuned = device.measured.reductions
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
    return evenly(space, schedule, device, device.multiprocessors * programs)


def _unaligned_rows(space: Space, device: Device) -> int:
    """Rows after which one begins as aligned as the first, where a thread's load would be narrow; else 1."""
    rows = 1
    for t in space.streamed:
        width = vector(t.dtype, _run_of(space), device)
        if width == 1 or width * t.dtype.itemsize < LEAST_COPY:  # 8192 x 4095, float32: 47 us so, else 196
            rows = max(rows, device.access_bytes // t.dtype.itemsize // width)
    return rows


def _run_of(space: Space) -> int:
    """Kept elements side by side in memory."""
    return space.x[-1].extent if space.x else 1


def _short_columns(inputs: Sequence[BoundTensor], space: Space, device: Device) -> Schedule:
    """Columns that are reduced in one go: a warp for those of wide loads; else all threads side by side."""
    tuned = device.measured.reductions
    if any(vector(t.dtype, _run_of(space), device) * t.dtype.itemsize <= LEAST_COPY for t in inputs):
        x_block, r_block = tuned.narrow_short_tile
        while x_block > tuned.least_lanes and space.kept < x_block * device.filling:
            x_block, r_block = x_block // 2, r_block * 2
        return Schedule(Tile(min(x_block, power_of_two(space.kept)), r_block), launch=Launch(WARPS))
    width = widest(inputs, space.kept, device)
    return Schedule(Tile(min(tuned.short_lanes * width, power_of_two(space.kept)), tuned.short_rows), launch=Launch(1))


def side_by_side(space: Space, rows: int) -> Space | None:
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
    space = analysed(segment)
    if schedule.split is None:
        return (KernelPlan(kernel_name("reduction", segment), segment, space, schedule, device),)
    if schedule.split.side_by_side > 1:
        wider = side_by_side(space, schedule.split.side_by_side)
        assert wider is not None, space
        space = wider
    split = Digit(Root("split", schedule.parts), 1, schedule.parts)
    axes = ((split,), *((a,) for a in space.x))
    partials = {e: workspace(e, axes) for e in segment.exprs if space.reduces(e)}
    first = storing(segment.exprs, [t for t in segment.outputs if space.has_r(t)], partials)
    second = _second(space, partials)
    second_space = analysed(second)
    finish = finishing(second_space, device)
    shares = schedule.is_one_launch and is_for_one(schedule, device)
    if shares:
        finish = finish.sized(kept=min(2 * finish.kept, schedule.kept))
    if schedule.is_one_launch and not second_space.is_inner:
        finish = fitting(finish, schedule, summed_registers(second))
    plans = (
        KernelPlan(
            kernel_name("reduction", first),
            first,
            with_partials(first, space, partials, split),
            schedule,
            device,
            split,
        ),
        KernelPlan(kernel_name("finish", second), second, second_space, finish, device),
    )
    if not schedule.is_one_launch or (shares and second_space.x != space.x):
        return plans
    return (one_launch("reduction", segment, plans, shares=shares),)


def _second(space: Space, partials: dict[Expr, BoundTensor]) -> Segment:
    """The reductions of the partial results, and all that follows."""
    kept = [t for t in space.segment.outputs if not space.has_r(t)]
    gone = (0, *(k for k, a in enumerate(space.x, 1) if all(a not in space.atoms[e.output] for e in partials)))
    finished = {e.output: finish_of(e, w, gone) for e, w in partials.items()}
    cut = [finished.get(e.output, e) for e in space.segment.exprs]
    return segment_of(cut, kept)
