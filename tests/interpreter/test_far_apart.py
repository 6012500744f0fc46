"""Elements that lie further apart than 32 bits with a sign count, read backward and behind an offset."""

from __future__ import annotations

import pytest
import torch
from far_apart_cases import BYTES, CASES


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Of a file without content: the system provides the pages that are touched alone."""
    path = tmp_path_factory.mktemp("far_apart") / "memory"
    with path.open("wb") as file:
        file.truncate(BYTES)
    return torch.from_file(str(path), shared=True, size=BYTES, dtype=torch.uint8)


@pytest.mark.parametrize("name", CASES)
def test_like_torch(name: str, memory: torch.Tensor) -> None:
    CASES[name](memory)
