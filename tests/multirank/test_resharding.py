"""Changes of sharding over processes: gloo on the CPU, NCCL where every rank has a GPU of its own."""

from __future__ import annotations

import pytest
from resharding_cases import pairs, run, sample

pytestmark = pytest.mark.mpi


def test_one_mesh_dimension(pg) -> None:
    for case in pairs((pg.size,), (4 * pg.size, 4 * pg.size, 4 * pg.size)):
        run(case, pg.rank, pg.device)


def test_uneven(pg) -> None:
    for case in pairs((pg.size,), (pg.size + 1, 2 * pg.size + 1, 3)):
        run(case, pg.rank, pg.device)


def test_two_mesh_dimensions(pg) -> None:
    if pg.size % 2 == 0:
        mesh = (2, pg.size // 2)
        for case in sample(mesh, (4 * pg.size, 4 * pg.size, 2 * pg.size), 40, seed=3):
            run(case, pg.rank, pg.device)
