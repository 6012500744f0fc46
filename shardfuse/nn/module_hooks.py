# pyright: reportPrivateUsage=false
"""Does torch.nn.Module.__call__ do anything but call ``forward``?  To ask costs the host a third of what that does."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch.nn.modules import module as _of_torch

_NAMES = "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"
_hooks_of: Callable[[dict[str, Any]], tuple[object, ...]] = itemgetter(*_NAMES)
_anywhere: tuple[dict[int, object], ...] = tuple(getattr(_of_torch, f"_global{name}") for name in _NAMES)


def has_no_hooks(module: torch.nn.Module) -> bool:
    """Is a call of ``module`` a call of its ``forward``: without hooks and ``module.compile()``?

    For calls that torch.compile does not trace.
    """
    own: Any = module
    has_hooks = any(_hooks_of(own.__dict__)) or any(_anywhere)
    return not has_hooks and own._compiled_call_impl is None
