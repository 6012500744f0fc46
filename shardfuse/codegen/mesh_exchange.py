"""The exchange of ranks inside of a kernel: statistics of a row that is sharded, pushed to every peer's memory.

Each rank stores one word for each statistic of each row, ``epoch << 32 | bits``, into a slot of every rank's symmetric
memory, and waits for the words of all in its own.  The value is the flag: a word is one 64-bit access, relaxed, of
system scope, so that no fence and no second flag is needed.  What comes is combined in the order of the ranks, so that
all of them have the same bits.

A rank's slots are indexed by what all ranks of a program agree on, never by program or turn, in two sets::

    slots   [rows, statistics, ranks]   int64; rows: kept elements, up to whole blocks
            [rows, ranks, words]        of a tensor that is sent, two 16-bit elements in a word

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

Rows belong to programs in turn, to as many as all ranks have agreed on.  A rank may run fewer at a time: a grid that is
smaller takes what follows in order, and so do those that claim their numbers (``codegen/claims.py``).

Two sets are enough: a rank that posts in launch e + 2 has read a word of launch e + 1 from every peer, and a peer posts
that only when its launch e has ended.  A replay of a CUDA graph is one more launch.  A word that does not come within
the limit is reported, and taken to be NaN; what was reported, by any program or by the host, ends all other waits.  So
does a word of a later launch, for a rank that is late: the one that stored it has given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.expr import Expr
from ..schedulers.plan import KernelPlan, RankExchange
from ..schedulers.sent_words import member_words, row_elements, words_of_rows
from .accumulators import accumulator
from .emitter import Emitter
from .group_exchange import MAILBOX
from .interpreted_waits import INTERPRETED_PUSH, LATER, NAME_BITS, NAN, ROW_BITS, interpreted_await

RANK, STRIDE, SLOTS = 2, 3, 4
"""Where in the table the rank's position, the distance of the sets and the addresses of slots are."""
AT_ONCE, REST = 32, 40
"""Polls that follow one another; and nanoseconds between later ones.  Where all 16 warps of 64 programs polled, without
a rest, a launch took 610 us on 2 x H200: until they looked at the clock.  One warp of each takes 3 to 4."""
POLLS = 1024
"""Between two looks at the clock and at the report: a fraction of a millisecond."""
_OTHER_WARPS = ["mov.u32 late, %tid.x; setp.gt.u32 go, late, 31;", "@go bra done;"]

_PUSH = '''@triton.jit
def push(ptr, epoch, value):
    """Store the 32 bits of ``value`` below ``epoch``, for another GPU to see at once."""
    tl.inline_asm_elementwise(
        """{{
            {registers}
            mov.b64 word, {{$2, $3}};
            {store}
            mov.u32 $0, 0;
        }}""",
        "=r,l,r,r",
        [ptr, value.to(tl.int32, bitcast=True), epoch],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
'''

_AWAIT = '''@triton.jit
def await_{ranks}({pointers}, epoch, row, limit, report, names_ptr):
    """The values that all ranks have for ``row``, once every word carries ``epoch``; NaN for what does not come."""
    place = (epoch.to(tl.int64) << 32) | ((row & {rows}) << {name_bits})
    return tl.inline_asm_elementwise(
        """{{
{lines}
        }}""",
        "{constraints}",
        [{pointers}, epoch, limit, report, place, names_ptr],
        dtype={types},
        is_pure=False,
        pack={pack},
    )
'''

_AWAIT_ONCE = '''@triton.jit
def await_{ranks}({pointers}, epoch, row, limit, report, names_ptr):
    """The values that all ranks have for ``row``, once every word carries ``epoch``; NaN for what does not come.

    One warp waits for all: so many loads of one line at a time hold up the stores that they wait for.
    """
    place = (epoch.to(tl.int64) << 32) | ((row & {rows}) << {name_bits})
    tl.inline_asm_elementwise(
        """{{
{lines}
        }}""",
        "{constraints}",
        [{pointers}, epoch, limit, report, place, names_ptr],
        dtype={types},
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
    return tl.inline_asm_elementwise(
        """{{
{taking}
        }}""",
        "{taken}",
        [{pointers}, epoch],
        dtype={types},
        is_pure=False,
        pack=1,
    )
'''


def push_text(*, is_one_row: bool, interpret: bool) -> str:
    """``is_one_row``: a program has one number, which its first thread stores; else threads store those they have."""
    if interpret:
        return INTERPRETED_PUSH
    registers = ".reg .b64 word;"
    store = "st.relaxed.sys.global.b64 [$1], word;"
    if is_one_row:
        registers = ".reg .b64 word; .reg .pred first; .reg .u32 thread;"
        store = "mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; @first " + store
    return _PUSH.format(registers=registers, store=store)


def await_text(
    ranks: int, *, is_one_row: bool, warps: int, interpret: bool, pack: int = 1, is_one_name: bool = False
) -> str:
    """The function that waits for one word of each of so many ranks.  ``is_one_row``: as of ``push_text``.

    ``pack``: words of each rank that a thread asks for at once.  ``is_one_name``: are all of one rank?
    """
    if interpret:
        return interpreted_await(ranks)
    pointers = ", ".join(f"ptr{k}" for k in range(ranks))
    is_alone = is_one_row and warps > 1
    words = ranks * pack
    each = range(words)
    epoch, limit, report, place, names = (f"${2 * words + k * pack}" for k in range(5))
    lines = [
        ".reg .pred go; .reg .b64 since, now, told, name;",
        *_words(words),
        ".reg .u32 turns, late;",
        "mov.u32 turns, 0; mov.u64 since, 0;",
        *([*(f"mov.u32 bits{k}, 0;" for k in each), *_OTHER_WARPS] if is_alone else []),
        "again:",
        *_loading(words, words),
        *polling(words, epoch, report, "leave"),
        # a word of a later launch: its rank has given up an earlier one; older ones may be of any age
        *(
            f"sub.u32 late, found{k}, {epoch}; sub.u32 late, late, 1; setp.lt.u32 go, late, {LATER}; @go bra gone;"
            for k in each
        ),
        *until(limit),
        "gone:",
        *reporting(words, words if is_one_name else pack, epoch, report, place, names),
        "leave:",
        *_without_late(words, epoch),
        "done:",
        *(f"mov.u32 ${k}, bits{k};" for k in each),
    ]
    return (_AWAIT_ONCE if is_alone else _AWAIT).format(
        ranks=ranks,
        pack=pack,
        pointers=pointers,
        rows=f"0x{(1 << ROW_BITS) - 1:X}",
        name_bits=NAME_BITS,
        types=f"({', '.join(['tl.int32'] * ranks)})" if ranks > 1 else "tl.int32",
        constraints=",".join(["=r"] * words + ["l"] * words + ["r"] * pack + ["l"] * 4 * pack),
        lines=indented(lines),
        taking=indented(_taking(ranks)),
        taken=",".join(["=r"] * ranks + ["l"] * ranks + ["r"]),
    )


def _taking(ranks: int) -> list[str]:
    """What other warps do once the first has seen all words."""
    return [
        ".reg .pred go;",
        *_words(ranks),
        *_loading(ranks, ranks),
        *_without_late(ranks, f"${2 * ranks}"),
        *(f"mov.u32 ${k}, bits{k};" for k in range(ranks)),
    ]


def indented(lines: Sequence[str]) -> str:
    return "\n".join(" " * (8 if line.endswith(":") else 12) + line for line in lines)


def _words(ranks: int) -> list[str]:
    return [f".reg .b64 word<{ranks}>; .reg .u32 bits<{ranks}>, found<{ranks}>;"]


def _loading(ranks: int, first: int) -> list[str]:
    """The words at the operands from number ``first`` on: all are under way at once."""
    loads = [f"ld.relaxed.sys.global.b64 word{k}, [${first + k}];" for k in range(ranks)]
    return [*loads, *(f"mov.b64 {{bits{k}, found{k}}}, word{k};" for k in range(ranks))]


def _without_late(ranks: int, epoch: str) -> list[str]:
    """NaN for what has not come."""
    return [f"setp.ne.u32 go, found{k}, {epoch}; @go mov.u32 bits{k}, {NAN};" for k in range(ranks)]


def polling(flags: int, expected: str, report: str, leave: str) -> list[str]:
    """Goes back to ``again`` until all flags are as expected; now and then goes on, to ``leave`` after a report."""
    return [
        *(f"setp.{'eq.and' if k else 'eq'}.u32 go, found{k}, {expected}{', go' if k else ''};" for k in range(flags)),
        "@go bra done;",
        f"add.u32 turns, turns, 1; setp.lt.u32 go, turns, {AT_ONCE};",
        "@go bra again;",
        f"nanosleep.u32 {REST};",
        f"and.b32 late, turns, {POLLS - 1}; setp.ne.u32 go, late, 0;",
        "@go bra again;",
        f"ld.relaxed.sys.global.b64 told, [{report}];",
        "setp.ne.u64 go, told, 0;",
        f"@go bra {leave};",
    ]


def until(limit: str) -> list[str]:
    """Goes back to ``again`` within the limit, by the GPU's clock."""
    return [
        "mov.u64 now, %globaltimer;",
        "setp.eq.u64 go, since, 0;",
        "@go mov.u64 since, now;",
        "sub.u64 now, now, since;",
        f"setp.lt.u64 go, now, {limit};",
        "@go bra again;",
    ]


def reporting(words: int, pack: int, epoch: str, report: str, place: str, names: str) -> list[str]:
    """The first rank whose word is missing goes into the report."""
    each = reversed(range(words))
    return [
        *(f"setp.ne.u32 go, found{k}, {epoch}; @go mov.u32 late, {8 * (k // pack)};" for k in each),
        f"cvt.u64.u32 now, late; add.u64 now, {names}, now; ld.global.b64 name, [now];",
        f"or.b64 told, {place}, name; st.relaxed.sys.global.b64 [{report}], told;",
    ]


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
    plan: KernelPlan, seconds: float, report: int, rank: int, words: int, slots: Sequence[int], names: Sequence[int]
) -> list[int]:
    """What the kernel of ``plan`` is given.

    report: address of a word that the host reads.  rank: position of this rank among those that exchange, for each of
    which come the address of its ``slots`` and the name that a report has for it, 1 or more.  words: of all slots of a
    rank.  Seconds beyond 73 years are those, as twice their nanoseconds are an int64.
    """
    head = [min(int(seconds * 1e9), 1 << 61), report, rank, words // 2, *slots, *names]
    return head + [0] * (table_words(plan) - len(head))


def table_words(plan: KernelPlan) -> int:
    """64-bit words of a rank's table."""
    exchange = plan.exchange
    assert exchange is not None, "a kernel whose ranks exchange"
    return SLOTS + 2 * exchange.ranks + 2 + (exchange.programs if exchange.is_in_rows else 0)


def slots_of(plan: KernelPlan) -> int:
    """64-bit words of each rank's slots, at the least."""
    exchange = plan.exchange
    assert exchange is not None, "a kernel whose ranks exchange"
    if exchange.is_in_rows:
        return words_of_rows(plan)
    each = len(exchange.statistics) + (sent_words(plan) if exchange.sent is not None else 0)
    return 2 * (exchanged_rows(plan) * each * exchange.ranks + member_words(plan))


def sent_words(plan: KernelPlan) -> int:
    """Words of a row of what is sent, in whole blocks."""
    return row_elements(plan) // 2


# lines of a kernel


def exchanged_rows(plan: KernelPlan) -> int:
    """Kept elements that slots are made for: of the rank that has most, in whole blocks."""
    block = plan.schedule.kept
    return -(-plan.space.kept // block) * block


def count_lines(exchange: RankExchange) -> list[str]:
    """Where programs and launches are counted."""
    at = SLOTS + 2 * exchange.ranks
    tickets = [f"tickets_ptr = {MAILBOX} + {at}"] if exchange.is_claimed else []
    return [*tickets, f"launches_ptr = {MAILBOX} + {at + 1}"]


def head_lines(plan: KernelPlan) -> list[str]:
    """Before the loop over rows: the table, and which launch this is."""
    exchange = plan.exchange
    assert exchange is not None, "a kernel whose ranks exchange"
    ranks = exchange.ranks
    own = f"own = tl.load({MAILBOX} + {SLOTS} + rank).to(tl.pointer_type(tl.int64)) + set"
    peer = f"peer = tl.load({MAILBOX} + {SLOTS} + 1 - rank).to(tl.pointer_type(tl.int64)) + set"
    return [
        *count_lines(exchange),
        "epoch = (tl.load(launches_ptr) >> 32).to(tl.int32) + 1",
        f"limit = tl.load({MAILBOX})",
        f"report = tl.load({MAILBOX} + 1)",
        f"rank = tl.load({MAILBOX} + {RANK})",
        f"names_ptr = {MAILBOX} + {SLOTS + ranks}",
        f"set = (epoch & 1) * tl.load({MAILBOX} + {STRIDE})",
        *(f"slots_{k} = tl.load({MAILBOX} + {SLOTS + k}).to(tl.pointer_type(tl.int64)) + set" for k in range(ranks)),
        own,
        *([peer] if exchange.sent is not None and ranks == 2 else []),
        *([f"member = tl.program_id(0) % {exchange.members}"] if exchange.members > 1 else []),
    ]


def write_exchange(e: Emitter, parts: Sequence[tuple[Expr, str]]) -> None:
    """``parts``: the reductions of a phase with the text of what this rank has; emits what all ranks have."""
    if not parts:
        return
    exchange = e.plan.exchange
    assert exchange is not None, "a kernel whose ranks exchange"
    ranks, statistics = exchange.ranks, exchange.statistics
    e.helpers["push"] = push_text(is_one_row=not e.tile.x_lanes, interpret=e.interpret)
    e.helpers[f"await_{ranks}"] = await_text(
        ranks, is_one_row=not e.tile.x_lanes, warps=e.schedule.launch.warps, interpret=e.interpret
    )
    for expr, text in parts:
        acc, out = accumulator(expr), expr.output
        e.use(acc.helper)
        e.out.line(f"{out}_part = {acc.prepared(text, acc.dtype)}")
        at = len(statistics) * ranks
        slot = statistics.index(out) * ranks
        e.out.line(f"{out}_slot = {row_of(e)} * {at}{f' + {slot}' if slot else ''}")
        for k in range(ranks):
            e.out.line(f"push(slots_{k} + {out}_slot + rank, epoch, {out}_part)")
    for expr, _ in parts:
        acc, out = accumulator(expr), expr.output
        words = [f"{out}_bits_{k}" for k in range(ranks)]
        pointers = [f"own + {out}_slot{f' + {k}' if k else ''}" for k in range(ranks)]
        e.out.line(
            f"{', '.join(words)} = await_{ranks}({', '.join(pointers)}, epoch, {row_of(e)}, limit, report, names_ptr)"
        )
        whole = f"{words[0]}.to(tl.float32, bitcast=True)"
        for word in words[1:]:
            whole = acc.combined(whole, f"{word}.to(tl.float32, bitcast=True)")
        e.give(out, acc, f"({whole})" if e.tile.x_lanes and not acc.helper else whole)


def row_of(e: Emitter) -> str:
    """Text of the kept elements of this turn, without lanes along r."""
    if e.tile.x_total == 1:
        return "tl.full([], 0, tl.int64)"
    if not e.tile.x_lanes:
        return "x"
    return f"tl.reshape(x, [{e.tile.x_block}])" if e.tile.r_lanes else "x"
