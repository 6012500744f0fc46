"""Arguments are of the types that annotations say, or one error names the argument, what was found, what is taken."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from .base_error import ShardfuseError

T = TypeVar("T")
Hint = object
Refuse = Callable[[str, str, object, str], ShardfuseError]
"""The error for (name of the function, argument, what was found, what is taken)."""
Check = Callable[[object], bool]
_ANY = object
_NAMES: dict[Hint, str] = {
    int: "an integer of 64 bits",
    float: "a number",
    complex: "a number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
    torch.Tensor: "a torch.Tensor",
}
_INPUTS = Sequence[object]
"""What a run is given: each is checked where it is bound to an input of the fusion, by whose name errors go."""
INPUTS = "a list with an argument for each input of the fusion, [x] for one"
"""The same in the sentence of an error."""


def checked(
    refuse: Refuse, methods: Sequence[str] = (), adapt: Callable[[Any], object] | None = None
) -> Callable[[type[T]], type[T]]:
    """A class decorator: each of ``methods``, or every public one, refuses what its annotations do not allow.

    Annotations that only a type checker can read, and kinds of type that are not checked here, allow anything.
    ``adapt``: gives what stands for an argument from then on.
    """

    def decorate(decorated: type[T]) -> type[T]:
        for name, function in inspect.getmembers(decorated, inspect.isfunction):
            if name in methods or (not methods and not name.startswith("_")):
                said = "" if name == "__init__" else name.lstrip("_")
                setattr(decorated, name, _checked(said, function, refuse, adapt))
        return decorated

    return decorate


def misfit(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[str, object, str] | None:
    """The first argument that the function's annotations do not allow, its value, and what is taken.

    For calls that have failed: it costs those nothing that succeed.  None where all fit, or are too many or unknown.
    """
    signature = inspect.signature(function)
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return None
    for name, value in given.items():
        parameter = signature.parameters[name]
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            hint = _evaluated(parameter.annotation, function)
            if hint is not inspect.Parameter.empty and not _check_of(hint)(value):
                return name, value, _expected(hint, value)
    return None


def misfit_of(function: Callable[..., Any], argument: str, value: object) -> tuple[str, object, str] | None:
    """As ``misfit``, of one argument, for what succeeds: annotations are looked at once."""
    check, hint = _parameters(function).checks.get(argument, (None, None))
    return None if check is None or check(value) else (argument, value, _expected(hint, value))


@functools.lru_cache(maxsize=256)  # constructors of modules, a caller's subclasses among them
def _parameters(function: Callable[..., Any]) -> _Parameters:
    return _Parameters.of(function)


@dataclass
class _Parameters:
    """Those of a function behind ``self``: how each is checked, by name; which take a place, and must be given."""

    checks: dict[str, tuple[Check, Hint]]
    placed: list[str]
    required: list[str]
    is_open: bool

    @staticmethod
    def of(function: Callable[..., Any]) -> _Parameters:
        found = list(inspect.signature(function).parameters.values())[1:]
        checks: dict[str, tuple[Check, Hint]] = {}
        for p in found:
            hint = _evaluated(p.annotation, function)
            if p.name == "inputs":
                hint = _INPUTS | None if p.default is None else _INPUTS
            checks[p.name] = _check_of(hint), hint
        any_number = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found)
        placed = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = [p.name for p in found if p.default is p.empty and p.name in placed]
        return _Parameters(checks, placed, required, any_number)

    def why_not(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[str, object, str] | None:
        """The argument that the function does not have, or is not given, what was found, and what it takes."""
        if self.is_open:
            return None
        if len(args) > len(self.placed):
            placed = f"no more than {', '.join(self.placed)}" if self.placed else f"{', '.join(self.checks)} by name"
            return f"argument {len(self.placed) + 1}", args[len(self.placed)], placed
        for name, value in kwargs.items():
            if name not in self.checks:
                return name, value, f"an argument of one of the names {', '.join(self.checks)}"
            if name in self.placed[: len(args)]:
                return name, value, "each argument once: it is given by its place too"
        if len(args) < len(self.required):
            missing = [name for name in self.required[len(args) :] if name not in kwargs]
            if missing:
                return missing[0], _LEFT_OUT, f"a value: it takes {', '.join(self.checks)}"
        return None


class _LeftOut:
    """What an error says was found where an argument was left out."""

    def __repr__(self) -> str:
        return "missing"


_LEFT_OUT = _LeftOut()


def _checked(
    said: str, function: Callable[..., Any], refuse: Refuse, adapt: Callable[[Any], object] | None
) -> Callable[..., Any]:
    """said: what errors call the function; "" of a constructor, which they call by the class of what is made."""
    prepared: list[_Parameters] = []

    @functools.wraps(function)
    def call(self: object, *args: object, **kwargs: object) -> object:
        if not prepared:
            prepared.append(_Parameters.of(function))
        (known,) = prepared
        if (wrong := known.why_not(args, kwargs)) is not None:
            raise refuse(said or type(self).__name__, *wrong)
        checks = known.checks
        if adapt is not None:
            args, kwargs = tuple(map(adapt, args)), {name: adapt(value) for name, value in kwargs.items()}
        for (name, (fits, hint)), value in zip(checks.items(), args, strict=False):
            if not fits(value):
                raise refuse(said or type(self).__name__, name, value, _taken(name, hint, value))
        for name, value in kwargs.items():
            if name in checks and not checks[name][0](value):
                raise refuse(said or type(self).__name__, name, value, _taken(name, checks[name][1], value))
        return function(self, *args, **kwargs)

    return call


def _evaluated(annotation: object, function: Callable[..., Any]) -> Hint:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[function.__module__]))
    except NameError:  # imported for a type checker alone
        return _ANY


def _check_of(hint: Hint) -> Check:
    """What tells whether a value is of ``hint``: taken apart once, since definitions are made in every call of some."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:  # a class, of which nothing is an instance
        return lambda value: True
    if hint is int:
        return _is_integer
    if hint is float:
        return lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    if origin is Literal:
        return lambda value: any(type(value) is type(part) and value == part for part in parts)
    if origin is Iterable:
        return lambda value: isinstance(value, Iterable)
    if origin in (Union, types.UnionType):
        checks = tuple(map(_check_of, parts))
        return lambda value: any(check(value) for check in checks)
    if origin is Sequence:
        return functools.partial(_is_sequence, each=_check_of(parts[0]))
    if origin is Mapping:
        return functools.partial(_is_mapping, key=_check_of(parts[0]), entry=_check_of(parts[1]))
    kind = hint
    return (lambda value: isinstance(value, kind)) if isinstance(kind, type) else (lambda value: True)


def _is_integer(value: object) -> bool:
    if type(value) is not int and (not isinstance(value, int) or isinstance(value, bool)):
        return False
    return -(2**63) <= value < 2**63


def _is_sequence(value: object, each: Check) -> bool:
    if type(value) not in (list, tuple) and (not isinstance(value, Sequence) or isinstance(value, str | bytes)):
        return False
    return all(map(each, cast("Sequence[object]", value)))


def _is_mapping(value: object, key: Check, entry: Check) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(key(k) and entry(v) for k, v in cast("Mapping[object, object]", value).items())


def _taken(name: str, hint: Hint, found: object) -> str:
    if name == "inputs":
        return INPUTS
    return _expected(hint, found)


def _expected(hint: Hint, found: object) -> str:
    """As ``expected_of``, with what makes it of torch's mesh, whose class has the name of the one that is taken."""
    expected = expected_of(hint)
    if not isinstance(found, TorchDeviceMesh):
        return expected
    return expected.replace("a DeviceMesh", "a shardfuse.DeviceMesh (shardfuse.DeviceMesh.from_torch(mesh) gives it)")


def expected_of(hint: Hint) -> str:
    """What an error says that is taken for an annotation."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        has_numbers = any(part in (int, float, complex) for part in parts)
        # a list last: its elements may have alternatives of their own, which would read as those of the argument
        ordered = sorted(parts, key=lambda part: get_origin(part) in (Sequence, Iterable))
        return " or ".join(dict.fromkeys(expected_of(part) for part in ordered if part is not bool or not has_numbers))
    if origin in (Sequence, Iterable):
        return f"a list, each {expected_of(parts[0])}"
    if origin is Literal:
        words = [f'"{part}"' if isinstance(part, str) else repr(part) for part in parts]
        return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    if origin is Mapping:
        return f"a dict, from {expected_of(parts[0])} to {expected_of(parts[1])}"
    return _NAMES.get(hint) or f"a {getattr(hint, '__name__', hint)}"
