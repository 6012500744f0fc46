"""Small wrong changes of a module's code, found in its syntax tree, which `scripts/mutate.py` plants in any file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt,), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt,),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
ORDERED = (ast.Sub, ast.FloorDiv, ast.Mod, ast.Div)
"""Operators whose operands may not be swapped."""


@dataclass(frozen=True)
class Change:
    """The module with one change in it.

    lines: the first and the last of what is changed. statement: the first line of the statement that it is part of.
    """

    lines: tuple[int, int]
    statement: int
    said: str
    text: str

    @property
    def line(self) -> int:
        return self.lines[0]


def changes(text: str) -> list[Change]:
    """Every change of a module of this text, in order; none of its annotations, docstrings, messages and asserts."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()
    found: list[Change] = []
    for node, new, statement in _wrong(ast.parse(text)):
        last = node.end_lineno or node.lineno
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[last - 1] + (node.end_col_offset or 0)
        old = raw[begin:end].decode()
        changed = (raw[:begin] + new.encode() + raw[end:]).decode()
        said = f"`{_short(old)}` becomes `{_short(new)}`"
        found.append(Change((node.lineno, last), statement, said, changed))
    return found


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= 200 else one[:197] + "..."


Located = ast.expr | ast.stmt


def _wrong(tree: ast.AST) -> Iterator[tuple[Located, str, int]]:
    """A node of code that runs, the text of a wrong one in its place, and the line of its statement."""
    for node, statement in _running(tree, 0):
        for changed, new in _wrong_of(node):
            yield changed, new, statement


def _wrong_of(node: ast.AST) -> Iterator[tuple[Located, str]]:
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARED:
            for other in COMPARED[type(op)]:
                yield node, f"({ast.unparse(ast.Compare(left, [other()], [right]))})"
        case ast.BinOp(left, op, right) if type(op) in COMPUTED and not _is_text(left, right):
            yield node, f"({ast.unparse(ast.BinOp(left, COMPUTED[type(op)](), right))})"
            if isinstance(op, ORDERED):
                yield node, f"({ast.unparse(ast.BinOp(right, op, left))})"
        case ast.BoolOp(op, values):
            other_op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, f"({ast.unparse(ast.BoolOp(other_op, values))})"
            for left_out in range(len(values)):
                rest = [v for k, v in enumerate(values) if k != left_out]
                yield node, f"({ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(op, rest))})"
        case ast.Constant(bool(value)):
            yield node, f"({not value})"
        case ast.Constant(int(value)):
            yield node, f"({value + 1})"
        case ast.Raise() | ast.AugAssign() | ast.Expr(ast.Call()):
            yield node, "pass"
        case _:
            yield from _other_conditions(node)


def _other_conditions(node: ast.AST) -> Iterator[tuple[Located, str]]:
    match node:
        case ast.If(test) | ast.IfExp(test):
            yield test, f"(not ({ast.unparse(test)}))"
            yield test, "(False)"
        case ast.While(test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.comprehension(ifs=[test]):
            yield test, "(True)"
        case _:
            pass


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes
    )


def _running(node: ast.AST, statement: int) -> Iterator[tuple[ast.AST, int]]:
    """Every node but those of annotations, texts, imports, asserts, errors' values and constants' documentation."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert
            ):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":  # of zip: an assert as well
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            at = child.lineno if isinstance(child, ast.stmt) else statement
            yield child, at
            if not isinstance(child, ast.Raise):
                yield from _running(child, at)
