"""The text of representative kernels, word for word: an optimisation changes it visibly, a refactoring does not.

python -m pytest tests/golden --rewrite-goldens
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import GOLDEN
from segments import kernels_of

FILES = Path(__file__).parent
NAMES = {
    f"{name}{'' if len(sources) == 1 else f'_{k}'}.py": source.text
    for name, sources in ((name, kernels_of(segment)) for name, segment in GOLDEN.items())
    for k, source in enumerate(sources)
}


@pytest.mark.parametrize("name", NAMES)
def test_text_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-goldens"):
        (FILES / name).write_text(NAMES[name])
    assert NAMES[name] == (FILES / name).read_text()


def test_no_golden_is_left_over() -> None:
    assert {f.name for f in FILES.glob("*.py")} - {Path(__file__).name} == set(NAMES)


def test_goldens_pass_the_formatter() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--diff", *sorted(map(str, FILES.glob("*.py")))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout
