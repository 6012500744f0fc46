"""What the forward of a caller's module uses that is kept outside of the module and may change: a global list, say.

A trial on random numbers sees neither what such an object will hold later, nor what the forward puts into it.  So the
code of the forward is read, and that of the functions and methods that it names.
"""

from __future__ import annotations

import dis
import enum
import inspect
import logging
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, cast

import torch

Module = torch.nn.Module
_NUMBERS_AND_WORDS = NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType, enum.Enum
_OF_TORCH = torch.dtype, torch.device, torch.layout, torch.memory_format
_LOGGERS = logging.Logger, logging.LoggerAdapter
_CONSTANTS = (*_NUMBERS_AND_WORDS, *_OF_TORCH, *_LOGGERS, ModuleType, MethodDescriptorType, type)
_MODULES_OF_CONSTANTS = "typing", "torch._ops", "torch.jit"
"""Whose objects are types, ops and compiled functions."""
_CACHED = type(lru_cache(len))
_LOADS, _STORES = ("LOAD_GLOBAL", "LOAD_NAME"), ("STORE_GLOBAL", "DELETE_GLOBAL")
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platlib", "purelib"))
_MISSING = object()


def kept_outside(module: Module, held: Sequence[str]) -> tuple[str, ...]:
    """The names of the globals, and of the variables of enclosing functions, that a forward writes, or that change.

    held: attributes of the module that hold functions by which its forward computes.  Constants, classes, modules and
    functions are none of them; functions of installed libraries other than the module's own are taken to have none.
    """
    kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.") and kind is not object]
    reader = _Reader(kinds, type(module).__module__.partition(".")[0])
    for kind in kinds:
        reader.read(vars(kind).get("forward"))
    for name in held:
        reader.read(vars(module).get(name))
    return tuple(reader.found)


class _Reader:
    """Reads functions, each once.  kinds: the classes in which a method is found by its name; package: theirs."""

    def __init__(self, kinds: Sequence[type], package: str) -> None:
        self.found: dict[str, None] = {}
        self._kinds, self._package = kinds, package
        self._read: set[CodeType] = set()

    def read(self, value: object) -> None:
        """Of what is no function nothing is read."""
        for function in _functions_of(value):
            code, outer = function.__code__, function.__globals__
            if code in self._read or self._is_of_another_library(code, outer):
                continue
            self._read.add(code)
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                self._meet(name, _content(cell))
            for part in _parts_of(code):
                self._read_names(part, outer, code.co_freevars)

    def _read_names(self, code: CodeType, outer: dict[str, Any], free: Sequence[str]) -> None:
        for step in dis.get_instructions(code):
            name = str(step.argval)
            if step.opname in _STORES or (step.opname == "STORE_DEREF" and name in free):
                self.found.setdefault(name)
            elif step.opname in _LOADS:
                self._meet(name, outer.get(name, _MISSING))
        for name in code.co_names:  # a method of the module's, by whatever object it is asked for
            for kind in self._kinds:
                self.read(vars(kind).get(name))

    def _meet(self, name: str, value: object) -> None:
        if value is _MISSING or _is_constant(value):  # a name that is missing is Python's own
            return
        if next(_functions_of(value), None) is None:
            self.found.setdefault(name)
        else:
            self.read(value)

    def _is_of_another_library(self, code: CodeType, outer: dict[str, Any]) -> bool:
        is_installed = code.co_filename.startswith(("<frozen", *_LIBRARIES))
        return is_installed and str(outer.get("__name__")).partition(".")[0] != self._package


def _functions_of(value: object) -> Iterator[FunctionType]:
    """The functions of Python's that a call of ``value`` runs, or an access to it: a wrapper, and what it wraps."""
    if isinstance(value, property):
        yield from (part for part in (value.fget, value.fset) if isinstance(part, FunctionType))
    elif isinstance(value, cached_property):
        yield from _functions_of(cast("cached_property[Any]", value).func)
    elif isinstance(value, partial):
        yield from _functions_of(cast("partial[Any]", value).func)
    elif isinstance(value, staticmethod | classmethod | MethodType):
        yield from _functions_of(cast("Any", value).__func__)
    elif isinstance(value, FunctionType | _CACHED):
        if isinstance(value, FunctionType):
            yield value
        inner = inspect.unwrap(cast("Callable[..., Any]", value))
        if inner is not value and isinstance(inner, FunctionType):
            yield inner


def _parts_of(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of(constant)


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is not assigned yet
        return _MISSING


def _is_constant(value: object) -> bool:
    """Does it stay what it is?  Of a function of C's what it is a method of, of a partial all that it holds."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, cast("Iterable[object]", value)))
    if isinstance(value, partial):
        held = cast("partial[Any]", value)
        return all(map(_is_constant, (held.func, *held.args, *held.keywords.values())))
    if isinstance(value, BuiltinFunctionType):
        return _is_constant(value.__self__)
    return isinstance(value, _CONSTANTS) or type(value).__module__ in _MODULES_OF_CONSTANTS
