"""Statements of kernels: their text, and the names that they define and use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from shardfuse.codegen.statements import (
    MARGIN,
    Branch,
    Loop,
    Statement,
    While,
    Writer,
    call_of,
    defined,
    function_text,
    live_before,
    rendered,
    tuple_of,
)

ROWS: list[Statement] = [
    "base = x * 8",
    "",
    Loop("row", "base", "i0", "teams", 2, ["a, b = load(T0_ptr + row)", "", Branch("a < b", ["c = a"], ["c = b"])]),
    "",
    "",
    While("c > 0", ["c -= 1"]),
    "",
]


def test_blocks_are_indented_and_paragraphs_are_single() -> None:
    assert rendered(ROWS, 1) == [
        "    base = x * 8",
        "",
        "    for row in tl.range(base, i0, teams, num_stages=2):",
        "        a, b = load(T0_ptr + row)",
        "",
        "        if a < b:",
        "            c = a",
        "        else:",
        "            c = b",
        "",
        "    while c > 0:",
        "        c -= 1",
    ]


def test_a_loop_without_a_step_goes_one_by_one() -> None:
    assert rendered([Loop("k", "0", "n", None, 1, ["f(k)"])])[0] == "for k in tl.range(0, n, num_stages=1):"


def test_what_is_written_in_a_loop_is_its_body() -> None:
    out = Writer()
    out.paragraph()
    out.line("a = 0")
    with out.loop("k", "0", "n", 4, 3):
        out.line("a += k")
    out.paragraph()
    out.paragraph()
    out.add(["f(a)"])
    assert out.statements == ["a = 0", Loop("k", "0", "n", 4, 3, ("a += k",)), "", "f(a)"]


def test_names_that_are_defined_come_in_order() -> None:
    assert defined(["a, b = load(T0_ptr)", "", "c = a", "c -= 1"]) == ["a", "b", "c", "c"]
    assert defined(["x.field = y", "f(z, key=w)", "t[0] = 1"]) == []


@pytest.mark.parametrize(
    ("statements", "live"),
    [
        (["a = b + c.d", "e = a"], {"b", "c"}),
        (["words = x, y", "return words, total"], {"x", "y", "total"}),
        (["a = a + 1"], {"a"}),  # its own old value
        (["a += 1"], {"a"}),
        (["a = 0", "a += b"], {"b"}),
        (['text = "name"', "f(text, other=g)"], {"f", "g"}),  # neither what is quoted nor a keyword's name
        (["T0 = load(T0_ptr, mask=r_mask)", "T00 = T0"], {"load", "T0_ptr", "r_mask"}),  # nor a part of a name
    ],
    ids=str,
)
def test_names_that_are_live_before(statements: list[str], live: set[str]) -> None:
    words = set(re.findall(r"\w+", "\n".join(statements)))
    assert live_before(statements, words) == live
    assert live_before(statements, live) == live
    assert [w for w in words if live_before(statements, [w])] == [w for w in words if w in live], "one by one"


@pytest.mark.parametrize(
    "block", [Branch("t", ["a = 0"]), Loop("k", "0", "n", 1, 1, ["a = k"]), While("go", ["a = 0"])]
)
def test_names_are_not_followed_through_what_may_not_run(block: Statement) -> None:
    for find in (defined, lambda statements: live_before(statements, ["a"])):
        with pytest.raises(AssertionError, match="simple statements"):
            find([block, "f(a)"])


def simple_statements() -> list[tuple[str, ast.stmt]]:
    """Each of the golden kernels, with what Python's parser makes of it."""
    found: dict[str, ast.stmt] = {}
    for path in sorted((Path(__file__).parent / "golden").glob("*.py")):
        text = path.read_text()
        functions = [f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef) and f.decorator_list]
        for node in (n for f in functions for n in ast.walk(f)):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Return):
                found[ast.get_source_segment(text, node) or ""] = node
    return [(text, node) for text, node in found.items() if not text.startswith('"""')]


def test_names_of_golden_kernels_are_those_that_pythons_parser_finds() -> None:
    lines = simple_statements()
    assert len(lines) > 300
    for text, node in lines:
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        stored = [n.id for n in names if isinstance(n.ctx, ast.Store)]
        read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
        read |= set(stored) if isinstance(node, ast.AugAssign) else set()
        assert defined([text]) == stored, text
        assert live_before([text], re.findall(r"\w+", text)) == read, text


@pytest.mark.parametrize("count", [1, 10, 16, 40])
def test_long_heads_calls_and_tuples_are_broken(count: int) -> None:
    names = [f"T{k}_words" for k in range(count)]
    text = function_text("read", names, [tuple_of("words", names), call_of("a, b", "begin", names, 1), "return a"])
    assert all(len(line) <= MARGIN for line in text.splitlines())
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    assert [a.arg for a in function.args.args] == names
    made, called, _ = function.body
    assert isinstance(made, ast.Assign)
    assert isinstance(made.value, ast.Tuple)
    assert len(made.value.elts) == count
    assert isinstance(called, ast.Assign)
    assert isinstance(called.value, ast.Call)
    assert len(called.value.args) == count


def test_a_head_names_what_is_not_specialised() -> None:
    text = function_text("f", ["T0_ptr", "i0: tl.int32"], ["x = i0"], not_specialised=["i0"])
    assert text == '@triton.jit(do_not_specialize=["i0"])\ndef f(T0_ptr, i0: tl.int32):\n    x = i0\n'
