"""Generated kernels under Triton's interpreter, chosen before Triton is imported: a pytest process of its own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest

os.environ["TRITON_INTERPRET"] = "1"

if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    raise RuntimeError("Triton was imported before TRITON_INTERPRET=1: run tests/interpreter in a process of its own")

from shardfuse.executor.kernel import Kernel

_launches = threading.Lock()


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
