"""A definition as text, and from its text, which is read as data.

The text is what ``repr(fd)`` gives, on one line: Inductor writes the arguments of an op into comments of the code that
it generates, and torch 2.11 breaks that code where an argument has a second line.

Inductor's caches keep generated code in which each region is its printed text.  Nothing of that text is executed as
Python: it is parsed, and only calls of the ops and of the few methods that a printed definition has are made, with
numbers, lists, names and DataTypes as arguments.  Anything else is a ``ProgramTextError``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

from ..frontend.definition import FusionDefinition
from ..ir.dtype import DataType
from ..ir.tensor_view import TensorView
from .aten_collectives import RECORDED, record_collective
from .compile_errors import ProgramTextError

_OF_DEFINITION = ("define_tensor", "define_scalar", "add_output")
_OF_TENSOR = ("set_allocation_domain", "get_logical_domain", "get_loop_domain")


_HEAD_END = " -> None : "
"""What a text has before its first statement."""
_BETWEEN = "; "
"""What is between two statements.  No string of a printed definition has it: they are names of dtypes and numbers."""


def printed(fd: FusionDefinition) -> str:
    """``fd`` as ``rebuilt`` reads it, without a line end."""
    head, *statements = repr(fd).splitlines()
    return f"{head} {_BETWEEN.join(s.strip() for s in statements)}"


def statements_of(text: str) -> list[str]:
    """What ``printed`` gives, in parts, its head and one a statement; joined they are ``text``."""
    head, colon, body = text.partition(_HEAD_END)
    *parts, last = body.split(_BETWEEN)
    return [head + colon, *(part + _BETWEEN for part in parts), last]


def on_lines(text: str) -> str:
    """The same function as a person writes it, with a line for each statement."""
    head, *statements = statements_of(text)
    return "\n".join([head.rstrip(), *(f"    {s.removesuffix(_BETWEEN)}" for s in statements)]) if head else text


def rebuilt(text: str) -> FusionDefinition:
    """The definition that prints ``text``.  Raises ``ProgramTextError``."""
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise ProgramTextError(text, f"character {error.offset}", str(error.msg)) from None
    match module.body:
        case [ast.FunctionDef(name="nvfuser_fusion", body=body, decorator_list=[])]:
            with FusionDefinition() as fd:
                fd.fusion.wraps_integers = True
                reader = _Reader(text, fd)
                for reader.number, statement in enumerate(body, 1):
                    reader.run(statement)
            return fd
        case _:
            raise ProgramTextError(text, "the text", "one function nvfuser_fusion is expected")


class _Reader:
    """Names of the text and what they stand for."""

    def __init__(self, text: str, fd: FusionDefinition) -> None:
        self.text = text
        self.fd = fd
        self.names: dict[str, Any] = {}
        self.number = 0

    def run(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = self.value(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                names = [t.id for t in targets if isinstance(t, ast.Name)]
                self.names.update(zip(names, self.value(value), strict=True))
            case ast.Expr(value=ast.Call() as call):
                self.value(call)
            case _:
                raise self.refused(statement)

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | complex() | None as constant):
                return constant
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self.value(e) for e in elements]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() | complex() as number)):
                return -number
            case ast.Attribute(value=ast.Name(id="DataType"), attr=name) if name in DataType.__members__:
                return DataType[name]
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str() as number)], keywords=[]):
                return float(number)
            case ast.Subscript(value=ast.Call() as of, slice=ast.Constant(value=int() as k)):
                return self.value(of)[k]
            case ast.Call(func=function, args=args, keywords=keywords):
                called = self.function(function)
                return called(*map(self.value, args), **{str(k.arg): self.value(k.value) for k in keywords})
            case _:
                raise self.refused(node)

    def function(self, node: ast.expr) -> Callable[..., Any]:
        match node:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="fd"), attr="ops"), attr=name):
                if name in RECORDED:
                    return partial(record_collective, self.fd, name)
                if not name.startswith("_"):
                    return getattr(self.fd.ops, name)
            case ast.Attribute(value=ast.Name(id="fd"), attr=name) if name in _OF_DEFINITION:
                return getattr(self.fd, name)
            case ast.Attribute(value=ast.Name(id=tensor), attr=name) if name in _OF_TENSOR:
                if isinstance(self.names.get(tensor), TensorView):
                    return getattr(self.names[tensor], name)
            case _:
                pass
        raise self.refused(node)

    def refused(self, node: ast.AST) -> ProgramTextError:
        what = f"{ast.unparse(node)} is nothing that a definition prints"
        return ProgramTextError(self.text, f"statement {self.number}", what)
