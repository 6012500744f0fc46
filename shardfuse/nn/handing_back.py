"""What a module that ``convert`` has put in another's place hands back where that is undone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ModuleChangedError
from ..frontend.detection import has_dtensor

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_HOOK_OPTIONS = (
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
)  # fmt: skip
"""What torch keeps of hooks beside them."""
_COMPARED = int, float, bool, str


@dataclass(frozen=True)
class Before:
    """A replacement as it was made.

    settings: by the name of an attribute that the original has (``eps``), what the replacement had there; names: of all
    attributes that it had; hooked: of the kinds of hooks that it had.
    """

    kind: type[torch.nn.Module]
    settings: Mapping[str, Any]
    names: frozenset[str]
    hooked: frozenset[str]

    @staticmethod
    def of(replacement: torch.nn.Module, original: torch.nn.Module) -> Before:
        hooked = frozenset(name for name in HOOKS if getattr(replacement, name, None))
        settings = _settings(replacement, vars(original))
        return Before(type(replacement), settings, frozenset(vars(replacement)), hooked)


def hand_tensors(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """``target`` has the parameters and buffers of ``source``: the same objects, of which moves between devices, new
    dtypes and loaded states make others."""
    own = (*source._parameters.items(), *source._buffers.items())  # pyright: ignore[reportPrivateUsage]
    for name, tensor in own:
        if tensor is not None or getattr(target, name, None) is not None:
            setattr(target, name, tensor)


def check_own(name: str, replacement: torch.nn.Module, original: torch.nn.Module, before: Before) -> None:
    """Raises ModuleChangedError where torch has made another module of it since: the original would not do its work."""
    found = type(replacement).__name__
    gone = original._parameters.keys() - replacement._parameters.keys()  # pyright: ignore[reportPrivateUsage]
    if type(replacement) is not before.kind:
        raise ModuleChangedError(name, before.kind.__name__, found)
    if any(has_dtensor((p,)) for p in replacement.parameters(recurse=False)):
        raise ModuleChangedError(name, before.kind.__name__, f"{found} of parameters that are DTensors")
    if gone:
        raise ModuleChangedError(name, before.kind.__name__, f"{found} without the parameter {min(gone)}")


def hand_back(replacement: torch.nn.Module, original: torch.nn.Module, before: Before) -> None:
    """``original`` gets tensors, the mode, what was assigned since, and hooks: their dicts, which handles know."""
    hand_tensors(replacement, original)
    original.train(replacement.training)
    new = {name for name in vars(replacement) if name not in before.names and not hasattr(type(replacement), name)}
    for name, value in _settings(replacement, {*before.settings, *new}).items():
        was = before.settings.get(name, before)
        if was is not value and not (type(was) is type(value) in _COMPARED and was == value):
            setattr(original, name, value)
    added = [name for name in HOOKS if name not in before.hooked and getattr(replacement, name, None)]
    for name in (*added, *(_HOOK_OPTIONS if added else ())):
        if name in vars(replacement):
            vars(original)[name] = vars(replacement)[name]
    for hook in vars(original)["_load_state_dict_pre_hooks"].values():
        if getattr(hook, "with_module", False):  # it calls the module that it was registered at
            hook.module = weakref.ref(original)


def _settings(replacement: torch.nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Those of these attributes that are public, and neither tensors nor modules."""
    found = {name: getattr(replacement, name, None) for name in names if name[0] != "_" and name != "training"}
    return {k: v for k, v in found.items() if not isinstance(v, torch.Tensor | torch.nn.Module)}
