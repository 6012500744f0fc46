"""Elements that lie further apart than 32 bits with a sign count, read backward and behind an offset."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from far_apart_cases import BYTES, OPS, STRIDES, check_cat, check_op, check_sums

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def memory() -> Iterator[torch.Tensor]:
    """6 GB, which are given back behind the tests of this file."""
    taken = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
    yield taken
    del taken
    torch.cuda.empty_cache()


@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", OPS)
def test_like_torch(name: str, stride: int, is_transposed: bool, memory: torch.Tensor) -> None:
    check_op(name, memory, stride, is_transposed=is_transposed)


@pytest.mark.parametrize("stride", STRIDES)
def test_two_that_follow_one_another(stride: int, memory: torch.Tensor) -> None:
    check_cat(memory, stride)


@pytest.mark.parametrize("stride", STRIDES)
def test_sums_both_ways(stride: int, memory: torch.Tensor) -> None:
    check_sums(memory, stride)
