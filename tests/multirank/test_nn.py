"""shardfuse.nn over processes: gloo on the CPU, NCCL where every rank has a GPU of its own."""

from __future__ import annotations

import pytest
from nn_cases import ON_LINE, ON_SQUARE, Here

from shardfuse import DeviceMesh

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", ON_LINE)
def test_on_a_line_of_ranks(name: str, pg) -> None:
    ON_LINE[name](Here(DeviceMesh(list(range(pg.size))), pg.device))


@pytest.mark.parametrize("name", ON_SQUARE)
def test_on_a_square_of_ranks(name: str, pg) -> None:
    if pg.size != 4:
        pytest.skip("needs 4 ranks")
    ON_SQUARE[name](Here(DeviceMesh([[0, 1], [2, 3]]), pg.device))
