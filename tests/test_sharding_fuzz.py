"""Random fusions with random shardings on ranks that are threads, against the same ops unsharded in torch.

A failure names its seed: ``random_case(seed)`` makes the case again.
"""

from __future__ import annotations

import pytest
from random_fusions import run_cases

PROGRAMS = 2000
"""Sharded programs of a run; 2 to 4 ranks each."""
BATCH = 250


@pytest.mark.parametrize("first", range(0, PROGRAMS, BATCH))
def test_like_unsharded(first: int) -> None:
    run_cases(range(first, first + BATCH))


def test_with_extents_of_zero() -> None:
    run_cases(range(100_000, 100_250), with_zero=True)


def test_eight_ranks() -> None:
    """Meshes of 8, 2 x 4 and 4 x 2; many shards are empty."""
    run_cases(range(200_000, 200_060), worlds=(8,))


def test_one_rank() -> None:
    """Without any rank to share with: also the fusions that are not sharded."""
    run_cases(range(300_000, 300_250), worlds=(1,))
