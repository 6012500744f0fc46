"""Functions that promise bits: the modules that they call, and what callers say."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from types import ModuleType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from ..base_error import ShardfuseError
from ..executor.uncompiled import uncompiled
from ..frontend.promise_arguments import Invariant, promised
from ..ir.promises import Promises
from .promising import PromisingModule

Accumulate = Literal["float32"] | None
P = ParamSpec("P")
M = TypeVar("M", bound=torch.nn.Module)

_torch: Any = torch  # whose modules of symbols are imported once something is compiled
_compiled: Any = ModuleType("shardfuse.nn.compiled_calls")
"""The modules that compiled calls use, by name: an attribute of a module of Python is what Dynamo reads anew."""


def kept_module(make: Callable[P, M]) -> Callable[Concatenate[Promises | None, P], M]:
    """Modules without parameters are functions already: one is made for each set of options and promises.

    Dynamo, which would trace how a module is made, takes its name for a constant that follows from the options.
    """
    names: dict[Hashable, str] = {}

    @lru_cache(maxsize=256)
    def module(kept: tuple[bool, ...], *arguments: P.args, **options: P.kwargs) -> M:
        with _disable_current_modes():  # whose tensors are of their own time: what is kept has none of them
            made = make(*arguments, **options)
        for part in made.modules():
            vars(part)["made_at"] = ()  # errors name the line of the call alone: the first call made the module
            if isinstance(part, PromisingModule):
                part.promises = Promises(*kept) if any(kept) else None
        return made

    def name_of(kept: tuple[bool, ...], *arguments: Any, **options: Any) -> str:
        key = (kept, arguments, tuple(options.items()))
        if key not in names:
            try:
                made = module(kept, *arguments, **options)
            except ShardfuseError:  # of the arguments, which `made_uncompiled` raises: Dynamo calls it its own here
                return ""
            names[key] = name = f"{cast('Any', make).__name__}_{len(names)}"
            setattr(_compiled, name, made)
        return names[key]

    @uncompiled
    def made_uncompiled(kept: tuple[bool, ...], *arguments: Any, **options: Any) -> M:
        return module(kept, *arguments, **options)

    cast("Any", name_of)._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result, without its import

    def kept(promises: Promises | None, *arguments: P.args, **options: P.kwargs) -> M:
        said = (False,) * 3 if promises is None else (promises.batch, promises.ranks, promises.wide_sums)
        if torch.compiler.is_dynamo_compiling():
            given: Any = ([_constant(x) for x in arguments], {name: _constant(x) for name, x in options.items()})
            name = name_of(said, *given[0], **given[1])
            return getattr(_compiled, name) if name else made_uncompiled(said, *given[0], **given[1])
        return module(said, *arguments, **options)

    return kept


def _constant(option: object) -> object:
    """Numbers that callers pass may be symbols in a graph; a module is made for the number."""
    if isinstance(option, int | float):
        return _torch.fx.experimental.symbolic_shapes.guard_scalar(option)
    return option


def said(name: str, invariant: Invariant, accumulate: Accumulate) -> Promises | None:
    """None where nothing is promised.  Raises DefinitionError."""
    if invariant is None and accumulate is None:
        return None
    found = promised(name, invariant, accumulate)
    return found if found.arguments else None
