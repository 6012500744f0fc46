"""generate: a kernel plan and one rank's layouts to a kernel's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..ir.expr import BoundTensor
from ..schedulers.plan import KernelPlan
from ..schedulers.schedule import Schedule
from .arithmetic import atom
from .bodies import write_loops, write_packed, write_unrolled
from .claims import claim_helpers, grid_of, integers_of, program_loops
from .emitter import Emitter
from .gathering_rows import GatheringRows, piece_lines, write_gathered
from .group_exchange import group_loop, mailbox_words, member_alone, member_lines
from .indexing import integer, promise
from .lagged_row_loop import LaggedRowLoop, groups_of, write_lagged_loop
from .lagged_rows import LaggedRows, MisalignedLaggedRows, pipelined_loop, write_lagged_rows
from .mesh_exchange import rank_lines, table_words
from .misaligned import MisalignedLoop, with_access
from .packed import MisalignedPacked, Packed
from .pair_sums import run_lines
from .passing_rows import PassingRows, write_passed
from .row_loop import RowLoopSums, row_loop_index, write_row_loop
from .sending import Sending
from .sending_rows import SendingRows, row_sender_lines
from .sides import Sided, rows_index, turned_index
from .source import BLOCK, PROGRAM, Kernel, KernelSource
from .stages import one_launch
from .statements import Branch, Statement, defined
from .tile import R_SHARE, R_SIZE, X_SIZE, Layouts, Tile, coordinates_on
from .whole_blocks import whole_blocks

_Kind = TypeVar("_Kind", bound=Emitter)


def generate(
    plan: KernelPlan, layouts: Layouts, rank: int, *, interpret: bool = False, in_groups: bool = False
) -> KernelSource:
    """The kernel of ``plan`` for ``rank``.

    ``layouts``: this rank's storage of every input and output of ``plan.segment``, in any strides, 0 among them.
    ``interpret``: text for Triton's interpreter, whose bfloat16 is wrong, of groups of one program; ``in_groups``: of
    groups as they are planned, whose members do not wait there, for tests.  No local extent may be 0.
    """
    plans: Sequence[KernelPlan] = plan.stages or (plan,)
    if interpret and not in_groups:
        plans = [member_alone(each) for each in plans]
    stages = [
        _kernel(each, layouts, rank, interpret=interpret, program=BLOCK if k else PROGRAM)
        for k, each in enumerate(plans)
    ]
    kernel = stages[0]
    if plan.stages:
        shares = plan.schedule.parts if plan.shares else 0
        kernel = one_launch(plan.name, _tensors(plan), stages, shares=shares, interpret=interpret)
    # What stands side by side depends on where a fusion is cut; and ranks whose kernels differ have the same bits.
    # Of numbers without axes it is not known whether a fusion promises theirs, and they cost nothing.
    is_of_numbers = not (plan.space.x or plan.space.r)
    is_alike = plan.exchange is not None and plan.exchange.is_alike
    contracts = not (plan.space.is_promised or is_of_numbers or is_alike)
    return kernel.source(contracts=contracts)


def _kernel(plan: KernelPlan, layouts: Layouts, rank: int, *, interpret: bool, program: str) -> Kernel:
    plan = with_access(plan, layouts, coordinates_on(plan.segment, rank))
    emitted = partial(_emitted, plan, layouts, rank, interpret=interpret, program=program)
    e = emitted()
    integers, preamble = _indices(e)
    integers = {**{name: (value, "tl.int64") for name, value in e.starts.items()}, **integers}
    exchange = plan.exchange
    if exchange is not None:
        integers |= integers_of(exchange, plan.device.multiprocessors)
        e.helpers |= claim_helpers(interpret=interpret) if exchange.is_claimed else {}
    grid, mailbox = _grid(e), 0
    if exchange is not None:
        mailbox = table_words(exchange)
    elif plan.schedule.members:
        mailbox = mailbox_words(e, grid)
    kernel = Kernel(
        plan.name, _comments(e), e.helpers, _tensors(plan), tuple(s for s in plan.segment.scalars if not s.is_literal),
        integers, (), grid, plan.schedule, e.tile.x_block, mailbox,
        # those whose ranks exchange have room for all of their programs, whatever else runs (codegen/claims.py)
        is_cooperative=bool(mailbox) and exchange is None, accesses=(),
    )  # fmt: skip
    whole: Emitter | None = None
    if isinstance(e, LaggedRows):
        body = pipelined_loop(e, plan.name, [*kernel.parameters, *defined(preamble)])
    elif exchange is not None:
        body = program_loops([*_row_lines(e), *e.body], _rows(e), exchange)
    elif plan.schedule.members:
        body = group_loop([*_row_lines(e), *e.body], _rows(e))
    elif (found := whole_blocks(e)) is not None:
        test, is_before_ends = found
        whole = emitted(is_whole=True, is_before_ends=is_before_ends)
        body = ["", Branch(test, whole.body, e.body)]
    else:
        body = e.body
    accesses = [*(replace(a, is_whole=True) for a in (whole.accesses if whole else ())), *e.accesses]
    return replace(kernel, body=[*preamble, *body], helpers=e.helpers, accesses=(tuple(accesses),))


def _emitted(
    plan: KernelPlan, layouts: Layouts, rank: int, *, interpret: bool, program: str, is_whole: bool = False,
    is_before_ends: bool = False,
) -> Emitter:  # fmt: skip
    """An emitter of the plan's form that has written its body.

    ``is_whole``: for programs that have no elements too many.  ``is_before_ends``: nor any behind a window's end.
    """
    coordinates = coordinates_on(plan.segment, rank)
    schedule, exchange = plan.schedule, plan.exchange

    def by(kind: type[_Kind], write: Callable[[_Kind], None]) -> Emitter:
        e = kind(plan, layouts, coordinates, interpret=interpret, program=program)
        e.tile.x_masked &= not is_whole
        e.is_before_ends = is_before_ends
        tells_of_none = exchange is not None and not schedule.is_held
        assert e.tile.x_total * (e.tile.r_total or tells_of_none), f"{plan.name} has nothing to do on rank {rank}"
        write(e)
        return e

    if plan.space.walked:
        return by(LaggedRowLoop, write_lagged_loop) if schedule.lag else by(RowLoopSums, write_row_loop)
    if plan.space.sides[1]:
        return by(Sided, write_unrolled)
    if schedule.lag:
        return by(MisalignedLaggedRows if schedule.is_aligned_down else LaggedRows, write_lagged_rows)
    if exchange is not None and exchange.gathered is not None:
        return by(GatheringRows, write_gathered)
    if exchange is not None and exchange.passed is not None:
        return by(PassingRows, write_passed)
    if exchange is not None and exchange.sent is not None:
        return by(SendingRows if exchange.is_in_rows else Sending, write_unrolled)
    if schedule.is_packed:
        return by(MisalignedPacked if schedule.is_aligned_down else Packed, write_packed)
    if schedule.is_held:
        return by(Emitter, write_unrolled)
    return by(MisalignedLoop if schedule.is_aligned_down else Emitter, write_loops)


def _rows(e: Emitter) -> str:
    """Rows, or blocks of columns, that groups take in turn; "" where there is one.

    One that is promised its bits is in a loop as others are, but where groups loop over it themselves: two loops, one
    in the other, cost 2 of 15 us there (cross entropy of a row of 128256, bfloat16, on an H200).
    """
    if isinstance(e, PassingRows):
        return f"tl.cdiv({X_SIZE}, {e.plan.rank_exchange.ranks})"
    is_in_loop = e.space.is_invariant and (e.schedule.is_held or e.tile.x_lanes)
    if e.tile.x_total <= e.tile.columns and not is_in_loop:
        return ""
    return f"tl.cdiv({X_SIZE}, {e.tile.columns})" if e.tile.x_lanes else X_SIZE


def _row_lines(e: Emitter) -> list[str]:
    """x from the number of the row or block.  A loop's index is 32-bit, the interpreter's is Python's own."""
    if isinstance(e, PassingRows):
        return []  # a turn has a row of each rank
    number = "row" if _rows(e) else "team" if e.space.is_invariant else ""
    return _kept_lines(e.tile, f"{number}{'' if e.interpret else '.to(tl.int64)'}" if number else "0")


def _kept_lines(tile: Tile, block: str) -> list[str]:
    """x of the row or the rows, or the columns, of a block."""
    if tile.is_alone:
        return []
    if not tile.x_lanes:
        return [f"x = {block}"]
    if tile.plan.schedule.columns:
        return _column_lines(tile, block)
    lanes = tile.lanes(tile.x_block, reduced=False)
    return [f"x = {block} * {tile.x_block} + {lanes}", *([f"x_mask = x < {X_SIZE}"] if tile.x_masked else [])]


def _column_lines(tile: Tile, block: str) -> list[str]:
    """The columns ``k`` of a block that begins at ``x0``."""
    columns = tile.columns
    lines = [f"x0 = {block} * {columns}"]
    for p in tile.pieces:
        lanes = tile.lanes(p.width or tile.x_block, reduced=False)
        lines.append(f"{p.lane} = {f'{p.start} + ' if p.start else ''}{lanes}")
    if not tile.x_masked:
        return lines
    cut = [f"x0 + k < {X_SIZE}"] if tile.x_total % columns else []
    masks = [*([f"k < {columns}"] if columns < tile.x_block else []), *cut]
    text = masks[0] if len(masks) == 1 else " & ".join(f"({m})" for m in masks)
    return [*lines, f"x_mask = {text}"]


def _group_lines(tile: Tile, size: int) -> list[str]:
    """``groups``: is the column of the group?  Of each piece."""
    lines: list[str] = []
    for p in tile.pieces:
        lanes = f"tl.arange(0, {p.width or tile.x_block})[None, :]"
        column = f"({p.start} + {lanes})" if p.start else lanes
        lines.append(f"{p.groups} = tl.arange(0, {tile.group_lanes})[:, None] == {column} // {size}")
    return lines


def _grid(e: Emitter) -> int:
    """Programs: of a group's kernel no more than are resident at once, each group with rows in turn."""
    blocks, schedule = -(-e.tile.x_total // e.tile.columns), e.schedule
    if isinstance(e, PassingRows):
        blocks = e.plan.turns
    if isinstance(e, LaggedRowLoop):
        return groups_of(e) * schedule.members
    if isinstance(e, RowLoopSums):
        return e.y_total * schedule.parts
    if isinstance(e, Sided):
        return e.tiles
    if e.plan.exchange is not None:
        return grid_of(e.plan.exchange, blocks, e.plan.device.multiprocessors)
    return schedule.grid(blocks)


def _tensors(plan: KernelPlan) -> tuple[BoundTensor, ...]:
    return (*plan.segment.inputs, *plan.segment.outputs)


def _indices(e: Emitter) -> tuple[dict[str, tuple[int, str]], list[Statement]]:
    """Extent arguments with their values and types, and the statements that come before everything else."""
    if isinstance(e, RowLoopSums) and not isinstance(e, LaggedRowLoop):
        return row_loop_index(e)
    if isinstance(e, Sided):
        return turned_index(e) if e.space.sides[0] else ({}, rows_index(e))
    return _index(e)


def _index(e: Emitter) -> tuple[dict[str, tuple[int, str]], list[Statement]]:
    """Extent arguments with their values and types, and the statements that make the indices x, c and r of them."""
    tile, schedule = e.tile, e.schedule
    integers: dict[str, tuple[int, str]] = {}
    lines: list[Statement] = []

    def extent(name: str, value: int, *, wide: bool, promised: bool) -> None:
        """``promised``: the compiler learns what power of two divides it, without which it splits vector loads."""
        integers[name] = integer(value, is_wide=wide)
        lines.extend(promise(name, value) if promised else [])

    is_cut = bool(tile.x_total % tile.columns) if schedule.columns else tile.x_masked
    is_in_turn = e.plan.split is not None or e.plan.exchange is not None or (schedule.members and _rows(e))
    if is_cut or (is_in_turn and not tile.is_alone):
        extent(X_SIZE, tile.x_total, wide=False, promised=is_cut and not e.space.is_invariant)
    if not schedule.is_held:
        extent(R_SIZE, tile.r_total, wide=tile.r_wide, promised=tile.r_total % schedule.reduced != 0)
    if (e.plan.split is not None and not schedule.members) or (schedule.members and not schedule.is_held):
        share = -(-tile.r_total // max(schedule.parts, schedule.members))
        extent(R_SHARE, -(-share // schedule.reduced) * schedule.reduced, wide=tile.r_wide, promised=True)
    lines += _program_lines(e)
    if e.space.grouped:
        lines += _group_lines(tile, e.space.grouped)
    if tile.r_lanes:
        wide = ".to(tl.int64)" if tile.r_wide and schedule.is_held else ""
        lanes = f"{tile.part_start}{tile.lanes(schedule.reduced, reduced=True)}{wide}"
        lines += run_lines(tile, lanes) if tile.is_apart else [f"c = {lanes}"]
    if schedule.is_held and not schedule.is_aligned_down:
        lines += _mask_lines(tile, schedule)
    return integers, lines


def _mask_lines(tile: Tile, schedule: Schedule) -> list[str]:
    """The masks of chunks; of a group's members the last has fewer elements."""
    masked = [chunk for chunk in tile.chunks() if chunk.is_masked]
    if tile.is_apart:
        return []  # beside the lanes
    if not schedule.members:
        return [f"r_mask = c < {chunk.valid}" for chunk in masked]
    if not masked:
        return []
    stop = str(tile.share)
    lines: list[str] = []
    if tile.last_share < tile.share:
        stop = "valid"
        lines = [f"valid = tl.minimum({tile.share}, {tile.r_total} - first)", *promise(stop, tile.r_total, tile.share)]
    return [*lines, *(f"{chunk.mask} = c{f' + {chunk.start}' if chunk.start else ''} < {stop}" for chunk in masked)]


def _program_lines(e: Emitter) -> list[str]:
    tile, schedule = e.tile, e.schedule
    lines: list[str] = []
    program = e.program
    if schedule.members and schedule.is_held:
        own = member_lines(e) if e.plan.exchange is None else rank_lines(e.plan)
        return [*own, f"first = member{'.to(tl.int64)' if tile.r_wide else ''} * {tile.share}"]
    if schedule.members:
        return [*member_lines(e), *_share_lines("member")]
    if e.plan.exchange is not None:
        if e.plan.exchange.gathered is not None:
            return piece_lines(e.plan)
        return row_sender_lines(e.plan) if e.plan.exchange.is_in_rows else rank_lines(e.plan)
    if e.plan.split is not None:
        lines += [f"split = {program} % {schedule.parts}", *_share_lines("split")]
        program = f"{program} // {schedule.parts}"
    if tile.is_alone:
        return lines
    if tile.x_wide:
        program = f"{atom(program)}.to(tl.int64)"
    return [*lines, *_kept_lines(tile, program)]


def _share_lines(program: str) -> list[str]:
    """Where a program's part of the reduced elements begins, and where a loop over it ends."""
    return [f"first = {program} * {R_SHARE}", f"last = tl.minimum(first + {R_SHARE}, {R_SIZE})"]


def _comments(e: Emitter) -> str:
    lines = [f"# {e.plan.name}", *(f"#   {line}" for line in str(e.plan.segment).splitlines())]
    return "\n".join(lines) + "\n"
