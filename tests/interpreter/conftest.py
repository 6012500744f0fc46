"""Generated kernels under Triton's interpreter, chosen before Triton is imported: a pytest process of its own."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    raise RuntimeError("Triton was imported before TRITON_INTERPRET=1: run tests/interpreter in a process of its own")
