"""Statements of a kernel: lines of Python, with loops and branches around others, what they define and use, their text.

    x = tl.program_id(0)                            a simple statement is its text, in one line or several
    Loop("row", "x", "i0", "1", 2, (...))           for row in tl.range(x, i0, 1, num_stages=2): ...
    Branch("x < 3", (...), (...))                   if x < 3: ... else: ...

A simple statement is a call, a ``return``, or an assignment to names, with blanks around its ``=`` and none around that
of a keyword argument: so what it defines and what it reads are found without Python's parser, which takes longer than
all else that a kernel's text does.  Nothing but ``rendered`` indents.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MARGIN = 120
"""Characters of a line of generated text, at most, as of this package's."""
_INDENT = "    "
_ASSIGNMENT = re.compile(r"([\w, ]+?) ([-+*/%&|^]?)= ")
_NAME = re.compile(r"(?<![\w.])(?!(?:return|if|else|for|in|not|and|or|True|False|None)\b)[A-Za-z_]\w*+(?!=[^=])")
"""Neither a keyword, nor an attribute, nor the name of a keyword argument."""
_QUOTED = re.compile(r'"[^"]*"')


@dataclass(frozen=True)
class Loop:
    """``body`` for ``index`` from ``start`` up to ``stop``.  ``stages``: how many turns the compiler loads ahead of."""

    index: str
    start: str
    stop: str
    step: str | int | None
    stages: int
    body: Sequence[Statement]

    @property
    def range(self) -> str:
        step = "" if self.step is None else f"{self.step}, "
        return f"tl.range({self.start}, {self.stop}, {step}num_stages={self.stages})"


@dataclass(frozen=True)
class Branch:
    """``then`` where ``test`` holds, and ``otherwise`` where it does not."""

    test: str
    then: Sequence[Statement]
    otherwise: Sequence[Statement] = ()


@dataclass(frozen=True)
class While:
    """``body`` as long as ``test`` holds."""

    test: str
    body: Sequence[Statement]


Statement = str | Loop | Branch | While
"""A string is a simple statement; an empty one ends a paragraph."""


class Writer:
    """Statements in the order in which they are written."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def line(self, text: str) -> None:
        self.statements.append(text)

    def add(self, statements: Sequence[Statement]) -> None:
        self.statements += statements

    def paragraph(self) -> None:
        if self.statements and self.statements[-1]:
            self.statements.append("")

    @contextmanager
    def loop(self, index: str, start: str, stop: str, step: str | int, stages: int = 1) -> Generator[None]:
        """What is written inside is the body of a loop."""
        outside, self.statements = self.statements, []
        yield
        outside.append(Loop(index, start, stop, step, stages, tuple(self.statements)))
        self.statements = outside


def defined(statements: Sequence[Statement]) -> list[str]:
    """The names that simple ``statements`` define, in order."""
    return [name for text in _simple(statements) for name in _names(text)[0]]


def live_before(statements: Sequence[Statement], names: Iterable[str]) -> set[str]:
    """Those of ``names`` that simple ``statements`` use and do not define before they do."""
    wanted, live = set(names), set[str]()
    for text in _simple(statements):
        stored, used = _names(text)
        live |= wanted.intersection(used)
        wanted.difference_update(used, stored)
    return live


def _simple(statements: Sequence[Statement]) -> list[str]:
    """``statements``, none of them a loop or a branch: what is defined in these may not be there behind them."""
    found = [statement for statement in statements if isinstance(statement, str)]
    assert len(found) == len(statements), "names are followed through simple statements alone"
    return found


def _names(text: str) -> tuple[list[str], list[str]]:
    """The names that a simple statement, or an expression, defines, in order, and those that it reads."""
    text = _QUOTED.sub("", text) if '"' in text else text
    assignment = _ASSIGNMENT.match(text)
    if assignment is None:
        return [], _NAME.findall(text)
    stored, used = _NAME.findall(assignment[1]), _NAME.findall(text, assignment.end())
    return stored, used + stored if assignment[2] else used


def rendered(statements: Sequence[Statement], depth: int = 0) -> list[str]:
    """The lines of ``statements``, ``depth`` levels deep, without blank ones at the ends or twice in a row."""
    lines: list[str] = []
    for line in _lines(statements, depth):
        if line or (lines and lines[-1]):
            lines.append(line)
    return lines[:-1] if lines and not lines[-1] else lines


def _lines(statements: Sequence[Statement], depth: int) -> Iterator[str]:
    for statement in statements:
        match statement:
            case str():
                yield from (_INDENT * depth + line if line else "" for line in statement.split("\n"))
            case Loop():
                yield f"{_INDENT * depth}for {statement.index} in {statement.range}:"
                yield from _lines(statement.body, depth + 1)
            case While():
                yield f"{_INDENT * depth}while {statement.test}:"
                yield from _lines(statement.body, depth + 1)
            case Branch():
                yield f"{_INDENT * depth}if {statement.test}:"
                yield from rendered(statement.then, depth + 1)
                if statement.otherwise:
                    yield f"{_INDENT * depth}else:"
                    yield from rendered(statement.otherwise, depth + 1)


def function_text(
    name: str, parameters: Sequence[str], body: Sequence[Statement], *, not_specialised: Sequence[str] = ()
) -> str:
    """A function of Triton's, its head broken over lines as the formatter breaks it."""
    quoted = ", ".join(f'"{p}"' for p in not_specialised)
    decorator = f"@triton.jit(do_not_specialize=[{quoted}])" if quoted else "@triton.jit"
    joined = ", ".join(parameters)
    head = [f"def {name}({joined}):"]
    if len(head[0]) > MARGIN:
        listed = [joined] if len(joined) + len(_INDENT) <= MARGIN else [f"{p}," for p in parameters]
        head = [f"def {name}(", *(_INDENT + line for line in listed), "):"]
    return "\n".join([decorator, *head, *rendered(body, 1)]) + "\n"


def call_of(target: str, name: str, arguments: Sequence[str], depth: int) -> str:
    """``target = name(arguments)``, which will stand at ``depth``, broken over lines as the formatter breaks it."""
    joined, margin = ", ".join(arguments), MARGIN - len(_INDENT) * depth
    if len(f"{target} = {name}({joined})") <= margin:
        return f"{target} = {name}({joined})"
    listed = [joined] if len(joined) + len(_INDENT) <= margin else [f"{a}," for a in arguments]
    return "\n".join([f"{target} = {name}(", *(_INDENT + line for line in listed), ")"])


def tuple_of(target: str, values: Sequence[str]) -> str:
    """``target = values``, one level deep, broken over lines as the formatter breaks it."""
    whole = f"{target} = {', '.join(values)}{',' if len(values) == 1 else ''}"
    if len(whole) + len(_INDENT) <= MARGIN:
        return whole
    return "\n".join([f"{target} = (", *(f"{_INDENT}{v}," for v in values), ")"])
