"""A group's rows with the exchange one row late: what a row waits for has come while the next one was read.

Of the loop that ``pipelined_row_loop.py`` makes this is what is done with a row: it is loaded, and this program's part
of the statistics is made, and posted for the next turn; then the parts of all are collected, which were posted a turn
ago, and what is made of row and statistics is stored.

Two rows are held at once, pairs of 16-bit values in one register each.  The loop has no loop or branch inside, for only
then does the compiler copy ahead: waiting is a single statement.  RMSNorm of 4096 x 65536, bfloat16, took 282 us on an
H200 so, 322 us where programs wait for the row that they have just read, a copy 257 us.  Where a row's part takes long,
as exponentials do, rows are read two turns ahead, into registers (a lag of 2, and a ``read`` apart from ``begin``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.op import is_statistic
from ..schedulers.limits import WARP, WARPS
from ..schedulers.schedule_parts import REGISTERS_OF_A_THREAD
from .bodies import load_and_compute, parts_of, take_whole, write_last_phase
from .group_exchange import EPOCH_STORE, post_lines, write_lagged_wait
from .misaligned import MisalignedRows
from .pipelined_row_loop import Rows, Turn, pipelined
from .row_blocks import sums_made_first
from .source import Text
from .statements import Statement, Writer, defined
from .tile import X_SIZE, Chunk
from .words import UNPACK, Words


class LaggedRows(Words):
    """An emitter that parts what makes a row's part of the statistics from what is made of the whole."""

    is_ahead = True
    """Is it writing what loads a row?"""

    def load(self, tensor: BoundTensor, chunk: Chunk) -> Text:
        if not self.space.is_streamed(tensor):
            return super().load(tensor, chunk)
        key, is_packed = (tensor, chunk.suffix), self.is_packed(tensor)
        if self.is_ahead:
            words = self.words[key] = f"{self.name(tensor, chunk)}_words"
            text = self.whole_words(tensor, chunk, words)
            if is_packed:
                self.use("packed")
                text = f"packed({text})"
            self.out.line(f"{words} = {text}")
            if self.schedule.lag > 1:
                return Text(words, tensor.dtype, False, True)
        return self.widened(tensor, chunk, self.words[key], is_packed=is_packed)

    def is_packed(self, tensor: BoundTensor) -> bool:
        """Two values of ``tensor`` in a word?  Not where a thread has one of each chunk."""
        return tensor.dtype in UNPACK and self.schedule.reduced > self.schedule.launch.warps * WARP

    def words_of(self, tensor: BoundTensor, chunk: Chunk) -> str | None:
        return super().words_of(tensor, chunk) if self.is_packed(tensor) else None

    def carry(self) -> None:
        """What was loaded of a row is among its ``words`` from here on."""
        if self.is_ahead:
            self.carried = list(self.words.values())
            self.words = {key: f"words[{k}]" for k, key in enumerate(self.words)}
        self.is_ahead = False

    @property
    def row_count(self) -> str:
        """Text of how many rows there are."""
        return "1" if self.tile.is_alone else X_SIZE

    @property
    def is_cut(self) -> bool:
        """Has the last turn fewer rows?"""
        return self.tile.x_total % self.schedule.turn != 0 or (self.space.is_invariant and self.schedule.turn > 1)

    def turn_lines(self) -> list[str]:
        """The rows of a turn, whose first is x, where there are several."""
        return []

    invariant: Sequence[Statement] = ()
    """The statements before the loop."""
    stored: Sequence[Statement] = ()
    """Those behind it."""
    carried: list[str]
    """What the next turn needs of a row."""
    reads: Sequence[Statement] = ()
    """The statements that load it, where it is loaded two rows ahead."""
    begun: list[Statement]
    """Those that make it, and this program's part of the statistics."""
    parts: list[tuple[DataType, str]]
    """That part: type and name of each number."""


class MisalignedLaggedRows(MisalignedRows, LaggedRows):
    """Of misaligned rows."""


def write_lagged_rows(e: LaggedRows) -> None:
    """Both parts of a turn: the first to ``e.begun``, the second as the body."""
    chunks = e.tile.chunks()
    reductions = e.reductions(0)
    e.begin()
    if e.schedule.lag > 1:
        _write_reads(e, chunks)
    write_begin(e, chunks)
    parts, sums = parts_of(e, reductions, chunks), _block_sums(e, chunks)
    end_begin(e, parts)
    e.values = {key: replace(value, text=e.words.pop(key)) for key, value in sums.items()}
    e.begin()
    take_whole(e, reductions, write_collect(e))
    e.out.paragraph()
    write_last_phase(e, chunks)


def _block_sums(e: LaggedRows, chunks: Sequence[Chunk]) -> dict[tuple[BoundTensor, str], Text]:
    """Sums of blocks of the row, by output and chunk: they are handed on with its words, and stored behind the wait.

    Stored before it they would be stored for the last row of all again, by groups that have read it ahead in vain.
    """
    found = {e.key(t, chunk): e.value(t, chunk) for t in sums_made_first(e.space) for chunk in chunks}
    e.words |= {key: value.text for key, value in found.items()}
    return found


def _write_reads(e: LaggedRows, chunks: Sequence[Chunk]) -> None:
    """The loads alone."""
    e.words = {}
    for chunk in chunks:
        for tensor in e.plan.segment.inputs:
            if e.space.is_streamed(tensor):
                e.value(tensor, chunk)
    e.reads = taken(e)
    e.carry()
    e.values = {}
    e.begin()


def taken(e: LaggedRows) -> list[Statement]:
    """The statements written so far, none of whose names what follows sees."""
    statements = e.body if e.head.statements else e.out.statements
    e.head, e.out, e.offsets = Writer(), Writer(), {}
    return statements


def write_begin(e: LaggedRows, chunks: Sequence[Chunk]) -> None:
    """What is done a row ahead: what is reduced, and the loads, unless they were done two rows ahead."""
    wanted = [x.tensors[0] for x in e.reductions(0)]
    if e.is_ahead:
        e.words = {}
        wanted += e.space.streamed
    load_and_compute(e, wanted, chunks)


def end_begin(e: LaggedRows, parts: list[tuple[DataType, str]]) -> None:
    """All lines up to here are ``e.begun``, which ends with this program's ``parts`` of the statistics."""
    e.parts = parts
    e.begun = taken(e)
    e.carry()


def write_collect(e: LaggedRows) -> list[str]:
    """Waits for the parts of this turn, which were posted in the one before; the text of each, of all members."""
    return write_lagged_wait(e, [dtype for dtype, _ in e.parts], by_one=_has_registers_left(e))


def _has_registers_left(e: LaggedRows) -> bool:
    """Is there a register to tell one thread from the others, so that it alone stores a word?

    None where a whole row is unpacked for a variance: LayerNorm of 1023 x 65537, bfloat16, spilled and took 179 us on
    an H200 where one thread stores, else 171.  None where a thread has all that there are: LayerNorm's backward of
    4096 x 12288 spilled 80 bytes; nor in a bounded program of more than 4 warps: group norm of 1 x 512 x 17 x 96 x 96,
    bfloat16, spilled 40, and nothing where all store.  Elsewhere one is better: softmax of 2048 x 131072, bfloat16,
    took 272 us so, else 279; RMSNorm's backward of 8192 x 32768 397 and 410.
    """
    is_unpacked = e.schedule.accumulated == 1 and any(is_statistic(x.op, "welford") for x in e.reductions(0))
    launch = e.schedule.launch
    is_full = launch.registers == REGISTERS_OF_A_THREAD[1] or (launch.registers is not None and launch.warps > WARPS)
    return not is_unpacked and not is_full


def pipelined_loop(e: LaggedRows, name: str, known: Sequence[str]) -> list[Statement]:
    """The body of the kernel.  ``known``: the names that stand before it."""
    turn = Turn(e.turn_lines(), e.reads, e.begun, post_lines(e, e.parts), e.body, e.carried, [n for _, n in e.parts])
    rows = Rows(e.row_count, e.schedule.turn, e.is_cut, "row" if e.interpret else "row.to(tl.int64)")
    known, stages = [*known, *defined(e.invariant)], e.schedule.launch.stages
    loop, functions = pipelined(name, turn, rows, known, stages=stages)
    e.helpers |= functions
    return [*e.invariant, *([""] if e.invariant else []), *loop, "", *e.stored, EPOCH_STORE]
