"""Generated kernels under Triton's interpreter, chosen before Triton is imported and while these tests run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "1"

if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    raise RuntimeError("Triton was imported before TRITON_INTERPRET=1: run tests/interpreter in a process of its own")

from patched_once import patched_once  # while the variable is set: Triton's own functions are interpreted too
from triton.runtime import interpreter

del os.environ["TRITON_INTERPRET"]  # the tests beside these plan and run as without it


@pytest.fixture(autouse=True, scope="module")
def interpreted_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        patched.setattr(interpreter, "_patch_lang", patched_once(interpreter._patch_lang))
        yield
