"""The pipelined loop over rows, run as Python: what is read, posted and finished, however many rows there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardfuse.codegen.pipelined_row_loop import Rows, Turn, pipelined
from shardfuse.codegen.statements import rendered

TEAMS = 3
EACH_READ = 1000
"""What is loaded of row k is this and k."""


class Int(int):
    """A number of a kernel, which can be converted."""

    def to(self, _: Any) -> Int:
        return self

    def __add__(self, other: int) -> Int:
        return Int(int(self) + other)

    def __mul__(self, other: int) -> Int:
        return Int(int(self) * other)


class Language:
    """What the loop has of Triton."""

    int64 = None

    @staticmethod
    def minimum(a: int, b: int) -> Int:
        return Int(min(a, b))

    @staticmethod
    def range(start: int, stop: int, step: int, num_stages: int) -> list[Int]:
        assert num_stages == 2
        return [Int(k) for k in range(start, stop, step)]


def turn_of(lag: int, each: int) -> Turn:
    """Loads, sums of what was loaded, and a store of both; all of them call into the test."""
    rows = [f"x{k} = x + {k}" for k in range(each)] if each > 1 else []
    names = [f"x{k}" for k in range(each)] if each > 1 else ["x"]
    carried = [f"T0_{k}" for k in range(each)]
    loads = [f"{c} = load(source, {n})" for c, n in zip(carried, names, strict=True)]
    source = carried if lag == 1 else [f"words[{k}]" for k in range(each)]
    parts = [f"T1_part{k}" for k in range(each)]
    begin = [*(loads if lag == 1 else []), *(f"{p} = 2 * {s}" for p, s in zip(parts, source, strict=True))]
    finish = [
        "whole = collect()",
        *(f"store({n}, words[{k}], whole[{k}])" for k, n in enumerate(names)),
    ]
    return Turn(rows, loads if lag == 2 else [], begin, [f"post(({', '.join(parts)},))"], finish, carried, parts)


@pytest.mark.parametrize(("lag", "each"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 12])
@pytest.mark.parametrize("team", range(TEAMS))
def test_each_row_is_finished_with_what_was_posted_for_it(lag: int, each: int, count: int, team: int) -> None:
    turns = -(-count // each)
    if team >= turns:
        return  # a grid has no more groups than there are turns
    rows = Rows("i0", each, count % each != 0, "row.to(tl.int64)")
    known = ["source", "unused", "i0", "load", "store", "collect", "post", "tl"]
    body, functions = pipelined("f", turn_of(lag, each), rows, known, stages=2)
    assert list(functions) == (["begin_f"] if lag == 1 else ["read_f", "begin_f"])
    assert all("unused" not in text for text in functions.values())
    loaded: list[int] = []
    posted: list[tuple[int, ...]] = []
    stored: dict[int, tuple[int, int]] = {}
    turn = iter(range(10**6))

    def load(_: object, x: int) -> Int:
        if each == 1:
            assert 0 <= x < count
        loaded.append(int(x))
        return Int(EACH_READ + x)

    def store(x: int, words: int, whole: int) -> None:
        assert int(x) not in stored
        stored[int(x)] = int(words), int(whole)

    space = {
        "triton": SimpleNamespace(jit=lambda f: f), "tl": Language, "source": object(), "i0": count,
        "team": Int(team), "teams": Int(TEAMS), "load": load, "store": store,
        "post": posted.append, "collect": lambda: posted[next(turn)],
    }  # fmt: skip
    exec("\n".join(functions.values()), space)
    exec("\n".join(rendered(body)), space)
    first_rows = range(team * each, count, TEAMS * each)
    own = [k + j for k in first_rows for j in range(each)]
    assert stored == {k: (EACH_READ + k, 2 * (EACH_READ + k)) for k in own}
    assert len(posted) == len(first_rows) + 1  # each turn for the next, and the first before the loop
    assert len(loaded) == each * (len(first_rows) + lag)  # rows are read that many turns ahead


def test_arguments_are_what_is_live() -> None:
    turn = Turn([], [], ["a = load(source, x)", "p = a + scale"], ["post(p)"], ["f(words)"], ["a"], ["p"])
    _, functions = pipelined("k", turn, Rows("i0", 1, False, "row"), ["p", "scale", "i0", "source"], stages=1)
    assert functions["begin_k"] == (
        "@triton.jit\ndef begin_k(scale, source, x):\n    a = load(source, x)\n    p = a + scale\n\n"
        "    words = (a,)\n    return words, p\n"
    ).replace("(a,)", "a,")
