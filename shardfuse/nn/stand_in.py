"""Modules in the place of a caller's own: an attribute that the caller's forward read is followed, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ModuleArgumentError
from .settings import unset

_MISSING = object()


@dataclass(frozen=True)
class Original:
    """What a module is in the place of.

    kind: the name of its class.  aliases: attributes that the module has under another name, by the names that they
    had.  fixed: further attributes that its forward read, which the module cannot follow.
    """

    kind: str
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    fixed: frozenset[str] = frozenset()


class StandIn(torch.nn.Module):
    """A module that ``convert`` may put in the place of another one."""

    input_name: str = ""
    """The name that callers may have for the first tensor."""
    _original: Original | None = None

    def stand_for(self, module: torch.nn.Module, aliases: Mapping[str, str], fixed: Iterable[str]) -> None:
        """Have the attributes of ``module`` by the names that they have there; those that are fixed refuse changes."""
        kept = frozenset(name for name in fixed if not hasattr(self, name) or name in unset(type(self)))
        self.__dict__["_original"] = Original(type(module).__name__, dict(aliases), kept)

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_original")
        if original is None:
            super().__setattr__(name, value)
            return
        if name in original.fixed and value is not self.__dict__.get(name, _MISSING):
            expected = (
                f"what the {original.kind} computed by, in whose place this is: undo the conversion, and set it there"
            )
            raise ModuleArgumentError(type(self).__name__, name, value, expected)
        super().__setattr__(original.aliases.get(name, name), value)
        for alias, own in original.aliases.items():
            self.__dict__[alias] = getattr(self, own)


def clashes(found: torch.nn.Module, name: str) -> bool:
    """Has ``found`` something else under this name, which an assignment would change in silence?"""
    own = inspect.getattr_static(type(found), name, None)
    return hasattr(found, name) and not (isinstance(own, property) and own.fset is None)
