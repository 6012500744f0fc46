"""Generated kernels under Triton's interpreter, chosen before Triton is imported and while these tests run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "1"

if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    raise RuntimeError("Triton was imported before TRITON_INTERPRET=1: run tests/interpreter in a process of its own")

import triton  # noqa: F401  while the variable is set: its own functions are interpreted too

from shardfuse.executor.kernel import Kernel

del os.environ["TRITON_INTERPRET"]  # the tests beside these plan and run as without it
_launches = threading.Lock()


@pytest.fixture(autouse=True, scope="module")
def interpreted_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a kernel runs, ``triton.language`` has the interpreter's functions in place of its own, for all threads."""
    launcher = Kernel.launcher

    def locked(self: Kernel) -> Callable[..., None]:
        launch = launcher(self)

        def run(*arguments: object) -> None:
            with _launches:
                launch(*arguments)

        return run

    monkeypatch.setattr(Kernel, "launcher", locked)
