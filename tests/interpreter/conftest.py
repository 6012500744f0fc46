"""Generated kernels under Triton's interpreter, chosen before Triton is imported and while these tests run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"

if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    raise RuntimeError("Triton was imported before TRITON_INTERPRET=1: run tests/interpreter in a process of its own")

import triton.language  # while the variable is set: its own functions are interpreted too
from triton.runtime import interpreter

del os.environ["TRITON_INTERPRET"]  # the tests beside these plan and run as without it


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


@pytest.fixture(autouse=True, scope="module")
def interpreted_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        patched.setattr(interpreter, "_patch_lang", patched_once(interpreter._patch_lang))
        yield
