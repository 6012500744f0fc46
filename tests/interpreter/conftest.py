"""Generated kernels under Triton's interpreter, which must be chosen before Triton is imported: a process of its own."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

if "triton" in sys.modules and not getattr(sys.modules["triton"].knobs.runtime, "interpret", False):
    raise RuntimeError(
        "Triton was imported before TRITON_INTERPRET=1: run tests/interpreter as a pytest process of its own"
    )
