"""Functions that promise bits: the modules that they call, and what callers say."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Concatenate, Literal, ParamSpec, TypeVar

import torch

from ..executor.uncompiled import uncompiled
from ..frontend.promise_arguments import Invariant, promised
from ..ir.promises import Promises
from .promising import PromisingModule

Accumulate = Literal["float32"] | None
P = ParamSpec("P")
M = TypeVar("M", bound=torch.nn.Module)


def kept_module(make: Callable[P, M]) -> Callable[Concatenate[Promises | None, P], M]:
    """Modules without parameters are functions already: one is made for each set of options and promises."""

    def module(promises: Promises | None, *arguments: P.args, **options: P.kwargs) -> M:
        made = make(*arguments, **options)
        for part in made.modules():
            vars(part)["made_at"] = ()  # errors name the line of the call alone: the first call made the module
            if isinstance(part, PromisingModule):
                part.promises = promises
        return made

    cached = lru_cache(maxsize=256)(module)

    def kept(promises: Promises | None, *arguments: P.args, **options: P.kwargs) -> M:
        return cached(promises, *arguments, **options)

    return uncompiled(kept)


def said(name: str, invariant: Invariant, accumulate: Accumulate) -> Promises | None:
    """None where nothing is promised.  Raises DefinitionError."""
    if invariant is None and accumulate is None:
        return None
    found = promised(name, invariant, accumulate)
    return found if found.arguments else None
