"""What a module was made with, as text: an op of a compiled graph has nothing else from which to find its fusions.

    RMSNorm(4096, mesh=mesh, input=Partial())  ->
    {"hidden_size":4096,"eps":1e-06,"mesh":{"ranks":[0,1],"names":null},"input":["P"],"output":["R"],...}

Caches of compiled graphs outlive a process, so that a text names a mesh by its ranks and holds no object's address.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import torch

from ..arguments import checked, misfit_of
from ..errors import ModuleArgumentError
from ..mesh import DeviceMesh, current_rank
from ..ops.host import python_number
from .placement import TensorPlacement

T = TypeVar("T")
C = TypeVar("C")


class _Described(Protocol):
    defined: Any
    argument_names: Mapping[str, str]
    checked_in_calls: frozenset[str]

    def describe(self) -> None: ...
    def settings(self) -> dict[str, object]: ...


def plain(value: Any) -> Any:
    """An argument of a module with Python's own numbers in the place of NumPy's, which torch's modules take too."""
    if type(value) in (list, tuple):
        return type(value)(map(python_number, value))
    return python_number(value)


def checked_module(decorated: type[C]) -> type[C]:
    """A decorator of a module's class, whose constructor refuses by a ModuleArgumentError what no annotation allows."""
    return checked(ModuleArgumentError, ("__init__",), plain)(decorated)


class Setting(Generic[T]):
    """An attribute of a module that its fusions depend on: where it is changed, the module forgets those it has.

    Each call of a module reads some.  So there is no ``__get__`` at run time: what is read is the entry of the module's
    ``__dict__``, without a call of Python's.

    kind: of a setting that is no argument of the class, what it is unless None; another value is a ModuleArgumentError.
    """

    def __init__(self, kind: type | None = None) -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:

        def __get__(self, module: object, owner: type) -> T: ...

    def __set__(self, module: object, value: T) -> None:
        kind = self._kind
        if kind is not None and not (value is None or isinstance(value, kind)):
            raise ModuleArgumentError(type(module).__name__, self._name, value, f"a {kind.__name__} or None")
        if "text" not in module.__dict__:  # the module is being made, which checks its arguments
            module.__dict__[self._name] = value
            return
        described = cast("_Described", module)
        module.__dict__.update({self._name: value} if kind is not None else _as_made(described, self._name, value))
        described.describe()


class Checked(Generic[T]):
    """An attribute of a module that its fusions do not depend on, which is checked wherever it is assigned.

    It is of the type that the argument of its name has.  check: ``check(module, value)`` raises for a value of that
    type that the module does not take.
    """

    def __init__(self, check: Callable[[Any, Any], None] | None = None) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:

        def __get__(self, module: object, owner: type) -> T: ...

    def __set__(self, module: object, value: T) -> None:
        value = plain(value)
        if not torch.compiler.is_compiling():  # Dynamo evaluates no annotation
            check_type(module, self._name, value)
        if self._check is not None:
            self._check(module, value)
        module.__dict__[self._name] = value


def check_type(module: object, argument: str, value: object) -> None:
    """Raise ModuleArgumentError for a value of another type than this argument of the module's class has."""
    wrong = misfit_of(_class_of(module).__init__, argument, value)
    if wrong is not None:
        raise ModuleArgumentError(type(module).__name__, *wrong)


def _class_of(module: object) -> Any:
    """The class of shardfuse's that a module is of, or that its class is a subclass of."""
    return getattr(module, "defined", None) or type(module)


def _as_made(module: _Described, name: str, value: Any) -> dict[str, object]:
    """The settings that a module has with another value of one of them: those that its class makes of its arguments.

    Raises, before anything is changed, what the class raises where it is made with such a value.
    """
    argument, value = module.argument_names.get(name, name), plain(value)
    kind, current = _class_of(module), module.__dict__[name]
    is_same = type(value) is type(current) and value == current
    if argument not in inspect.signature(kind.__init__).parameters and not is_same:
        raise ModuleArgumentError(type(module).__name__, name, value, f"{current!r}, as of every {kind.__name__}")
    check_type(module, argument, value)
    settings = module.settings()
    if module.defined is None or argument not in settings or argument in module.checked_in_calls:
        return {name: value}
    try:
        made = kind.made_again({**settings, argument: value})
    except ModuleArgumentError as error:  # of the class that the caller's is a subclass of
        error.rename(type(module).__name__, error.argument)
        raise
    own = [key for key in unset(kind) if module.argument_names.get(key, key) in settings]
    return {key: vars(made)[key] for key in own}


@lru_cache(maxsize=256)
def unset(kind: type) -> dict[str, None]:
    """The settings of a class of modules, before they are set."""
    found: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        found.update(vars(base))
    return {name: None for name, value in found.items() if isinstance(value, Setting)}


def printed(settings: Mapping[str, object]) -> str:
    """The arguments of a module as text; of a module on a mesh with this rank, whose pieces have sizes of their own."""
    entries = {name: _entry(value) for name, value in settings.items()}
    if settings.get("mesh") is not None:
        entries["rank"] = current_rank()
    return json.dumps(entries, separators=(",", ":"))


def parsed(text: str) -> tuple[dict[str, object], int | None]:
    """The arguments of the module, and the rank whose they are: None for a module without a mesh."""
    entries = cast("dict[str, object]", json.loads(text))
    rank = cast("int | None", entries.pop("rank", None))
    return {name: _value(entry) for name, entry in entries.items()}, rank


def _entry(value: object) -> object:
    if isinstance(value, DeviceMesh):
        return json.loads(value.text)
    if isinstance(value, TensorPlacement):
        return value.letters()
    return {"sizes": cast("tuple[int, ...]", value)} if isinstance(value, tuple) else value


def _value(entry: object) -> object:
    if isinstance(entry, dict):
        held = cast("dict[str, Any]", entry)
        return tuple(held["sizes"]) if "sizes" in held else DeviceMesh(held["ranks"], held["names"])
    if isinstance(entry, list):
        words = cast("list[str]", entry)
        shards = tuple(int(word[1:]) if word[0] == "S" else None for word in words)
        return TensorPlacement(shards, tuple(word == "P" for word in words))
    return entry
