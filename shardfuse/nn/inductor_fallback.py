# pyright: reportPrivateUsage=false
"""The fallbacks by which Inductor calls the ops of modules as they are, registered before it lowers a graph.

torch before 2.13 writes the arguments of an op that it has no lowering for into a message, which is written whether
anybody reads it or not.  Each argument is printed with all that it is computed from, once for each path to it, so that
the message about the loss behind six layers of a transformer does not end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._library import utils as _utils

P = ParamSpec("P")
T = TypeVar("T")

WRITES_MESSAGES: bool = cast("Any", torch.__version__) < (2, 13)


def with_fallback(name: str, fake: Callable[P, T]) -> Callable[P, T]:
    """``fake`` of ``shardfuse::<name>``, which registers the fallback too: torch calls it before Inductor lowers."""
    if not WRITES_MESSAGES:
        return fake

    @wraps(fake)
    def registered(*args: P.args, **kwargs: P.kwargs) -> T:
        register_fallback(getattr(torch.ops.shardfuse, name).default)
        return fake(*args, **kwargs)

    return registered


def register_fallback(op: Any) -> None:
    """Have Inductor, where it is imported, call ``op`` as it is, with the strides that torch itself asks for."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    make_fallback = getattr(lowering, "make_fallback", None)  # another thread may be importing it
    if make_fallback is None or op in lowering.lowerings or op in lowering.decompositions:
        return
    tag = cast("Any", _utils).get_layout_constraint_tag(op, with_default=True)
    make_fallback(op, lowering.tag_to_layout_constraint(tag), warn=False)
