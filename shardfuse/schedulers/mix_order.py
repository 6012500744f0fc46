"""mix_order: sums along rows that an epilogue needs, with sums down columns of the same rows (the backward of norms).

A persistent grid walks the rows once.  Partial sums of columns stay in registers for the whole walk and leave it as one
row of a workspace a program, which a second stage adds up in a fixed order: of the same launch, all programs having
met, or a kernel of its own.  Before::

    T4 = sum(T3, rows' elements); T5 = sub(T2, T4); T6 = sum(T3, rows)

after, ``split`` telling programs apart::

    T4 = sum(T3); T5 = sub(T2, T4); T6_partial[split] = sum(T3)
    T6 = sum(T6_partial)

Where one program has all rows in one turn, there is no loop, and its sums are whole.  Where sums say their order, the
partial ones are the fusion's own, and there is no second stage (``ordered_row_loop.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..device import MAX_REGISTERS, Device
from ..ir.digits import Digit, extent, listed
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce
from ..segments.added_sums import added_sums
from ..segments.segment import Atoms, Segment, segment_of
from ..segments.space import Space, cut_into_atoms, storage_order
from . import pointwise, reduction
from .features import Features, accepted, features, itemsizes, on
from .limits import WARP, WARPS, chunk_widths, least_chunk, power_of_two, power_of_two_within, vector
from .ordered_row_loop import check_in_order, is_ordered, why_no_order
from .persistent import in_branches
from .plan import KernelPlan, may_be_stages, one_launch
from .resources import stages
from .row_loop_schedule import lagged_row_loop, takes_two_rows, why_no_lagged_loop
from .row_loop_tiles import RowTile, fits, registers, tile_of_rows, turns
from .schedule import LAUNCH, Launch, RowLoop, Schedule, Split, Tile
from .schedule_parts import refuse
from .split_k import finish_of, finishing, split_of, storing, workspace


@dataclass(frozen=True)
class Mixed:
    """``columns``: reductions down columns.  ``stored``: what else the walk gives; ``after``: what rests on columns."""

    space: Features
    columns: tuple[Expr, ...]
    stored: tuple[BoundTensor, ...]
    after: tuple[BoundTensor, ...]


def why_not(segment: Segment, device: Device) -> str | None:
    """Why ``segment`` is not of mixed order; ``None`` where it is."""
    mixed = analyse_mixed(segment, device)
    if isinstance(mixed, str):
        return mixed
    space, columns = mixed.space, mixed.columns
    if is_ordered(space):
        refusal = why_no_order(space, columns, is_only_row=_is_only_row(mixed))
    else:
        finishes = _finishes(mixed, _columns(mixed, 2)[0])
        refusal = finishes if isinstance(finishes, str) else None
    if refusal is not None or tile_of_rows(space, columns) is not None:
        return refusal
    each = registers(space, columns, keeps=False)
    found = f"a row of {space.reduced} elements takes {each:g} registers each, more than a multiprocessor has"
    if is_ordered(space):
        return found
    refusal = why_no_lagged_loop(space, columns)
    return refusal and f"{found}; of a group, {refusal}"


def propose(segment: Segment, device: Device) -> Schedule:
    """As many rows under way as registers and shared memory hold; a group for each that no program holds."""
    mixed = accepted(analyse_mixed(segment, device))
    space, tile = mixed.space, tile_of_rows(mixed.space, mixed.columns)
    if tile is None or (not tile.keeps and not is_ordered(space) and takes_two_rows(space, mixed.columns)):
        return lagged_row_loop(space, mixed.columns)
    walked, chunk = extent(space.walked), _block(space, mixed.columns, tile)
    if is_ordered(space):
        is_only = _is_only_row(mixed)
        return in_branches(_one_turn(space, tile, chunk) if is_only else _walk(space, tile, chunk, Split(1)), space)
    if walked <= tile.rows and _are_sums_whole(mixed) and (not space.is_invariant or _is_laid_out_alike(space, chunk)):
        return _one_turn(space, tile, chunk)
    rows = tile.rows if space.is_invariant else min(tile.rows, power_of_two(walked))
    blocks = -(-walked // rows)
    wanted = max(device.multiprocessors * tile.programs // space.samples, 1)
    splits = wanted if blocks >= wanted else power_of_two_within(blocks)
    is_one_launch = _is_one_launch_faster(tile, device) and may_be_stages(space.segment)
    return _walk(space, replace(tile, rows=rows), chunk, Split(splits, in_one_launch=is_one_launch))


def _walk(space: Features, tile: RowTile, chunk: int, split: Split) -> Schedule:
    """A loop over tiles, as many of them read ahead as shared memory holds."""
    again = 0 if tile.keeps else space.reduced * itemsizes(space.beside)  # as each row's loads
    own = tile.registers(space.device)
    ahead = stages((tile.rows * space.row_bytes + again) * tile.programs, LAUNCH.stages, space.device)
    launch = Launch(tile.warps, ahead, own if own < MAX_REGISTERS else None)
    return Schedule(RowLoop(tile.rows, chunk, tile.keeps), split=split, launch=launch)


def _one_turn(space: Features, tile: RowTile, chunk: int) -> Schedule:
    """All rows at once, by as few warps as have the widest load or store each, or what each has of a whole tile.

    Rows that are promised their bits have all warps of a whole tile, and are so many that each thread has what it has
    there: a thread has the same elements of its row then, and no sum along a row is in another order.  They stay side
    by side too, as one by itself is reduced otherwise.
    """
    narrowest = min(t.dtype.itemsize for t in (*space.segment.loads, *space.segment.outputs) if space.has_r(t))
    load = max(min(space.device.access_bytes // narrowest, tile.rows * chunk // (tile.warps * WARP)), 1)
    rows, warps = power_of_two(extent(space.walked)), tile.warps
    if space.is_invariant:
        rows = min(max(rows, 2, warps * WARP * load // chunk), tile.rows)
    else:
        warps = min(warps, max(rows * chunk // (WARP * load), 1))
    return Schedule(RowLoop(rows, chunk, tile.keeps), launch=Launch(warps, 1))


def _is_laid_out_alike(space: Features, chunk: int) -> bool:
    """Does the compiler give a thread the same elements of a row, whether rows are in a loop or not?

    It lets what is read and stored decide.  Where that leaves one choice, of chunks and elements of one width in rows
    that are aligned for the widest loads, it was seen to be the same (``tests/test_promised_layouts.py``); of bfloat16
    beside float32 a thread has 4 elements in a loop, and 8 without.
    """
    along = [t for t in space.segment.loads if space.has_r(t)]
    sizes = {t.dtype.itemsize for t in (*along, *(t for t in space.segment.outputs if space.is_streamed(t)))}
    is_whole = len(space.r) == 1 and not space.has_windows and (space.reduced <= chunk or space.reduced % chunk == 0)
    (size, *others) = sizes or {0}
    if others or size not in (2, 4) or not is_whole:
        return False
    is_narrower = any(t.dtype.itemsize < size for t in space.segment.outputs if space.has_r(t))
    return not is_narrower and all(
        vector(t.dtype, space.reduced, space.device) * size == space.device.access_bytes for t in along
    )


def _is_only_row(mixed: Mixed) -> bool:
    """Are sums of columns those of a single row, which need no loop?"""
    return extent(mixed.space.walked) == 1 and _are_sums_whole(mixed)


def _are_sums_whole(mixed: Mixed) -> bool:
    """Does a program have all rows of each sum of columns, and is what rests on these made of them alone, number by
    number?  It has their lanes then; a vector beside the rows is loaded with lanes for each row of the tile."""
    space = mixed.space
    kept = frozenset(space.x) - frozenset(space.walked)
    if any(not kept <= space.atoms[e.output] for e in mixed.columns):
        return False
    rests = {e.output for e in mixed.columns}
    for e in space.segment.exprs:
        if rests.isdisjoint(e.tensors):
            continue
        is_reduced = any(map(space.has_r, e.tensors)) and not space.has_r(e.output)
        if is_reduced or not rests.issuperset(e.tensors):
            return False
        rests.update(e.outputs)
    return True


def _is_one_launch_faster(tile: RowTile, device: Device) -> bool:
    """Does the finish take no register from the walk, and do its programs outnumber the multiprocessors?

    LayerNorm's backward of 32768 x 4096 took 202 us so, with a second launch 205; RMSNorm's of 8192 x 16384, a program
    of 16 warps for each multiprocessor, 217 and 209; LayerNorm's of 16384 x 5140, bound to 128 registers, 180 and 160.
    """
    is_full = tile.programs * device.multiprocessors >= device.filling
    return is_full and tile.warps <= WARPS and tile.registers(device) >= MAX_REGISTERS


def _block(space: Features, columns: Sequence[Expr], tile: RowTile) -> int:
    """Elements of a chunk: a load of all warps for a single row, of one warp where each has rows of its own.

    Several rows may be one chunk each: all warps share each row, so that a thread's columns, and what it keeps for
    them, are the same in every row, and no sum crosses warps when the walk is done.  LayerNorm's backward, bfloat16, of
    131072 x 1024 took 205 us so, in chunks of one warp 223, of 10000 x 1000 27 and 44, of 8192 x 640 18 and 23; but of
    50000 x 640 64 and 63, of 576000 x 384 345 and 322.
    """
    tuned, n, width = space.tuned.row_loops, space.reduced, space.width
    if tile.rows == 1:
        whole = max(WARP * width * tile.warps, power_of_two(-(-n // space.tuned.rows.chunks)))
        return _chunk(space, whole, least_chunk(space.narrowest, tile.warps, whole))
    row = power_of_two(n)
    blocks = [WARP * width >> k for k in range(tuned.halvings) if -(-n // (WARP * width >> k)) <= tuned.chunks]
    block = min(blocks or [power_of_two(-(-n // tuned.chunks))], key=lambda b: (-(-n // b) * b, -b))
    is_full = 8 * n >= 7 * row or (row == tuned.each * WARP and 3 * n >= 2 * row)
    is_short = row >= tuned.each * WARP // 2 and turns(space) < tuned.many_turns
    return row if (is_full or is_short) and fits(space, columns, tile, row) else block


def _chunk(space: Features, whole: int, least: int) -> int:
    """``whole``, or half of it, where that divides a row, or leaves chunks of fewer widths, each its own reduction.

    LayerNorm's backward of 16384 x 5000, bfloat16, took 137 us in 5 chunks of 1024, in two of 2048 and one of 1024 150;
    of 16384 x 7000 241 in 7 chunks, in three of 2048 and one of 1024 213.
    """
    n, half = space.reduced, whole // 2
    for block in (whole, half):
        if n % block == 0 and n <= block * space.tuned.rows.chunks:
            return block
    few, many = (chunk_widths(n, block, least) for block in (whole, half))
    return (
        half
        if len(many) <= space.tuned.row_loops.few_chunks and len(dict.fromkeys(many)) < len(dict.fromkeys(few))
        else whole
    )


def kernels(segment: Segment, schedule: Schedule, device: Device) -> tuple[KernelPlan, ...]:
    """The walk, then the sums of its partial results where it has some."""
    mixed = accepted(analyse_mixed(segment, device))
    if is_ordered(mixed.space):
        check_in_order(schedule, mixed.space)
    if schedule.group is None and schedule.split is None:
        walked = extent(mixed.space.walked)
        refuse(schedule.kept < walked, f"{walked} rows in one turn of {schedule.kept}")
        refuse(not _are_sums_whole(mixed), "what rests on sums of columns needs a finish")
        return (KernelPlan.of("mix_order", mixed.space, schedule),)
    if is_ordered(mixed.space):
        space, split = mixed.space, split_of(1, mixed.space.walked)
        whole = storing(space, mixed.stored, {e: e.output for e in mixed.columns}, split)
        return (KernelPlan.of("mix_order", whole, schedule, split),)
    columns, split = _columns(mixed, schedule.parts)
    finishes = accepted(_finishes(mixed, columns))
    space = storing(mixed.space, mixed.stored, columns, split)
    plans = [KernelPlan.of("mix_order", space, schedule, split)]
    for finish in finishes:
        space = features(finish, device)
        how = finishing(space) if space.r else _whole(mixed.space, schedule)
        plans.append(KernelPlan.of("finish", space, how))
    return (one_launch("mix_order", mixed.space.segment, plans),) if schedule.is_one_launch else tuple(plans)


def _whole(space: Features, walk: Schedule) -> Schedule:
    """What rests on the only partial result of each column: all columns of a program that walks, or what it holds."""
    held = space.tuned.row_loops.each * WARP * walk.launch.warps
    return Schedule(Tile(min(power_of_two(space.reduced), held)), launch=Launch(walk.launch.warps))


# the space


@lru_cache(maxsize=64)
def analyse_mixed(segment: Segment, device: Device) -> Mixed | str:
    """The space of the walk, of the segment with sums that are only added up as one, or why there is none."""
    segment = added_sums(segment)
    if sum(isinstance(e.op, Reduce) for e in segment.exprs) < 2:
        return "it does not reduce both ways"
    cut = cut_into_atoms(segment)
    if isinstance(cut, str):
        return cut
    pieces, atoms, gone = cut
    stray = next((e for e in gone if not isinstance(e.op, Reduce)), None)
    if stray is not None:
        return f"{stray.output} = {stray.op.name} lacks {listed(gone[stray])}"
    if len(set(gone.values())) < 2:
        return "it does not reduce both ways"
    order = storage_order((*segment.loads, *segment.outputs), atoms, pieces, frozenset())
    every = frozenset[Digit]().union(*atoms.values())
    order[:0] = sorted(every - frozenset(order), key=str)
    rows = [g for g in gone.values() if order[-1] in g]
    if not rows:
        return f"nothing is reduced along {order[-1]}, which is fastest in memory"
    if any(g != rows[0] for g in rows):
        return f"some reductions take {listed(rows[0])}, others {listed(next(g for g in rows if g != rows[0]))}"
    held = frozenset[Digit]().union(*(atoms[t] for e, g in gone.items() if g == rows[0] for t in e.tensors))
    if every - held and extent(rows[0]) < WARPS * WARP:
        return f"what it reduces along rows lacks {listed(every - held)}, and would be reduced anew for each"
    columns = [e for e, g in gone.items() if g != rows[0]]
    walked = frozenset[Digit].intersection(*(gone[e] for e in columns)) - rows[0]
    refusal = _refusal(columns, gone, atoms, rows[0], every) or ("" if walked else "its column sums share no rows")
    if refusal:
        return refusal
    kept = [a for a in order if a not in rows[0]]
    x = (*(a for a in kept if a not in walked), *(a for a in kept if a in walked))
    r, phase = tuple(a for a in order if a in rows[0]), _phases(segment, gone, columns)
    turns = tuple(a for a in kept if a in walked)
    space = Space(segment, x, r, atoms, pieces, phase, is_inner=True, walked=turns)
    return _parted(columns, on(space, device))


def _refusal(
    columns: Sequence[Expr],
    gone: Mapping[Expr, frozenset[Digit]],
    atoms: Atoms,
    reduced: frozenset[Digit],
    every: frozenset[Digit],
) -> str | None:
    for e in columns:
        if gone[e] & reduced:
            return f"{e.output} reduces {listed(gone[e])}, others {listed(reduced)}"
        if atoms[e.tensors[0]] != every:
            return f"{e.output} is reduced from {e.tensors[0]}, which lacks {listed(every - atoms[e.tensors[0]])}"
    return None


def _phases(segment: Segment, gone: Mapping[Expr, frozenset[Digit]], columns: Sequence[Expr]) -> dict[BoundTensor, int]:
    """Reductions along rows that a tensor depends on, one after the other."""
    phase = dict.fromkeys(segment.inputs, 0)
    for e in segment.exprs:
        phase[e.output] = max((phase[t] for t in e.tensors), default=0) + (e in gone and e not in columns)
    return phase


def _parted(columns: Sequence[Expr], space: Features) -> Mixed | str:
    """The segment of ``space`` parted into what leads to column sums and what rests on them."""
    segment = space.segment
    rests: dict[BoundTensor, None] = dict.fromkeys(e.output for e in columns)
    for e in segment.exprs:
        summed = next((t for t in e.tensors if t in rests), None)
        if summed is not None:
            if e in columns or space.is_walked(e.output):
                return f"{e.output} needs rows again after {summed} has been reduced over them"
            rests[e.output] = None
    stored = tuple(t for t in segment.outputs if t not in rests)
    for t in stored:
        missing = frozenset(space.x) - space.atoms[t] or (space.has_r(t) and frozenset(space.r) - space.atoms[t])
        if missing:
            return f"{t} lacks {listed(missing)}"
    return Mixed(space, tuple(columns), stored, tuple(t for t in segment.outputs if t in rests))


# the second kernel


def _columns(mixed: Mixed, splits: int) -> tuple[dict[Expr, BoundTensor], Digit]:
    """Each column reduction and its workspace ``[kept rows..., split, columns...]``, and the digit of ``split``."""
    space = mixed.space
    split = split_of(splits, space.walked)
    kept = [(a,) for a in space.x if a not in space.walked]
    return {e: workspace(e, (*kept, (split,), *((a,) for a in space.r))) for e in mixed.columns}, split


def _finishes(mixed: Mixed, columns: Mapping[Expr, BoundTensor]) -> list[Segment] | str:
    """Segments that finish the column sums: as few as have one iteration space each."""
    segment, device = mixed.space.segment, mixed.space.device
    finished: dict[BoundTensor, Expr] = {}
    for e, w in columns.items():
        gone = [k for k, axis in enumerate(w.domain.logical) if axis[0] not in mixed.space.atoms[e.output]]
        finished[e.output] = finish_of(e, w, tuple(gone))
    cut = [finished.get(e.output, e) for e in segment.exprs]
    found: list[list[BoundTensor]] = []
    for t in mixed.after:
        for group in found:
            if _why_no_finish(segment_of(cut, [*group, t]), device) is None:
                group.append(t)
                break
        else:
            reason = _why_no_finish(segment_of(cut, [t]), device)
            if reason is not None:
                return f"what follows the column sums is no reduction: {reason}"
            found.append([t])
    return [segment_of(cut, group) for group in found]


def _why_no_finish(segment: Segment, device: Device) -> str | None:
    """``None`` too where there is a single partial result of each column."""
    return reduction.why_not(segment, device) and pointwise.why_not(segment, device)
