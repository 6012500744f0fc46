"""Software pipelining over rows, as a function over statements: what a row waits for comes while later ones are read.

A turn of one row, or a few, has a part that begins it and one that finishes it, ``begin`` and ``finish``; the loop does
the first a row ahead, as a function of its own whose arguments are the names that are live before it::

    words, part = begin(first row)
    post(part)
    for row of the group's rows:
        ahead, part = begin(next row)
        post(part)
        finish(words)
        words = ahead

or, where what is loaded comes two rows ahead, ``read`` too::

    words = read(first row);  part = begin(words);  post(part);  ahead = read(second row)
    for row of the group's rows:
        beyond = read(row after the next)
        part = begin(ahead)
        post(part)
        finish(words)
        words = ahead;  ahead = beyond
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .statements import Loop, Statement, call_of, function_text, live_before, tuple_of


@dataclass(frozen=True)
class Turn:
    """What is done with each row.  ``carried``: names of what is loaded of it, which ``finish`` has as ``words``.

    ``parts``: names that ``begin`` makes, ``post`` sends, and ``finish`` waits for.  ``read``: loads what is carried,
    two rows ahead; ``begin`` does it where there is none.  ``rows``: makes the rows of a turn whose first is x.
    """

    rows: Sequence[Statement]
    read: Sequence[Statement]
    begin: Sequence[Statement]
    post: Sequence[Statement]
    finish: Sequence[Statement]
    carried: Sequence[str]
    parts: Sequence[str]


@dataclass(frozen=True)
class Rows:
    """Rows that groups take in turn.  ``count``: text of how many there are; ``each``: of a turn.

    ``is_cut``: may the last turn have fewer?  ``index``: text of a 64-bit number of a row.
    """

    count: str
    each: int
    is_cut: bool
    index: str

    @property
    def step(self) -> str:
        """Text that makes rows of turns."""
        return f" * {self.each}" if self.each > 1 else ""

    def at(self, text: str) -> str:
        """x of the turn that begins with this row, or of the last turn again."""
        return f"x = tl.minimum({text}, {self.count} - {1 if self.is_cut else self.each}).to(tl.int64)"


def pipelined(
    name: str, turn: Turn, rows: Rows, known: Sequence[str], *, stages: int
) -> tuple[list[Statement], dict[str, str]]:
    """The statements that do ``turn`` for all rows of the group ``team`` of ``teams``, and functions that they call.

    ``known``: the names that stand before them.  ``stages``: how many rows the compiler loads ahead of.
    """
    functions: dict[str, str] = {}

    def function(verb: str, body: Sequence[Statement]) -> Callable[..., str]:
        """What writes a call of ``body``: for the names of its results, at some depth, with ``words`` of some name."""
        there = dict.fromkeys([*known, "x", "words"])
        live = live_before(body, there)
        given = [name for name in there if name in live]
        functions[f"{verb}_{name}"] = function_text(f"{verb}_{name}", given, body)

        def call(target: str, depth: int, words: str = "words") -> str:
            return call_of(target, f"{verb}_{name}", [words if n == "words" else n for n in given], depth)

        return call

    parts, words = ", ".join(turn.parts), ["", tuple_of("words", turn.carried)]
    if turn.read:
        read = function("read", [*turn.read, *words, "return words"])
        begin = function("begin", [*turn.rows, *turn.begin, f"return {parts}"])
        first = [read("words", 1), begin(parts, 1), *turn.post, rows.at("team + teams"), read("ahead", 1)]
        ahead = [rows.at("row + 2 * teams"), read("beyond", 2), rows.at("row + teams"), begin(parts, 2, "ahead")]
        last = ["words = ahead", "ahead = beyond"]
    else:
        begin = function("begin", [*turn.rows, *turn.begin, *words, f"return words, {parts}"])
        first = [begin(f"words, {parts}", 1), *turn.post]
        ahead = [rows.at(f"row + teams{rows.step}"), begin(f"ahead, {parts}", 2)]
        last = ["words = ahead"]
    start = f"team{rows.step}"
    x = f"x = {f'({start})' if rows.step else start}.to(tl.int64)"
    body = [*ahead, *turn.post, f"x = {rows.index}", *turn.rows, *turn.finish, *last]
    return [x, *first, "", Loop("row", start, rows.count, f"teams{rows.step}", stages, body)], functions
