"""A team's rows with the exchange one row late: what a row waits for has come while the next one was read.

    words, part = begin(first row)                      loads, and this program's part of the statistics
    post(part)
    for row of the team's rows:
        ahead, part = begin(next row)                   copied ahead of time by the compiler
        post(part)                                      for the next turn
        whole = collect()                               of this row: posted a turn ago
        store what is made of words and whole
        words = ahead

Two rows are held at once, pairs of 16-bit values in one register each.  The loop has no loop or branch inside, for only
then does the compiler copy ahead: waiting is a single statement.  RMSNorm of 4096 x 65536, bfloat16, took 282 us on an
H200 so, 322 us where programs wait for the row that they have just read, a copy 257 us.  Where a row's part takes long,
as exponentials do, rows are read two turns ahead, into registers (``late`` of 2, and a ``read`` apart from ``begin``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.op import is_statistic
from ..schedulers.limits import WARP, WARPS
from ..schedulers.schedule_parts import REGISTERS_OF_A_THREAD
from .arithmetic import converted
from .bodies import load_and_compute, parts_of, take_whole, write_last_phase
from .group_exchange import collect_late_lines, polled_helpers, post_lines
from .misaligned import OddRows
from .source import Text, Writer, call_of, signature, tuple_of
from .tile import X_SIZE, Chunk
from .words import UNPACK, Words

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"^\s*([A-Za-z_][\w, ]*?) =(?!=)")


class Late(Words):
    """An emitter that parts what makes a row's part of the statistics from what is made of the whole."""

    is_ahead = True
    """Is it writing what loads a row?"""

    def load(self, tensor: BoundTensor, chunk: Chunk) -> Text:
        if not self.space.is_streamed(tensor):
            return super().load(tensor, chunk)
        name, is_packed = self.name(tensor, chunk), self.is_packed(tensor)
        words = f"{name}_words"
        if self.is_ahead:
            text = self.whole_words(tensor, chunk, words)
            if is_packed:
                self.use("packed")
                text = f"packed({text})"
            self.out.line(f"{words} = {text}")
            self.carried.append(words)
            if self.schedule.lag > 1:
                return Text(words, tensor.dtype, False, True)
        else:
            words = f"words[{self.carried.index(words)}]"
        if not is_packed:
            words = converted(words, tensor.dtype, tensor.dtype.compute)
            return self.assign(name, words, tensor.dtype.compute, False, True)
        self.use(UNPACK[tensor.dtype])
        return self.assign(name, f"{UNPACK[tensor.dtype]}({words})", DataType.Float, False, True)

    def is_packed(self, tensor: BoundTensor) -> bool:
        """Two values of ``tensor`` in a word?  Not where a thread has one of each chunk."""
        return tensor.dtype in UNPACK and self.schedule.reduced > self.schedule.launch.warps * WARP

    def words_of(self, tensor: BoundTensor, chunk: Chunk) -> str | None:
        words = f"{self.name(tensor, chunk)}_words"
        if words not in self.carried or not self.is_packed(tensor):
            return None
        return words if self.is_ahead else f"words[{self.carried.index(words)}]"

    def begin(self) -> None:
        """Lines that a row begins with."""

    @property
    def row_count(self) -> str:
        """Text of how many rows there are."""
        return "1" if self.tile.is_alone else X_SIZE

    @property
    def step(self) -> str:
        """Text that makes rows of turns, of which each has several."""
        return f" * {self.schedule.turn}" if self.schedule.turn > 1 else ""

    @property
    def is_cut(self) -> bool:
        """Has the last turn fewer rows?"""
        return self.tile.x_total % self.schedule.turn != 0 or (self.space.is_invariant and self.schedule.turn > 1)

    def turn_lines(self) -> list[str]:
        """The rows of a turn, whose first is x, where there are several."""
        return []

    invariant: Sequence[str] = ()
    """The lines before the loop."""
    stored: Sequence[str] = ()
    """The lines behind it."""
    carried: list[str]
    """What the next turn needs of a row."""
    reads: Sequence[str] = ()
    """The lines that load it, where it is loaded two rows ahead."""
    begun: list[str]
    """The lines that make it, and this program's part of the statistics."""
    parts: list[tuple[DataType, str]]
    """That part: type and name of each number."""


class OddLate(OddRows, Late):
    """Of misaligned rows."""

    def begin(self) -> None:
        self.begin_row()


def write_late(e: Late) -> None:
    """Both parts of a turn: the first to ``e.begun``, the second as the body."""
    chunks = e.tile.chunks()
    reductions = e.reductions(0)
    e.begin()
    if e.schedule.lag > 1:
        _write_reads(e, chunks)
    write_begin(e, chunks)
    end_begin(e, parts_of(e, reductions, chunks))
    e.values = {}
    e.begin()
    take_whole(e, reductions, write_collect(e))
    e.out.paragraph()
    write_last_phase(e, chunks)


def _write_reads(e: Late, chunks: Sequence[Chunk]) -> None:
    """The loads alone."""
    e.carried = []
    for chunk in chunks:
        for tensor in e.plan.segment.inputs:
            if e.space.is_streamed(tensor):
                e.value(tensor, chunk)
    e.reads, e.is_ahead = taken(e), False
    e.values = {}
    e.begin()


def taken(e: Late) -> list[str]:
    """The lines written so far, none of which what follows sees."""
    lines = [*e.head.lines, *([""] if e.head.lines else []), *e.out.lines]
    e.head, e.out, e.offsets = Writer(), Writer(), {}
    return lines


def write_begin(e: Late, chunks: Sequence[Chunk]) -> None:
    """What is done a row ahead: what is reduced, and the loads, unless they were done two rows ahead."""
    wanted = [x.tensors[0] for x in e.reductions(0)]
    if e.is_ahead:
        e.carried = []
        wanted += [t for t in e.plan.segment.inputs if e.space.is_streamed(t)]
    load_and_compute(e, wanted, chunks)


def end_begin(e: Late, parts: list[tuple[DataType, str]]) -> None:
    """All lines up to here are ``e.begun``, which ends with this program's ``parts`` of the statistics."""
    e.parts = parts
    e.begun = taken(e)
    e.is_ahead = False


def write_collect(e: Late) -> list[str]:
    """Waits for the parts of this turn, which were posted in the one before; the text of each, of all members."""
    e.helpers |= polled_helpers(len(e.parts), e.turns, by_one=_has_registers_left(e), interpret=e.interpret)
    lines, whole = collect_late_lines(e.plan, [dtype for dtype, _ in e.parts], e.tile.exchanged)
    for line in lines:
        e.out.line(line)
    return whole


def _has_registers_left(e: Late) -> bool:
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


def _begin_function(e: Late, name: str, known: Sequence[str]) -> list[str]:
    """Makes ``begin`` a helper; gives its arguments: the names that it uses of ``known``, and the row x."""
    parts = ", ".join(n for _, n in e.parts)
    begun = [*e.turn_lines(), *e.begun]
    if e.reads:
        return _function(e, f"begin_{name}", [*begun, f"    return {parts}"], [*known, "x", "words"])
    last = ["", *tuple_of("words", e.carried), f"    return words, {parts}"]
    return _function(e, f"begin_{name}", [*begun, *last], [*known, "x"])


def _function(e: Late, name: str, lines: Sequence[str], known: Sequence[str]) -> list[str]:
    used = {n for line in lines for n in _NAME.findall(line)}
    given = [n for n in dict.fromkeys(known) if n in used]
    e.helpers[name] = signature(name, given, []) + "\n".join(lines) + "\n"
    return given


def _begin_lines(e: Late, name: str, known: Sequence[str]) -> tuple[list[str], list[str]]:
    """The lines that read rows and post what they give, before the loop and in it."""
    given = _begin_function(e, name, known)
    parts, post = ", ".join(n for _, n in e.parts), post_lines(e.plan, e.parts, e.tile.exchanged)
    first = call_of(f"words, {parts}", f"begin_{name}", given, 1)
    turn = [_row(e, f"row + teams{e.step}"), *call_of(f"ahead, {parts}", f"begin_{name}", given, 2)]
    return [*first, *post], [*turn, *post]


def _two_ahead(e: Late, name: str, known: Sequence[str]) -> tuple[list[str], list[str]]:
    """``_begin_lines`` where loads are done one turn before what is made of them."""
    returned = ["", *tuple_of("words", e.carried), "    return words"]
    read = _function(e, f"read_{name}", [*e.reads, *returned], [*known, "x"])
    begin = _begin_function(e, name, known)
    of_ahead = ["ahead" if n == "words" else n for n in begin]
    parts, post = ", ".join(n for _, n in e.parts), post_lines(e.plan, e.parts, e.tile.exchanged)
    first = [*call_of("words", f"read_{name}", read, 1), *call_of(parts, f"begin_{name}", begin, 1), *post]
    first += [_row(e, "team + teams"), *call_of("ahead", f"read_{name}", read, 1)]
    turn = [_row(e, "row + 2 * teams"), *call_of("beyond", f"read_{name}", read, 2), _row(e, "row + teams")]
    return first, [*turn, *call_of(parts, f"begin_{name}", of_ahead, 2), *post]


def _row(e: Late, text: str) -> str:
    """x of the turn that begins with this row, or of the last turn again."""
    return f"x = tl.minimum({text}, {e.row_count} - {1 if e.is_cut else e.schedule.turn}).to(tl.int64)"


def _names_of(lines: Sequence[str], parameters: Iterable[str]) -> list[str]:
    """The names that a kernel has behind ``lines``."""
    known = [p.split(":")[0] for p in parameters]
    return known + [n.strip() for line in lines if (m := _ASSIGNED.match(line)) for n in m[1].split(",")]


def pipelined_loop(e: Late, name: str, preamble: Sequence[str], parameters: Iterable[str]) -> list[str]:
    """The body of the kernel; ``begin`` goes to the helpers."""
    known, last = _names_of([*preamble, *e.invariant], parameters), ["words = ahead"]
    first, turn = (_two_ahead if e.schedule.lag > 1 else _begin_lines)(e, name, known)
    last += ["ahead = beyond"] if e.schedule.lag > 1 else []
    start = f"(team{e.step})" if e.step else "team"
    first = [f"x = {start}.to(tl.int64)", *first]
    turn = [*turn, "x = row" if e.interpret else "x = row.to(tl.int64)"]
    rows = f"team{e.step}, {e.row_count}, teams{e.step}"
    body = [*turn, *(line[4:] for line in (*e.turn_lines(), *e.head.lines, "", *e.out.lines)), *last]
    return [
        *e.invariant,
        *([""] if e.invariant else []),
        *(f"    {line}" for line in first),
        "",
        f"    for row in tl.range({rows}, num_stages={e.schedule.launch.stages}):",
        *(f"        {line}" if line else "" for line in body),
        "",
        *e.stored,
        "    tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))",
    ]
