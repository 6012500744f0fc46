"""Arguments are of the types that annotations say, or one error names the argument, what was found, what is taken."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from .base_error import ShardfuseError

T = TypeVar("T")
Hint = object
Refuse = Callable[[str, str, object, str], ShardfuseError]
"""The error for (name of the function, argument, what was found, what is taken)."""
_ANY = object
_NAMES: dict[Hint, str] = {
    int: "an integer of 64 bits",
    float: "a number",
    complex: "a number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
}


def checked(refuse: Refuse, methods: Sequence[str] = ()) -> Callable[[type[T]], type[T]]:
    """A class decorator: each of ``methods``, or every public one, refuses what its annotations do not allow.

    Annotations that only a type checker can read, and kinds of type that are not checked here, allow anything.
    """

    def decorate(decorated: type[T]) -> type[T]:
        for name, function in inspect.getmembers(decorated, inspect.isfunction):
            if name in methods or (not methods and not name.startswith("_")):
                said = decorated.__name__ if name == "__init__" else name
                setattr(decorated, name, _checked(said, function, refuse))
        return decorated

    return decorate


def _checked(said: str, function: Callable[..., Any], refuse: Refuse) -> Callable[..., Any]:
    @functools.cache
    def hints() -> dict[str, Hint]:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        return {p.name: _evaluated(p.annotation, function) for p in parameters}

    @functools.wraps(function)
    def call(self: object, *args: object, **kwargs: object) -> object:
        wanted = hints()
        for (name, hint), value in zip(wanted.items(), args, strict=False):
            if not _fits(value, hint):
                raise refuse(said, name, value, _expected(hint))
        for name, value in kwargs.items():
            if name in wanted and not _fits(value, wanted[name]):
                raise refuse(said, name, value, _expected(wanted[name]))
        return function(self, *args, **kwargs)

    return call


def _evaluated(annotation: object, function: Callable[..., Any]) -> Hint:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[function.__module__]))
    except NameError:  # imported for a type checker alone
        return _ANY


def _fits(value: object, hint: Hint) -> bool:
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Sequence:
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_sequence and all(_fits(v, parts[0]) for v in cast("Sequence[object]", value))
    if origin is Mapping:
        pairs = cast("Mapping[object, object]", value).items() if isinstance(value, Mapping) else [(_ANY, _ANY)]
        return isinstance(value, Mapping) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in pairs)
    return not isinstance(hint, type) or isinstance(value, hint)


def _expected(hint: Hint) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        alternatives = [_expected(part) for part in parts if part is not bool or len(parts) < 3]
        return " or ".join(dict.fromkeys(alternatives))
    if origin is Sequence:
        return f"a list, each {_expected(parts[0])}"
    if origin is Mapping:
        return f"a dict, from {_expected(parts[0])} to {_expected(parts[1])}"
    return _NAMES.get(hint) or f"a {getattr(hint, '__name__', hint)}"
