"""Small wrong changes of a module's code, found in its syntax tree, which `scripts/mutate.py` plants in any file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """The module with one change in it."""

    line: int
    said: str
    text: str


def changes(text: str) -> list[Change]:
    """Every change of a module of this text, in order; none of its annotations, docstrings and messages."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()
    found: list[Change] = []
    for node, new in _wrong(ast.parse(text)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        old = raw[begin:end].decode()
        changed = (raw[:begin] + new.encode() + raw[end:]).decode()
        said = f"`{_short(old)}` becomes `{_short(new)}`"
        found.append(Change(node.lineno, said, changed))
    return found


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= 70 else one[:67] + "..."


Located = ast.expr | ast.stmt


def _wrong(tree: ast.AST) -> Iterator[tuple[Located, str]]:
    """A node of code that runs, and the text of a wrong one in its place."""
    for node in _running(tree):
        match node:
            case ast.Compare(left, [op], [right]) if type(op) in COMPARED:
                yield node, f"({ast.unparse(ast.Compare(left, [COMPARED[type(op)]()], [right]))})"
            case ast.BinOp(left, op, right) if type(op) in COMPUTED and not _is_text(left, right):
                yield node, f"({ast.unparse(ast.BinOp(left, COMPUTED[type(op)](), right))})"
            case ast.BoolOp(op, values):
                other = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield node, f"({ast.unparse(ast.BoolOp(other, values))})"
            case ast.Constant(value) if isinstance(value, int) and not isinstance(value, bool):
                yield node, f"({value + 1})"
            case ast.If(test) | ast.IfExp(test) | ast.While(test):
                yield test, f"(not ({ast.unparse(test)}))"
            case ast.Raise() | ast.AugAssign():
                yield node, "pass"
            case ast.Expr(ast.Call()):
                yield node, "pass"
            case _:
                pass


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes
    )


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those of annotations, texts, imports and constants' documentation."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            yield child
            yield from _running(child)
