"""The fallbacks by which Inductor calls the ops of modules as they are, registered before it lowers a graph.

Those of modules on a mesh run collectives, which ``mesh/inductor_order.py`` keeps.

torch before 2.13 writes the arguments of an op that it has no lowering for into a message, which is written whether
anybody reads it or not.  Each argument is printed with all that it is computed from, once for each path to it, so that
the message about the loss behind six layers of a transformer does not end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ..mesh.inductor_order import register_fallback
from .settings import parsed

P = ParamSpec("P")
T = TypeVar("T")


def with_fallback(name: str, fake: Callable[P, T]) -> Callable[P, T]:
    """``fake`` of ``shardfuse::<name>``, which registers the fallback too: torch calls it before Inductor lowers."""

    @wraps(fake)
    def registered(*args: P.args, **kwargs: P.kwargs) -> T:
        register_module_op(getattr(torch.ops.shardfuse, name).default)
        return fake(*args, **kwargs)

    return registered


def register_module_op(op: Any) -> None:
    """Have Inductor, where it is imported, call this op, an argument of which is a module's settings."""
    position = [argument.name for argument in op._schema.arguments].index("settings")

    def is_on_mesh(*arguments: Any) -> bool:
        return parsed(arguments[position])[1] is not None

    register_fallback(op, is_on_mesh)
