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
_Module: Any = torch.nn.Module
_CALL, _CALL_IMPL = _Module.__call__, _Module._call_impl
_anywhere: tuple[dict[int, object], ...] = tuple(getattr(_of_torch, f"_global{name}") for name in _NAMES)


def has_no_hooks(module: torch.nn.Module) -> bool:
    """Is a call of ``module`` a call of its ``forward``: without hooks and ``module.compile()``?

    Nor has anybody put another ``__call__`` in the place of torch's, as torch.fx does while it traces.

    For calls that torch.compile does not trace.
    """
    own: Any = module
    kind: Any = type(module)
    variables = own.__dict__
    try:
        hooks = _hooks_of(variables)
    except KeyError:  # its __init__ was not run, which torch's call says
        return False
    if any(hooks) or any(_anywhere) or own._compiled_call_impl is not None:
        return False
    return kind._call_impl is _CALL_IMPL and "_call_impl" not in variables and _Module.__call__ is _CALL
