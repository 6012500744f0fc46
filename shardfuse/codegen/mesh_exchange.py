"""The exchange of ranks inside of a kernel: statistics of a row that is sharded, pushed to every peer's memory.

Each rank stores one word for each statistic of each row, ``epoch << 32 | bits``, into a slot of every rank's symmetric
memory, and waits for the words of all in its own.  The value is the flag: a word is one 64-bit access, relaxed, of
system scope, so that no fence and no second flag is needed.  What comes is combined in the order of the ranks, and of
the programs of each that share the row, so that all of them have the same bits.

A rank's slots are indexed by what all ranks of a program agree on, never by program or turn, in two sets::

    slots   [rows, statistics, ranks, members]   int64; rows: kept elements, up to whole blocks
            [rows, ranks, words]                 of a tensor that is sent, two 16-bit elements in a word
            [reductions, rows, members]          of one rank alone, which its programs of a row give each other

Kernels of the same ranks share slots, whatever they exchange (``executor/symmetric_slots.py``): a word of another is of
an earlier launch.

and what differs between ranks stands in a table in its own memory, which comes as the kernel's first argument::

    limit                   nanoseconds that a word is waited for
    report                  address of a word in the host's memory: what was waited for in vain, 0 for nothing
    rank                    position of this rank among those that exchange
    stride                  words from one set of slots to the other
    slots_0 ... slots_W-1   addresses of every rank's slots
    name_0 ... name_W-1     what each rank is called in a report
    tickets                 what programs that claim their numbers count, 0 between launches (``codegen/claims.py``)
    launches                that there were, in the upper 32 bits, kept between launches

The programs of a launch together add one launch, 1 << 32, each a part of it at its end.  So all of them have read the
number before it is the next, whatever their grid.

A replay of a CUDA graph is one more launch.  A word that does not come within the limit is reported, and taken to be
NaN; what was reported, by any program or by the host, ends all other waits.  So does a word of a later launch, for a
rank that is late: the one that stored it has given up.  Which rows a program has is said in ``codegen/claims.py``, why
two sets are enough in ``docs/exchange_protocol.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.expr import Expr
from ..ir.op import Reduce
from ..schedulers.plan import KernelPlan, RankExchange
from .accumulators import accumulator
from .emitter import Emitter
from .exchange_functions import await_text, push_text
from .indexing import plus
from .interpreted_waits import NAME_BITS, ROW_BITS
from .source import MAILBOX

RANK, STRIDE, SLOTS = 2, 3, 4
"""Where in the table the rank's position, the distance of the sets and the addresses of slots are."""
FLAG_WORDS = 4
"""64-bit words from one flag of a row to the next: 32 bytes, the sector that a poll reads from L2."""


@dataclass(frozen=True)
class Reported:
    """What a kernel waited for in vain.  ``name``: of the rank, as the table has it."""

    epoch: int
    row: int
    name: int

    @staticmethod
    def of(word: int) -> Reported | None:
        """``None`` where nothing was reported."""
        if not word:
            return None
        return Reported(
            (word >> 32) & 0xFFFFFFFF, word >> NAME_BITS & ((1 << ROW_BITS) - 1), word & ((1 << NAME_BITS) - 1)
        )


def table(
    exchange: RankExchange,
    seconds: float,
    report: int,
    rank: int,
    words: int,
    slots: Sequence[int],
    names: Sequence[int],
) -> list[int]:
    """What a kernel with this ``exchange`` is given.

    report: address of a word that the host reads.  rank: position of this rank among those that exchange, for each of
    which come the address of its ``slots`` and the name that a report has for it, 1 or more.  words: of all slots of a
    rank.  Seconds beyond 73 years are those, as twice their nanoseconds are an int64.
    """
    head = [min(int(seconds * 1e9), 1 << 61), report, rank, words // 2, *slots, *names]
    return head + [0] * (table_words(exchange) - len(head))


def table_words(exchange: RankExchange) -> int:
    """64-bit words of a rank's table."""
    return SLOTS + 2 * exchange.ranks + 2 + (exchange.programs if exchange.is_in_rows else 0)


def slots_of(plan: KernelPlan) -> int:
    """64-bit words of each rank's slots, at the least."""
    exchange = plan.rank_exchange
    if exchange.is_in_rows:
        return flags_of_rows(exchange) + 2 * exchange.programs * (exchange.ranks - 1) * row_elements(plan) // 4
    return 2 * (words_of_ranks(plan) + member_words(plan))


def words_of_ranks(plan: KernelPlan) -> int:
    """64-bit words of a set of slots in which ranks give each other statistics, and what is sent in words."""
    exchange = plan.rank_exchange
    each = len(exchange.statistics) * exchange.parts
    each += sent_words(plan) * exchange.ranks if exchange.sent is not None else 0
    return exchanged_rows(plan) * each


def exchanged_rows(plan: KernelPlan) -> int:
    """Kept elements that slots are made for: of the rank that has most, in whole blocks."""
    block = plan.schedule.kept
    return -(-plan.space.kept // block) * block


def sent_words(plan: KernelPlan) -> int:
    """Words of a row of what is sent, in whole blocks."""
    return row_elements(plan) // 2


def member_words(plan: KernelPlan) -> int:
    """64-bit words of a set of slots in which the programs of each row give each other their parts of reductions."""
    exchange = plan.rank_exchange
    if exchange.members == 1:
        return 0
    return len(row_reductions(plan)) * plan.space.kept * exchange.members


def row_reductions(plan: KernelPlan) -> list[Expr]:
    """Those of one rank of which each program of a row has a part; a block of a row is of one program."""
    own = (e for e in plan.segment.exprs if isinstance(e.op, Reduce) and not plan.space.has_r(e.output))
    return [e for e in own if e.output not in plan.rank_exchange.statistics]


def row_elements(plan: KernelPlan) -> int:
    """Elements of a row of what is sent, in whole blocks."""
    return -(-plan.space.reduced // plan.schedule.reduced) * plan.schedule.reduced


def flags_of_rows(exchange: RankExchange) -> int:
    """64-bit words of the flags of rows: in two sets, for each program and peer."""
    return 2 * exchange.programs * (exchange.ranks - 1) * FLAG_WORDS


# lines of a kernel


def count_lines(exchange: RankExchange) -> list[str]:
    """Where programs and launches are counted."""
    at = SLOTS + 2 * exchange.ranks
    tickets = [f"tickets_ptr = {MAILBOX} + {at}"] if exchange.is_claimed else []
    return [*tickets, f"launches_ptr = {MAILBOX} + {at + 1}"]


def rank_lines(plan: KernelPlan) -> list[str]:
    """Before the loop over rows: the table, and which launch this is."""
    exchange = plan.rank_exchange
    ranks = exchange.ranks
    return [
        *count_lines(exchange),
        "epoch = (tl.load(launches_ptr) >> 32).to(tl.int32) + 1",
        *table_lines(ranks),
        f"set = (epoch & 1) * tl.load({MAILBOX} + {STRIDE})",
        *(f"slots_{k} = {slots_at(SLOTS + k)} + set" for k in range(ranks)),
        f"own = {slots_at(f'{SLOTS} + rank')} + set",
        *([f"peer = {slots_at(f'{SLOTS} + 1 - rank')} + set"] if exchange.sent is not None and ranks == 2 else []),
        *([f"member = tl.program_id(0) % {exchange.members}"] if exchange.members > 1 else []),
    ]


def table_lines(first_name: int) -> list[str]:
    """What every kernel whose ranks exchange reads of its table.  ``first_name``: addresses before the first name."""
    return [
        f"limit = tl.load({MAILBOX})",
        f"report = tl.load({MAILBOX} + 1)",
        f"rank = tl.load({MAILBOX} + {RANK})",
        f"names_ptr = {MAILBOX} + {SLOTS + first_name}",
    ]


def slots_at(place: int | str) -> str:
    """Text of the pointer to words whose address is at ``place`` of the table."""
    return f"tl.load({MAILBOX} + {place}).to(tl.pointer_type(tl.int64))"


def write_exchange(e: Emitter, parts: Sequence[tuple[Expr, str]]) -> None:
    """``parts``: the reductions of a phase with the text of what this rank has; emits what all ranks have."""
    if not parts:
        return
    exchange = e.plan.rank_exchange
    count, statistics, is_one_row = exchange.parts, exchange.statistics, not e.tile.x_lanes
    of_each, warps = count // exchange.ranks, e.schedule.launch.warps
    wait, own = f"await_{count}", f"rank * {of_each} + member" if of_each > 1 else "rank"
    e.helpers["push"] = push_text("push", is_one_row=is_one_row, interpret=e.interpret)
    e.helpers[wait] = await_text(
        wait, count, is_one_row=is_one_row, warps=warps, interpret=e.interpret, of_each=of_each
    )
    for expr, text in parts:
        out = expr.output
        write_part(e, expr, text)
        slot = f"{row_of(e)} * {len(statistics) * count}"
        e.out.line(f"{out}_slot = {plus(slot, statistics.index(out) * count)}")
        for k in range(exchange.ranks):
            e.out.line(f"push(slots_{k} + {out}_slot + {own}, epoch, {out}_part)")
    for expr, _ in parts:
        slots = [plus(f"own + {expr.output}_slot", k) for k in range(count)]
        write_whole(e, expr, wait, [*slots, "epoch", row_of(e), "limit, report, names_ptr"], count)


def write_members(e: Emitter, parts: Sequence[tuple[Expr, str]]) -> None:
    """Reductions of which each program of a row has a part, and which are of this rank alone: its programs give each
    other theirs.

    They are of one GPU and run at once, so that a wait for them is as long as the one for another rank, which ends
    first.
    """
    if not parts:
        return
    plan = e.plan
    members, rows, warps = plan.rank_exchange.members, exchanged_rows(plan), e.schedule.launch.warps
    first, every = words_of_ranks(plan), row_reductions(plan)
    e.helpers["push"] = push_text("push", is_one_row=True, interpret=e.interpret)
    e.helpers["await_members"] = await_text(
        "await_members", members, is_one_row=True, warps=warps, interpret=e.interpret, of_each=members
    )
    for expr, text in parts:
        out, at = expr.output, first + every.index(expr) * rows * members
        write_part(e, expr, text)
        e.out.line(f"{out}_at = own + {at} + {row_of(e)} * {members}")
        e.out.line(f"push({out}_at + member, epoch, {out}_part)")
    for expr, _ in parts:
        slots = [plus(f"{expr.output}_at", k) for k in range(members)]
        given = [*slots, "epoch", row_of(e), "2 * limit, report, names_ptr + rank"]
        write_whole(e, expr, "await_members", given, members)


def write_part(e: Emitter, expr: Expr, text: str) -> None:
    """The line that names what this program has of ``expr``."""
    acc = accumulator(expr)
    e.use(acc.helper)
    e.out.line(f"{expr.output}_part = {acc.prepared(text, acc.dtype)}")


def write_whole(e: Emitter, expr: Expr, wait: str, given: Sequence[str], count: int) -> None:
    """Waits, by the function ``wait`` of what is ``given``, for what so many have of ``expr``, and combines that.

    In the order in which they stand, so that all of them have the same bits.
    """
    acc, words = accumulator(expr), [f"{expr.output}_bits_{k}" for k in range(count)]
    e.out.line(f"{', '.join(words)} = {wait}({', '.join(given)})")
    whole, *rest = (f"{word}.to(tl.float32, bitcast=True)" for word in words)
    for value in rest:
        whole = acc.combined(whole, value)
    e.give(expr.output, acc, f"({whole})" if e.tile.x_lanes and not acc.helper else whole)


def row_of(e: Emitter) -> str:
    """Text of the kept elements of this turn, without lanes along r."""
    if e.tile.x_total == 1:
        return "tl.full([], 0, tl.int64)"
    if not e.tile.x_lanes:
        return "x"
    return f"tl.reshape(x, [{e.tile.x_block}])" if e.tile.r_lanes else "x"
