"""`import shardfuse` alone: its modules are there, and imported when they are first asked for."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import shardfuse
names = ["adapters", "collectives", "compat", "compile", "nn", "optim"]
assert not [name for name in names if f"shardfuse.{name}" in sys.modules], "imported before it is asked for"
assert set(names) <= set(dir(shardfuse))
assert [getattr(shardfuse, name).__name__ for name in names] == [f"shardfuse.{name}" for name in names]
assert shardfuse.optim.AdamW and shardfuse.nn.RMSNorm and shardfuse.compile.report
try:
    shardfuse.norms
except AttributeError as error:
    assert str(error) == "module 'shardfuse' has no attribute 'norms'"
else:
    raise AssertionError
"""


def test_modules_are_attributes() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)
