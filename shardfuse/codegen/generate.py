"""generate: a kernel plan and one rank's layouts to a kernel's text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

from ..ir.expr import BoundTensor
from ..ir.scalar import Scalar
from ..schedulers.limits import INT32_LIMIT
from ..schedulers.plan import KernelPlan
from ..schedulers.schedule import Schedule
from .bodies import write_loops, write_packed, write_unrolled
from .claims import claim_helpers, grid_of, integers_of, loop_lines
from .emitter import Emitter
from .group_exchange import MAILBOX, head_lines, mailbox_words, member_alone, team_lines
from .lagged_rows import Late, OddLate, pipelined_loop, write_late
from .mesh_exchange import head_lines as table_lines
from .mesh_exchange import table_words
from .misaligned import Aligned, is_last_masked, last_masked, with_access
from .packed import OddPacked, Packed
from .pipelined_row_loop import LateWalk, teams_of, write_lagged_loop
from .sending import Sending
from .sending_rows import SendingRows, rows_head_lines
from .sides import Sided, rows_index, turned_index, where_whole, write_flat
from .source import KernelSource, Parts, body_text, in_branches, signature
from .stages import one_launch
from .tile import R_SHARE, R_SIZE, X_SIZE, Layouts, Tile, coordinates_on
from .walk import Walk, walk_index, write_walk


def generate(
    plan: KernelPlan, layouts: Layouts, rank: int, *, interpret: bool = False, turns: int | None = None
) -> KernelSource:
    """The kernel of ``plan`` for ``rank``.

    ``layouts``: this rank's storage of every input and output of ``plan.segment``, in any strides, 0 among them.
    ``interpret``: text for Triton's interpreter, whose bfloat16 is wrong.  ``turns``: polls after which a member of a
    team gives up waiting, for tests.  No local extent may be 0.
    """
    # What stands side by side depends on where a fusion is cut; and ranks whose kernels differ have the same bits.
    contracts = not plan.space.is_promised and not (plan.exchange is not None and plan.exchange.is_alike)
    if plan.stages:
        parts = [_parts(stage, layouts, rank, interpret=interpret, turns=turns) for stage in plan.stages]
        shares = plan.schedule.parts if plan.shares else 0
        whole = one_launch(plan.name, _tensors(plan), parts, shares=shares, interpret=interpret)
        return replace(whole, contracts=contracts)
    p = _parts(plan, layouts, rank, interpret=interpret, turns=turns)
    function = signature(p.name, list(p.parameters), list(p.not_specialised))
    text = body_text(p.comments, p.helpers) + function + "\n".join(p.lines) + "\n"
    # programs that claim their numbers wait for no number that none has claimed
    is_cooperative = bool(p.mailbox) and not (plan.exchange is not None and plan.exchange.is_claimed)
    return KernelSource(
        p.name, text, _tensors(plan), p.scalars, tuple(v for v, _ in p.integers.values()),
        p.grid, p.num_warps, p.num_stages, p.max_registers, p.mailbox, is_cooperative, schedule=p.schedule,
        contracts=contracts,
    )  # fmt: skip


def _parts(plan: KernelPlan, layouts: Layouts, rank: int, *, interpret: bool, turns: int | None) -> Parts:
    if interpret and turns is None and plan.schedule.members:
        plan = member_alone(plan)
    plan = with_access(plan, {t: layouts[t] for t in _tensors(plan)}, coordinates_on(plan.segment, rank))
    e = _emitted(plan, layouts, rank, interpret=interpret, turns=turns)
    integers, preamble = _indices(e)
    integers = {**{name: (value, "tl.int64") for name, value in e.starts.items()}, **integers}
    if plan.exchange is not None:
        integers |= integers_of(plan.exchange, plan.device.multiprocessors)
        e.helpers |= claim_helpers(interpret=interpret) if plan.exchange.is_claimed else {}
    scalars = tuple(s for s in plan.segment.scalars if not s.is_literal)
    parameters = [
        *(f"{t}_ptr" for t in _tensors(plan)),
        *(f"{s.name}: {_scalar_type(s)}" for s in scalars),
        *(f"{name}: {kind}" for name, (_, kind) in integers.items()),
    ]
    not_specialised = [*(s.name for s in scalars if not s.dtype.is_floating), *integers]
    body = [*e.head.lines, "", *e.out.lines]
    grid, mailbox = _grid(e), 0
    if plan.schedule.members:
        parameters.insert(0, MAILBOX)
        mailbox = mailbox_words(plan, grid, e.tile.exchanged)
        if isinstance(e, Late):
            body = pipelined_loop(e, plan.name, preamble, parameters)
        else:
            body = team_lines(body, _rows(e), _row_lines(e))
    elif plan.exchange is not None:
        parameters.insert(0, MAILBOX)
        mailbox = table_words(plan)
        body = loop_lines(body, _rows(e), _row_lines(e), plan.exchange)
    elif is_last_masked(e):
        whole = _emitted(plan, layouts, rank, interpret=interpret, turns=turns, is_whole=True)
        body = last_masked(whole, body)
    elif (test := where_whole(e)) is not None:
        whole = _emitted(plan, layouts, rank, interpret=interpret, turns=turns, is_whole=True, is_before_ends=True)
        body = in_branches(test, [*whole.head.lines, "", *whole.out.lines], body)
    launch = plan.schedule.launch
    return Parts(
        plan.name, _comments(e), e.helpers, tuple(parameters), tuple(not_specialised), _joined(preamble + body),
        scalars, integers, grid, launch.warps, launch.stages, launch.registers, mailbox, e.tile.x_block, plan.schedule,
    )  # fmt: skip


def _emitted(
    plan: KernelPlan, layouts: Layouts, rank: int, *, interpret: bool, turns: int | None,
    is_whole: bool = False, is_before_ends: bool = False,
) -> Emitter:  # fmt: skip
    """An emitter that has written the body of ``plan``.

    ``is_whole``: for programs that have no elements too many.  ``is_before_ends``: nor any behind a window's end.
    """
    coordinates = coordinates_on(plan.segment, rank)
    kind, write = _form(plan)
    e = kind(plan, {t: layouts[t] for t in _tensors(plan)}, coordinates, interpret=interpret, turns=turns)
    e.tile.x_masked &= not is_whole
    e.is_before_ends = is_before_ends
    assert e.tile.x_total * e.tile.r_total, f"{plan.name} has nothing to do on rank {rank}"
    write(e)
    return e


def _form(plan: KernelPlan) -> tuple[type[Emitter], Callable[[Any], None]]:
    """The emitter of ``plan``, and what has it write the body."""
    schedule = plan.schedule
    if plan.space.walked:
        return (LateWalk, write_lagged_loop) if schedule.lag else (Walk, write_walk)
    if plan.space.sides[1]:
        return Sided, write_flat
    if schedule.lag:
        return OddLate if schedule.is_aligned_down else Late, write_late
    if plan.exchange is not None and plan.exchange.sent is not None:
        return SendingRows if plan.exchange.is_in_rows else Sending, write_unrolled
    if schedule.is_packed:
        return OddPacked if schedule.is_aligned_down else Packed, write_packed
    return Aligned if schedule.is_aligned_down else Emitter, write_unrolled if schedule.is_held else write_loops


def _rows(e: Emitter) -> str:
    """Rows, or blocks of columns, that teams take in turn."""
    if e.tile.x_total <= e.tile.columns and not e.space.is_invariant:
        return ""
    return f"tl.cdiv({X_SIZE}, {e.tile.columns})" if e.tile.x_lanes else X_SIZE


def _row_lines(e: Emitter) -> list[str]:
    """x from the number of the row or block.  A loop's index is 32-bit, the interpreter's is Python's own."""
    tile = e.tile
    if tile.is_alone:
        return []
    row = "0" if not _rows(e) else "row" if e.interpret else "row.to(tl.int64)"
    if not tile.x_lanes:
        return [f"x = {row}"]
    if e.schedule.columns:
        return _column_lines(tile, row)
    lanes = tile.lanes(tile.x_block, reduced=False)
    return [f"x = {row} * {tile.x_block} + {lanes}", *([f"x_mask = x < {X_SIZE}"] if tile.x_masked else [])]


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
    """Programs: of a team's kernel no more than are resident at once, each team with rows in turn."""
    blocks, schedule = -(-e.tile.x_total // e.tile.columns), e.schedule
    if isinstance(e, LateWalk):
        return teams_of(e) * schedule.members
    if isinstance(e, Walk):
        return e.y_total * schedule.parts
    if isinstance(e, Sided):
        return e.tiles
    if schedule.members:
        return min(blocks, max(schedule.programs // schedule.members, 1)) * schedule.members
    if e.plan.exchange is not None:
        return grid_of(e.plan.exchange, blocks, e.plan.device.multiprocessors)
    return blocks * schedule.parts


def _tensors(plan: KernelPlan) -> tuple[BoundTensor, ...]:
    return (*plan.segment.inputs, *plan.segment.outputs)


def _scalar_type(scalar: Scalar) -> str:
    return "tl.float64" if scalar.dtype.is_floating else "tl.int64"


def _indices(e: Emitter) -> tuple[dict[str, tuple[int, str]], list[str]]:
    """Extent arguments with their values and types, and the lines that come before everything else."""
    if isinstance(e, Walk) and not isinstance(e, LateWalk):
        return walk_index(e)
    if isinstance(e, Sided):
        return turned_index(e) if e.space.sides[0] else ({}, rows_index(e))
    return _index(e)


def _index(e: Emitter) -> tuple[dict[str, tuple[int, str]], list[str]]:
    """Extent arguments with their values and types, and the lines that make the indices x, c and r of them."""
    tile, schedule = e.tile, e.schedule
    integers: dict[str, tuple[int, str]] = {}
    lines: list[str] = []

    def extent(name: str, value: int, *, wide: bool, promised: bool) -> None:
        """``promised``: the compiler learns what power of two divides it, without which it splits vector loads."""
        integers[name] = (value, "tl.int64" if wide or value >= INT32_LIMIT else "tl.int32")
        divisor = gcd(value, 16)
        if promised and divisor > 1:
            lines.append(f"{name} = {name} // {divisor} * {divisor}")

    is_cut = bool(tile.x_total % tile.columns) if schedule.columns else tile.x_masked
    is_in_turn = e.plan.split is not None or e.plan.exchange is not None or schedule.members
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
        shared = e.plan.exchange is not None and e.plan.exchange.members > 1
        first = f"member * {tile.r_total // e.plan.exchange.members} + " if e.plan.exchange and shared else ""
        lines.append(f"c = {first}{tile.lanes(schedule.reduced, reduced=True)}{wide}")
    if schedule.is_held and not schedule.is_aligned_down:
        lines += _mask_lines(tile, schedule)
    return integers, ["    " + line for line in lines]


def _mask_lines(tile: Tile, schedule: Schedule) -> list[str]:
    """The masks of chunks; of a team's members the last has fewer elements."""
    masked = [chunk for chunk in tile.chunks() if chunk.is_masked]
    if not schedule.members:
        return [f"r_mask = c < {chunk.valid}" for chunk in masked]
    if not masked:
        return []
    stop = str(tile.share)
    lines: list[str] = []
    if tile.last_share < tile.share:
        divisor = gcd(tile.r_total, tile.share, 16)
        lines.append(f"valid = tl.minimum({tile.share}, {tile.r_total} - first)")
        stop = "valid"
        if divisor > 1:
            lines.append(f"valid = valid // {divisor} * {divisor}")
    lines += [f"{chunk.mask} = c + {chunk.start} < {stop}" for chunk in masked]
    return [line.replace(" + 0 <", " <") for line in lines]


def _program_lines(e: Emitter) -> list[str]:
    tile, schedule = e.tile, e.schedule
    lines: list[str] = []
    program = "tl.program_id(0)"
    if schedule.members:
        return [*head_lines(e.plan, tile.exchanged), *_share_lines(tile, schedule)]
    if e.plan.exchange is not None:
        return rows_head_lines(e.plan) if e.plan.exchange.is_in_rows else table_lines(e.plan)
    if e.plan.split is not None:
        lines.append(f"split = {program} % {schedule.parts}")
        lines.append(f"first = split * {R_SHARE}")
        lines.append(f"last = tl.minimum(first + {R_SHARE}, {R_SIZE})")
        program = f"{program} // {schedule.parts}"
    if tile.is_alone:
        return lines
    if tile.x_wide:
        program = f"{program}.to(tl.int64)" if "//" not in program else f"({program}).to(tl.int64)"
    if not tile.x_lanes:
        lines.append(f"x = {program}")
        return lines
    if schedule.columns:
        return [*lines, *_column_lines(tile, program)]
    lines.append(f"x = {program} * {tile.x_block} + {tile.lanes(tile.x_block, reduced=False)}")
    if tile.x_masked:
        lines.append(f"x_mask = x < {X_SIZE}")
    return lines


def _share_lines(tile: Tile, schedule: Schedule) -> list[str]:
    """Where a member's part of the reduced elements begins, and where a loop over it ends."""
    if not schedule.is_held:
        return [f"first = member * {R_SHARE}", f"last = tl.minimum(first + {R_SHARE}, {R_SIZE})"]
    return [f"first = member{'.to(tl.int64)' if tile.r_wide else ''} * {tile.share}"]


def _comments(e: Emitter) -> str:
    lines = [f"# {e.plan.name}", *(f"#   {line}" for line in str(e.plan.segment).splitlines())]
    return "\n".join(lines) + "\n"


def _joined(lines: list[str]) -> tuple[str, ...]:
    """Lines without blank ones at the ends or twice in a row."""
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)
