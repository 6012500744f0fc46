"""The attributes of its own that the forward of a caller's module reads while it is tried, by whatever way.

A replacement does what the forward does now.  What the forward would do after a caller has assigned an attribute that
it reads, the replacement does only where it follows that attribute.  So every name that is looked up on the module is
noted: as an attribute of the instance or of its class, by ``getattr`` with a default, in a property, in ``__dict__`` or
``vars``, or on ``type(self)``; also a name that is not there yet.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from .trial import Case, apart

Module = torch.nn.Module
_USUAL = frozenset(vars(Module()))
"""What each module has in its ``__dict__``."""
_HOLDERS = "_parameters", "_buffers", "_modules"
_MISSING = object()
_CACHED = type(lru_cache(len))


@dataclass(frozen=True)
class Read:
    """The attributes that a forward reads, but for what every module of torch has, and tensors and children.

    state: those that a caller may assign, and those that are not there yet.
    functions: methods of the class, and functions that an attribute holds, by which the forward computes.
    """

    state: tuple[str, ...]
    functions: tuple[str, ...]


def attributes_read(module: Module, features: int, cases: Sequence[Case]) -> Read:
    """What the forward of ``module`` reads of such inputs, in training and in evaluation."""
    names: dict[str, None] = {}
    # What a forward under torch.compile reads is what its code does, and not what Dynamo asks of a module.
    with apart(), torch.compiler.set_stance("force_eager"):
        usual = copy.deepcopy(module).to_empty(device="cpu").float()
        for case in cases:
            trial = copy.deepcopy(usual).to(case.dtype)
            trial.__class__ = _noting(type(trial), lambda name: names.setdefault(name))
            for mode in (True, False):
                given = torch.ones(*case.rows, features, dtype=case.dtype)
                with torch.set_grad_enabled(mode):
                    trial.train(mode)(given)
    found = [name for name in names if not _is_followed(module, name)]
    functions = tuple(name for name in found if _is_function(module, name))
    return Read(tuple(name for name in found if name not in functions), functions)


def _noting(kind: type[Module], note: Callable[[str], None]) -> type[Module]:
    """The class ``kind`` whose objects hand each name that is looked up on them, or on it, to ``note``."""

    def of_object(self: Module, name: str) -> object:
        note(name)
        found = kind.__getattribute__(self, name)
        return _Noted(found, note) if name == "__dict__" else found

    def of_class(cls: type, name: str) -> object:
        note(name)
        return type(kind).__getattribute__(cls, name)

    made: Any = type(type(kind).__name__, (type(kind),), {"__getattribute__": of_class})
    return made(kind.__name__, (kind,), {"__getattribute__": of_object})


class _Noted(MutableMapping[str, object]):
    """A ``__dict__``, of which each name that is looked up is noted."""

    def __init__(self, held: dict[str, object], note: Callable[[str], None]) -> None:
        self._held, self._note = held, note

    def __getitem__(self, name: str) -> object:
        self._note(name)
        return self._held[name]

    def __setitem__(self, name: str, value: object) -> None:
        self._held[name] = value

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        for name in list(self._held):
            self._note(name)
            yield name

    def __len__(self) -> int:
        return len(self._held)

    def copy(self) -> _Noted:
        """As a dict's, of which names are noted too."""
        return _Noted(dict(self._held), self._note)


def _is_followed(module: Module, name: str) -> bool:
    """Has any replacement what the name stands for, or can no caller assign it?

    Tensors and children are the same objects in the replacement.  A property without a setter cannot be assigned, and
    what it is computed from is noted by itself.
    """
    own = vars(module)
    if name in _USUAL or (name.startswith("__") and name.endswith("__")):
        return True
    if any(own[holder].get(name) is not None for holder in _HOLDERS):
        return True
    if name in own:
        return False
    found = inspect.getattr_static(type(module), name, _MISSING)
    if isinstance(found, property):
        return found.fset is None
    return found is not _MISSING and found is inspect.getattr_static(Module, name, _MISSING)


def _is_function(module: Module, name: str) -> bool:
    """Is it a function of which nothing is known to change?  A method of another object may read what that has."""
    if name not in vars(module):
        found: object = inspect.getattr_static(type(module), name, None)
    else:
        found = vars(module)[name]
    while isinstance(found, partial):
        found = found.func
    if isinstance(found, MethodType):
        return found.__self__ is module
    return isinstance(found, FunctionType | BuiltinFunctionType | staticmethod | classmethod | _CACHED)
