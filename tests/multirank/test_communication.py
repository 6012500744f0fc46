"""Every collective over processes: gloo on the CPU, NCCL where every rank has a GPU of its own."""

from __future__ import annotations

import time

import pytest
import torch
from collective_cases import CHECKS, Check

from shardfuse.executor import collective_calls as comm
from shardfuse.mesh.groups import Team

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_over_processes(check: Check, pg) -> None:
    check(pg.rank, pg.size, pg.device)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_cpu_tensors_beside_nccl(check: Check, pg) -> None:
    check(pg.rank, pg.size, torch.device("cpu"))


def test_no_warning_about_torchs_names(pg, recwarn: pytest.WarningsRecorder) -> None:
    team = Team.of(range(pg.size), pg.rank)
    x = torch.ones(pg.size, 2, device=pg.device)
    comm.all_gather(comm.reduce_scatter(x, 0, "sum", team), 0, team)
    assert [str(w.message) for w in recwarn if issubclass(w.category, FutureWarning)] == []


def test_ranks_make_groups_in_different_numbers(pg) -> None:
    """A chain of pairs: every rank has made another number of groups when it meets the next."""
    for left in range(pg.size - 1):
        if pg.rank in (left, left + 1):
            team = Team.of((left, left + 1), pg.rank)
            total = comm.all_reduce(torch.tensor(float(pg.rank), device=pg.device), "sum", team)
            assert total.item() == 2 * left + 1


@pytest.mark.parametrize("late", [0, 1])
def test_a_result_is_there_when_the_call_returns(late: int, pg) -> None:
    """A rank comes later than the others: what they return before it came would be without its values."""
    team = Team.of(range(pg.size), pg.rank)
    x = torch.full((pg.size, 1 << 16), float(pg.rank + 1), device=pg.device)
    calls = (
        lambda: comm.all_reduce(x, "sum", team)[0],
        lambda: comm.reduce_scatter(x, 0, "sum", team)[0],
        lambda: comm.all_gather(x[:1], 0, team).sum(0),
        lambda: comm.all_to_all(x, 0, 1, team).view(pg.size, -1).sum(0),
    )
    for call in calls:
        if pg.rank == late:
            time.sleep(0.2)
        assert (call() == sum(range(1, pg.size + 1))).all()
    for root in range(pg.size):
        if pg.rank == root:
            time.sleep(0.2)
        found = comm.broadcast(x if pg.rank == root else None, x.shape, x.dtype, pg.device, root, team.ranks)
        assert (found == root + 1).all()
