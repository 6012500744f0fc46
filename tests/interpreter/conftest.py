"""Generated kernels under Triton's interpreter, chosen before Triton is imported and while these tests run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "1"

if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    raise RuntimeError("Triton was imported before TRITON_INTERPRET=1: run tests/interpreter in a process of its own")

from quick_interpreter import quick_parts  # while the variable is set: Triton's own functions are interpreted too

del os.environ["TRITON_INTERPRET"]  # the tests beside these plan and run as without it


@pytest.fixture(autouse=True, scope="module")
def interpreted_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        for owner, name, value in quick_parts():
            patched.setattr(owner, name, value)
        yield
