"""The exchange of a group: partial results of programs that share a row, through a mailbox in global memory.

Each member stores one word for each result, ``epoch << 32 | bits``, and waits for those of the others, in one of two
ways.  *Words*: each thread polls those that it takes until they carry the epoch of this exchange; the value is the
flag, no fence or atomic is needed.  A word is written and read by one relaxed access of 64 bits at the scope of the
GPU: PTX lets a vector of two 32-bit accesses be seen in halves, and says nothing of a plain store that another program
reads meanwhile.  That is for columns, whose words are enough for all threads to have one each, and for pairs of rows.
*Counted*: members count themselves in, and one thread polls the count, which orders the words and leaves the memory to
the others (group norm of 2 x 640 x 64 x 64, held by groups: 11.0 us on an H200, where all threads poll the words of a
row 12.1).

A mailbox belongs to one bound kernel with one grid, of ``teams`` groups (``teams = grid / members``)::

    words   [2, teams, slots, members, lanes]   int64, slots: results that are exchanged at once
    epochs  [grid]                              int64, each program its own, kept between launches
    counts  [teams, 16]                         int64, the first of each line: members that came, ever

It is zeroed once.  Epochs begin with 1.  The writer of epoch e + 2 cannot overtake a reader of epoch e, because it has
waited for that reader's word of epoch e + 1: two sets are enough.  A word is taken where its epoch is *equal*; a count
only grows, and is compared by difference.  Every program must be resident, which a cooperative launch sees to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..device import LINE_BYTES
from ..ir.dtype import DataType
from ..kernel_functions import texts_of
from ..schedulers.limits import WARP, power_of_two
from ..schedulers.plan import KernelPlan
from ..schedulers.schedule import Access, Group, Immediate
from ..schedulers.schedule_parts import WithRanks
from .emitter import Emitter
from .exchange_functions import NO_WAIT, collect_words_text, post_polled_text
from .indexing import dynamic_terms, member_terms
from .source import MAILBOX, MemoryAccess
from .statements import Loop, Statement

_LINE = LINE_BYTES // 8
"""64-bit words of a cache line: counts of two groups do not share one."""
_AT_ONCE = 4
"""Words of each result that a thread asks for at once, before it looks whether they have come."""
_LARGEST_BLOCK = 1 << 20
"""Elements of a block, at most: Triton has no larger ones (``TRITON_MAX_TENSOR_NUMEL``)."""


def _use_polling(e: Emitter, results: int, *, by_one: bool, pack: int = 1) -> None:
    """The functions that post words which others poll, and wait for so many of each member.

    ``by_one``: one thread stores a word; else every thread that has it, the same bits in one transaction a warp.
    ``pack``: of each result, how many words a thread asks for at once.
    """
    e.helpers |= texts_of("post", interpret=True) if e.interpret else {"post": post_polled_text(by_one=by_one)}
    name = _collecting(results)
    e.helpers[name] = collect_words_text(name, results, pack=pack, interpret=e.interpret)


def _collecting(results: int) -> str:
    return f"collect_{results}"


def member_alone(plan: KernelPlan) -> KernelPlan:
    """``plan`` with groups of one, if of any: the interpreter runs one program after the other, so that none can wait.

    Those that walk keep what they do of the next row: the words of a lone member are there when it asks.
    """
    schedule, group = plan.schedule, plan.schedule.group
    if group is None or isinstance(group.exchange, WithRanks):  # those are planned as one program's for an interpreter
        return plan
    if plan.space.walked:
        return replace(plan, schedule=schedule.shared_by(1, group.at_once))
    block = min(power_of_two(schedule.reduced * (group.members if schedule.is_held else 1)), _LARGEST_BLOCK)
    is_immediate = isinstance(group.exchange, Immediate)
    # of a program that has no other to read ahead for
    exchange = replace(group.exchange, prefetches=False) if is_immediate else Immediate()
    alone = replace(schedule, group=Group(1, group.programs, exchange), access=Access.NATIVE)
    return replace(plan, schedule=alone.sized(reduced=block))


def slots(e: Emitter) -> int:
    """Results of reductions of the phase that has most of them, of all rows of a turn."""
    results = (sum(len(x.outputs) for x in e.reductions(phase)) for phase in range(e.space.phases))
    return (e.schedule.turn if e.space.walked else 1) * max(results)


def mailbox_words(e: Emitter, grid: int) -> int:
    """64-bit words of the mailbox of a kernel with ``grid`` programs."""
    return _sets(e) * grid * slots(e) * e.tile.exchanged + grid + grid // e.schedule.members * _LINE


def _sets(e: Emitter) -> int:
    """Epochs whose words must not be one another's: a late reader may be two behind a writer."""
    return 4 if e.schedule.lag else 2


def member_lines(e: Emitter) -> list[str]:
    """Before the loop over rows: who this program is, its epoch, where its words are, and where the group counts."""
    members, lanes = e.schedule.members, e.tile.exchanged
    lines = [
        f"member = tl.program_id(0) % {members}",
        f"team = tl.program_id(0) // {members}",
        f"teams = tl.num_programs(0) // {members}",
        f"epochs_ptr = {MAILBOX} + teams * {_sets(e) * slots(e) * members * lanes}",
        "epoch = tl.load(epochs_ptr + tl.program_id(0)).to(tl.int32)",
    ]
    if lanes == 1:
        every = f"tl.arange(0, {power_of_two(members)})"
        is_whole = members == power_of_two(members)
        lines += ["own = member", f"every = {every if is_whole else f'tl.minimum({every}, {members - 1})'}"]
    else:
        lines.append(f"own = member * {lanes} + tl.arange(0, {lanes})")
        lines.append(f"every = tl.arange(0, {members})[:, None] * {lanes} + tl.arange(0, {lanes})[None, :]")
    if e.schedule.is_counted:
        lines.append(f"count_ptr = epochs_ptr + tl.num_programs(0) + team * {_LINE}")
    return lines


EPOCH_STORE = "tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))"
"""What ends a launch: the next one goes on counting from this program's last epoch."""


def group_loop(body: Sequence[Statement], rows: str) -> list[Statement]:
    """``body`` for each row of the group in turn, and what comes after the last.

    ``rows``: text of their number, "" for a single one.
    """
    turns = [Loop("row", "team", rows, "teams", 1, body)] if rows else body
    return ["", *turns, "", EPOCH_STORE]


def write_group_exchange(e: Emitter, parts: Sequence[tuple[DataType, str]]) -> list[str]:
    """Exchanges all of ``parts`` at once: results of one phase, in 32 bits, with the text of what this member has.

    Gives for each the text of those of all members, ``[members]`` or ``[members, lanes]``.
    """
    types, lanes, schedule = [dtype for dtype, _ in parts], e.tile.exchanged, e.schedule
    e.out.add(post_lines(e, parts))
    if schedule.is_counted:
        e.use("post", "arrive", "meet", "collect")
        if e.interpret and schedule.members > 1:
            e.helpers["wait_for"] = NO_WAIT
        e.out.line(f"meet(count_ptr, epoch * {schedule.members})")
        whole = [f"collect({box} + every)" for box in _boxes(e, len(parts))]
        return [_as_type(text, dtype) for text, dtype in zip(whole, types, strict=True)]
    each = power_of_two(schedule.members) * lanes // (schedule.launch.warps * WARP)
    _use_polling(e, len(parts), by_one=lanes == 1, pack=min(max(each, 1), _AT_ONCE))
    whole = _write_wait(e, types, "epoch")
    e.out.line("tl.debug_barrier()")  # nothing is posted under the next epoch before all threads have come
    return whole


def write_lagged_wait(e: Emitter, types: Sequence[DataType], *, by_one: bool) -> list[str]:
    """Waits for the words of the epoch before the last; the text of each result of all members."""
    _use_polling(e, len(types), by_one=by_one)
    e.out.line(_set_line(e, "(epoch - 1)"))
    return _write_wait(e, types, "epoch - 1")


def _write_wait(e: Emitter, types: Sequence[DataType], epoch: str) -> list[str]:
    names, pointers = [f"bits_{k}" for k in range(len(types))], [f"{box} + every" for box in _boxes(e, len(types))]
    e.out.line(f"{', '.join(names)} = {_collecting(len(types))}({', '.join(pointers)}, {epoch})")
    return [_as_type(name, dtype) for name, dtype in zip(names, types, strict=True)]


def post_lines(e: Emitter, parts: Sequence[tuple[DataType, str]]) -> list[str]:
    """This member's ``parts`` go out under the next epoch."""
    posts = [f"post({box} + own, epoch, {text})" for box, (_, text) in zip(_boxes(e, len(parts)), parts, strict=True)]
    return ["epoch += 1", _set_line(e, "epoch"), *posts]


def _set_line(e: Emitter, epoch: str) -> str:
    """``box``: where the words of ``epoch`` are."""
    words = e.schedule.members * e.tile.exchanged * slots(e)
    return f"box = {MAILBOX} + (({epoch} & {_sets(e) - 1}) * teams + team) * {words}"


def _boxes(e: Emitter, results: int) -> list[str]:
    """Where the words of each result are."""
    words = e.schedule.members * e.tile.exchanged
    return [f"box + {k * words}" if k else "box" for k in range(results)]


def _as_type(bits: str, dtype: DataType) -> str:
    return f"{bits}.to(tl.float32, bitcast=True)" if dtype is DataType.Float else bits


# what a group fetches while it waits


def prefetch_next(e: Emitter) -> None:
    """The group's next row, if there is one, is fetched into L2 while this one waits for the others' words."""
    plan, tile = e.plan, e.tile
    if e.interpret or not plan.schedule.prefetches or tile.is_alone or not tile.last_share:
        return
    e.use("prefetch")
    block, lanes = tile.x_block, tile.lanes(tile.x_block, reduced=False)
    following = f"(row + teams) * {block} + {lanes}" if tile.x_lanes else "row + teams"
    e.out.line(f"ahead = tl.minimum({following}, i0 - 1).to(tl.int64)")
    own = f"tl.minimum({tile.share}, {tile.r_total} - first) - 1"
    last = str(tile.share - 1) if tile.last_share == tile.share else own
    for tensor in plan.segment.loads:
        window = tile.windows.get(tensor)
        if plan.space.is_streamed(tensor) and not (window and window.bounds):
            step = LINE_BYTES // tensor.dtype.itemsize
            count = power_of_two(-(-tile.share // step))
            text = f"{tile.lanes(count, reduced=True)} * {step}"
            if count * step > tile.share or tile.last_share < tile.share:
                text = f"tl.minimum({text}, {last})"
            strides = window.strides if window else tile.strides[tensor]
            _, scalars, lanes = member_terms("first", f"({text})", 0, 0, tile.share, tile.r_runs(strides))
            terms = [*dynamic_terms("ahead", tile.x_runs(strides)), *scalars, *lanes]
            terms += [str(window.first)] if window and window.first else []
            source = e.source_of(tensor)
            pointer = " + ".join([f"{source}_ptr", *terms])
            e.accesses.append(MemoryAccess("prefetch", source, pointer))
            e.out.line(f"prefetch({pointer})")
