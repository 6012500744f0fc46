"""Programs compute in the dtypes of their tensors, also where torch.autocast would choose others for torch's ops."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

R = TypeVar("R")

_AS_IT_IS = nullcontext[None]()


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Around torch's ops of a fusion on devices of this type."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _AS_IT_IS


def outside_autocast(run: Callable[..., R], device_type: str) -> Callable[..., R]:
    """``run`` with its ops as they are without autocast."""
    is_enabled = torch.is_autocast_enabled

    def run_plainly(*arguments: object) -> R:
        if is_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return run(*arguments)
        return run(*arguments)

    return run_plainly
