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
H200 so, 322 us where programs wait for the row that they have just read, a copy 257 us.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from .bodies import parts_of, take_whole, write_last_phase
from .emitter import Emitter, Text
from .exchange import POST, collect_late, collect_late_lines, post_lines
from .hints import hint
from .packed import PACKED, UNPACK
from .source import Writer, call_of, signature, tuple_of
from .tile import Chunk

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"^\s*([A-Za-z_][\w, ]*?) =(?!=)")


class Late(Emitter):
    """An emitter that parts what makes a row's part of the statistics from what is made of the whole."""

    is_ahead = True
    """Is it writing what is done a row ahead?"""

    def load(self, tensor: BoundTensor, chunk: Chunk) -> Text:
        if not self.space.is_streamed(tensor):
            return super().load(tensor, chunk)
        name = self.name(tensor, chunk)
        words = f"{name}_words"
        unpack = UNPACK.get(tensor.dtype)
        if self.is_ahead:
            pointer, has_x, has_r = self.pointer(tensor, chunk)
            text = f"tl.load({pointer}{self.mask(has_x, has_r, chunk)}{hint(self.plan, tensor)})"
            self.carried.append(words)
            if unpack is not None:
                self.helpers["packed"] = PACKED
                text = f"packed({text})"
            self.out.line(f"{words} = {text}")
        else:
            words = f"words[{self.carried.index(words)}]"
        if unpack is None:
            return self.assign(name, words, tensor.dtype, False, True)
        self.helpers[unpack[0]] = unpack[1]
        return self.assign(name, f"{unpack[0]}({words})", DataType.Float, False, True)

    carried: list[str]
    """What the next turn needs of a row."""
    begun: list[str]
    """The lines that make it, and this program's part of the statistics."""
    parts: list[tuple[DataType, str]]
    """That part: type and name of each number."""


def write_late(e: Late) -> None:
    """Both parts of a turn: the first to ``e.begun``, the second as the body."""
    chunks = e.tile.chunks()
    reductions = e.reductions(0)
    write_begin(e, chunks)
    end_begin(e, parts_of(e, reductions, chunks))
    e.values = {}
    take_whole(e, reductions, write_collect(e))
    e.out.paragraph()
    write_last_phase(e, chunks)


def write_begin(e: Late, chunks: Sequence[Chunk]) -> None:
    """What is done a row ahead: the loads, and what is reduced."""
    e.carried = []
    wanted = [x.tensors[0] for x in e.reductions(0)]
    kept = [t for t in e.plan.segment.inputs if e.space.is_streamed(t)]
    for chunk in chunks:
        e.load_needed([*wanted, *kept], chunk)
    e.out.paragraph()
    for chunk in chunks:
        for tensor in (*wanted, *kept):
            e.value(tensor, chunk)


def end_begin(e: Late, parts: list[tuple[DataType, str]]) -> None:
    """All lines up to here are ``e.begun``, which ends with this program's ``parts`` of the statistics."""
    e.parts = parts
    e.begun = [*e.head.lines, "", *e.out.lines]
    e.is_ahead = False
    e.head, e.out, e.offsets = Writer(), Writer(), {}


def write_collect(e: Late) -> list[str]:
    """Waits for the parts of this turn, which were posted in the one before; the text of each, of all members."""
    e.helpers |= {"post": POST, "collect_late": collect_late(len(e.parts), e.turns, interpret=e.interpret)}
    lines, whole = collect_late_lines(e.plan, [dtype for dtype, _ in e.parts], e.tile.exchanged)
    for line in lines:
        e.out.line(line)
    return whole


def begin_function(e: Late, name: str, known: Sequence[str]) -> list[str]:
    """Makes ``begin`` a helper; gives its arguments: the names that it uses of ``known``, and the row x."""
    last = ["", *tuple_of("words", e.carried), f"    return words, {', '.join(n for _, n in e.parts)}"]
    lines = [*e.begun, *last]
    used = {n for line in lines for n in _NAME.findall(line)}
    given = [*(n for n in dict.fromkeys(known) if n in used), "x"]
    e.helpers[f"begin_{name}"] = signature(f"begin_{name}", given, []) + "\n".join(lines) + "\n"
    return given


def begin_lines(e: Late, name: str, given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The lines that read rows and post what they give, before the loop and in it."""
    parts, post = ", ".join(n for _, n in e.parts), post_lines(e.plan, e.parts, e.tile.exchanged)
    first = call_of(f"words, {parts}", f"begin_{name}", given, 1)
    return [*first, *post], [*call_of(f"ahead, {parts}", f"begin_{name}", given, 2), *post]


def names_of(lines: Sequence[str], parameters: Iterable[str]) -> list[str]:
    """The names that a kernel has behind ``lines``."""
    known = [p.split(":")[0] for p in parameters]
    return known + [n.strip() for line in lines if (m := _ASSIGNED.match(line)) for n in m[1].split(",")]


def late_lines(e: Late, name: str, preamble: Sequence[str], parameters: Iterable[str], rows: str) -> list[str]:
    """The body of the kernel; ``begin`` goes to the helpers.  ``rows``: text of their number."""
    given = begin_function(e, name, names_of(preamble, parameters))
    first, again = begin_lines(e, name, given)
    first = ["x = team.to(tl.int64)", *first]
    turn = [f"x = tl.minimum(row + teams, {rows} - 1).to(tl.int64)", *again, "x = row.to(tl.int64)"]
    loop = f"for row in tl.range(team, {rows}, teams, num_stages={e.params.num_stages}):"
    body = [*(f"    {line}" for line in turn), *e.head.lines, "", *e.out.lines, "    words = ahead"]
    return [
        *(f"    {line}" for line in first),
        "",
        f"    {loop}",
        *(f"    {line}" if line else "" for line in body),
        "",
        "    tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))",
    ]
