"""The attributes of its own that the forward of a caller's module reads or writes while it is tried, by whatever way.

A replacement does what the forward does now.  What the forward would do after a caller has assigned an attribute that
it reads, the replacement does only where it follows that attribute.  So every name that is looked up on the module is
noted: as an attribute of the instance or of its class, by ``getattr`` with a default, in a property, in ``__dict__`` or
``vars``, or on ``type(self)``; also a name that is not there yet.  What the forward writes there, or keeps elsewhere,
the replacement does not.
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

from .kept_outside import kept_outside
from .trial import Case, apart

Note = Callable[[str], object]
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
    written: attributes that it assigns or deletes.
    outside: globals, and variables of enclosing functions, that it writes, or that may change.
    """

    state: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    def why_not(self, further: Sequence[str], kinds: str) -> str | None:
        """Why nothing takes the module's place.  further: what it reads and ``kinds`` have not."""
        if further:
            return f"its forward reads {', '.join(further)}, which {kinds} would not follow"
        if self.written:
            return f"its forward writes {', '.join(self.written)}, which {kinds} would not"
        if self.outside:
            names = ", ".join(self.outside)
            return f"its forward reads or writes {names}, kept outside of it, which {kinds} would not follow"
        return None


def attributes_read(module: Module, features: int, cases: Sequence[Case]) -> Read:
    """What the forward of ``module`` reads of such inputs, in training and in evaluation."""
    names: dict[str, None] = {}
    written: dict[str, None] = {}
    # What a forward under torch.compile reads is what its code does, and not what Dynamo asks of a module.
    with apart(), torch.compiler.set_stance("force_eager"):
        usual = copy.deepcopy(module).to_empty(device="cpu").float()
        for case in cases:
            trial = copy.deepcopy(usual).to(case.dtype)
            trial.__class__ = _noting(type(trial), names.setdefault, written.setdefault)
            for mode in (True, False):
                given = torch.ones(*case.rows, features, dtype=case.dtype)
                with torch.set_grad_enabled(mode):
                    trial.train(mode)(given)
    found = [name for name in names if not _is_followed(module, name)]
    functions = tuple(name for name in found if _is_function(module, name))
    state = tuple(name for name in found if name not in functions)
    outside = kept_outside(module, [name for name in functions if name in vars(module)])
    return Read(state, functions, tuple(name for name in written if name not in _USUAL), outside)


def _noting(kind: type[Module], note: Note, note_written: Note) -> type[Module]:
    """The class ``kind`` whose objects hand each name that is looked up on them, or on it, to ``note``.

    note_written: is handed each that is assigned or deleted.
    """

    def of_object(self: Module, name: str) -> object:
        note(name)
        found = kind.__getattribute__(self, name)
        return _Noted(found, note, note_written) if name == "__dict__" else found

    def of_class(cls: type, name: str) -> object:
        note(name)
        return type(kind).__getattribute__(cls, name)

    def setting(base: Any) -> dict[str, object]:
        def assign(self: object, name: str, value: object) -> None:
            note_written(name)
            base.__setattr__(self, name, value)

        def delete(self: object, name: str) -> None:
            note_written(name)
            base.__delattr__(self, name)

        return {"__setattr__": assign, "__delattr__": delete}

    made: Any = type(type(kind).__name__, (type(kind),), {"__getattribute__": of_class, **setting(type(kind))})
    return made(kind.__name__, (kind,), {"__getattribute__": of_object, **setting(kind)})


class _Noted(MutableMapping[str, object]):
    """A ``__dict__``, of which each name that is looked up is noted, and each that is written."""

    def __init__(self, held: dict[str, object], note: Note, note_written: Note) -> None:
        self._held, self._note, self._note_written = held, note, note_written

    def __getitem__(self, name: str) -> object:
        self._note(name)
        return self._held[name]

    def __setitem__(self, name: str, value: object) -> None:
        self._note_written(name)
        self._held[name] = value

    def __delitem__(self, name: str) -> None:
        self._note_written(name)
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        for name in list(self._held):
            self._note(name)
            yield name

    def __len__(self) -> int:
        return len(self._held)

    def copy(self) -> _Noted:
        """As a dict's, of which names are noted too."""
        return _Noted(dict(self._held), self._note, lambda _: None)


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
