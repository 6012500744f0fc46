"""The loops of a kernel whose ranks exchange: over the programs whose rows this one has, and over their rows.

Programs are as many as all ranks have agreed on; the rows of program ``p`` are ``p``, ``p + programs`` and so on, and
those of a group of programs that share rows alike.  How many run at a time is each rank's own: NCCL is to find
multiprocessors, whatever process groups there are (``mesh/gpu_room.py``).

A grid that has one program for each of the multiprocessors that it may take, at most, holds no more of them, wherever
the GPU places its programs.  All of them come to run: what holds the other multiprocessors are programs of NCCL, for
which these are not needed, and programs that end by themselves.  So the launch need not be cooperative, which takes
1 us more: one row of 8192, norm and partial sums, took 2.8 and 4.1 us in a CUDA graph on 2 x H200, and 3.7 and 5.0
cooperatively.  Of words, whose slots belong to rows, a smaller grid takes the same rows.  Where rows are
sent, whose slots belong to programs, launches follow one another, each with the next programs.

Where several programs fit on a multiprocessor, the GPU spreads them over all.  There the grid has as many as fill the
GPU: those that find themselves on a multiprocessor which is to be left end at once, and the others claim the numbers of
programs, one after the other, until none is left.  Where all would end at once, the last one to begin stays.  A launch
is over when each program has ended at once or has claimed once in vain: claims are then as many as programs and those
that stayed, which they are at no other time.

Both take numbers in ascending order: so ranks wait for one another in no circle (``docs/exchange_protocol.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..schedulers.exchange_room import LEFT_FREE, free_multiprocessors
from ..schedulers.plan import KernelPlan, RankExchange
from .mesh_exchange import SLOTS
from .source import MAILBOX, KernelSource
from .statements import Branch, Loop, Statement, While

ROOM, FIRST = "room", "first"
"""Arguments: multiprocessors that programs which claim their numbers may be on, those with the least numbers; and the
number of a grid's first program, where rows are sent."""
_CLAIMS = 16
"""Bits of the claims that programs count in one word; above them stand the programs that ended at once."""
_BEGIN = '''@triton.jit
def begin(tickets_ptr, {room}):
    """What is counted once this program has begun: with a claim of its own, if its multiprocessor may be taken.

    The last one has one in any case where no other program has.
    """
    is_in = {here} < {room}
    first = tl.where(is_in, 1, {leave})
    counted = tl.atomic_add(tickets_ptr, first.to(tl.int64), sem="relaxed").to(tl.int32) + first
    is_alone = (counted >> {bits}) == tl.num_programs(0)
    if is_alone:
        tl.atomic_add(tickets_ptr, {back}, sem="relaxed")
    return tl.where(is_alone, counted + {back}, counted), is_in | is_alone
'''
_IS_OVER = '''@triton.jit
def is_over(counted, programs):
    """Has each program that has not ended at once claimed one more than there are?"""
    return (counted & {claims}) == programs + tl.num_programs(0) - (counted >> {bits})
'''
_HERE = 'tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)'


def claim_helpers(*, interpret: bool) -> dict[str, str]:
    """The functions by which programs count.  Under the interpreter all are on multiprocessor 0."""
    leave, here = 1 << _CLAIMS, "0" if interpret else _HERE
    begin = _BEGIN.format(room=ROOM, here=here, leave=leave, bits=_CLAIMS, back=1 - leave)
    return {"begin": begin, "is_over": _IS_OVER.format(bits=_CLAIMS, claims=leave - 1)}


def grid_of(exchange: RankExchange, blocks: int, multiprocessors: int) -> int:
    """Programs of a launch for so many blocks of rows, on a GPU with all but what NCCL takes for one group."""
    if not exchange.is_claimed:
        return min(blocks, exchange.programs // exchange.members) * exchange.members
    free = free_multiprocessors(multiprocessors)
    return -(-min(blocks, exchange.programs) // free) * (free + LEFT_FREE)


def programs_at_once(plan: KernelPlan) -> int:
    """Multiprocessors that a launch takes where it may."""
    exchange = plan.rank_exchange
    free = free_multiprocessors(plan.device.multiprocessors)
    return free if exchange.is_claimed else min(plan.turns * exchange.members, free)


def integers_of(exchange: RankExchange, multiprocessors: int) -> dict[str, tuple[int, str]]:
    """The last arguments, with their values and types: on a GPU with all but what NCCL takes for one group."""
    if exchange.is_claimed:
        return {ROOM: (free_multiprocessors(multiprocessors), "tl.int32")}
    return {FIRST: (0, "tl.int32")} if exchange.is_in_rows else {}


def within(source: KernelSource, exchange: RankExchange, multiprocessors: int) -> list[KernelSource]:
    """The launches that follow one another for one of ``source``, so that none takes more multiprocessors than that.

    Where that is less than the least that a launch takes, it takes so many.
    """
    *others, last = source.integers or (0,)
    if exchange.is_claimed:
        return [replace(source, integers=(*others, max(multiprocessors, 1)))]
    most = max(multiprocessors // exchange.members, 1) * exchange.members
    if source.grid <= most:
        return [source]
    if not exchange.is_in_rows:
        return [replace(source, grid=most)]
    firsts = range(last, source.grid, most)
    return [replace(source, grid=min(most, source.grid - k), integers=(*others, k)) for k in firsts]


def program_loops(body: Sequence[Statement], rows: str, exchange: RankExchange) -> list[Statement]:
    """``body`` for each block of rows of the program in turn; then it has seen this launch.

    ``rows``: text of the number of blocks, "" for a single one.
    """
    statements = _in_programs(_in_rows(body, rows, exchange), rows, exchange)
    if not exchange.is_in_rows or exchange.is_claimed:
        statements += _counted(exchange)
    return ["", *statements]


def _in_rows(body: Sequence[Statement], rows: str, exchange: RankExchange) -> Sequence[Statement]:
    if not rows:
        return body
    each = f" // {exchange.members}" if exchange.members > 1 else ""
    first, step = f"tl.program_id(0){each}", f"tl.num_programs(0){each}"
    if exchange.is_in_rows or exchange.is_claimed:
        first, step = "program", "programs"
    return [Loop("row", first, rows, step, 1, body)]


def _in_programs(statements: Sequence[Statement], rows: str, exchange: RankExchange) -> list[Statement]:
    """``statements`` for the program, or for all that it claims."""
    if not exchange.is_in_rows and not exchange.is_claimed:
        return [*statements, ""]
    if exchange.is_in_rows:
        # no thread reads the number after another has moved it on
        ending = ["tl.debug_barrier()", "tl.store(epochs_ptr, (late.to(tl.int64) << 32) | epoch.to(tl.int64))"]
        statements = [*_turns(exchange), *statements, *ending]
    head = f"programs = tl.minimum({rows or 1}, {exchange.programs})"
    if not exchange.is_claimed:
        return [head, f"program = {FIRST} + tl.program_id(0)", *statements]
    number = f"(counted & {(1 << _CLAIMS) - 1}) - 1"
    again = [
        "tl.debug_barrier()",
        'counted = tl.atomic_add(tickets_ptr, 1, sem="relaxed").to(tl.int32) + 1',
        f"program = {number}",
    ]
    return [
        head,
        f"counted, is_in = begin(tickets_ptr, {ROOM})",
        f"program = tl.where(is_in, {number}, programs)",
        While("program < programs", [*statements, *again]),
        "",
    ]


def _turns(exchange: RankExchange) -> list[str]:
    """How many turns the program has had."""
    return [
        f"epochs_ptr = {MAILBOX} + {SLOTS + 2 * exchange.ranks + 2} + program",
        "seen = tl.load(epochs_ptr)",
        "epoch = seen.to(tl.int32)",
        "late = (seen >> 32).to(tl.int32)",
    ]


def _counted(exchange: RankExchange) -> list[Statement]:
    """The end of a launch, which no thread comes to before another has read its number."""
    if exchange.is_claimed:  # whoever comes last has counted for all
        end = ["tl.store(tickets_ptr, 0)", f'tl.atomic_add(launches_ptr, {1 << 32}, sem="relaxed")']
        return [Branch("is_over(counted, programs)", end)]
    return [
        "tl.debug_barrier()",
        f"rest = {(1 << 32) + 1} - tl.num_programs(0).to(tl.int64)",
        "part = tl.where(tl.program_id(0) == 0, rest, 1)",
        'tl.atomic_add(launches_ptr, part, sem="relaxed")',
    ]
