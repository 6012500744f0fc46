"""Triton's language made an interpreted one once for a launch.  Imported once it is settled that kernels are so run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language


class _NothingChanged:
    def restore(self) -> None: ...


def patched_once(patch: Callable[[Any], object]) -> Callable[[Any], object]:
    """What makes Triton's language an interpreted one, as it is done for a launch.

    Triton does it for each call of a function within a kernel again, where it changes nothing: 0.4 of all time.
    """
    language = triton.language
    is_builtin = language.core.is_builtin

    def patched(function: Any) -> object:
        seen = [m for m in function.__globals__.values() if m is language or m is language.core]
        is_done = seen and not any(is_builtin(m.load) for m in seen)
        return _NothingChanged() if is_done else patch(function)

    return patched
