"""Elements that lie further apart than 32 bits with a sign count, read backward and behind an offset."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from far_apart_cases import BYTES, CASES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def memory() -> Iterator[torch.Tensor]:
    """6 GB, which are given back behind the tests of this file."""
    taken = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
    yield taken
    del taken
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", CASES)
def test_like_torch(name: str, memory: torch.Tensor) -> None:
    CASES[name](memory)
