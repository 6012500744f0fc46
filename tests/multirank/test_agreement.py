"""Programs are compared over processes: differences named on every rank, and what a comparison costs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from planted_differences import Variant
from process_cases import fork_after_a_run

from shardfuse.errors import PeerLostError, ProgramMismatchError, ShardfuseError
from shardfuse.executor import agreement
from shardfuse.executor.agreement import agree

# a world remembers what its ranks agreed on
pytestmark = [pytest.mark.mpi, pytest.mark.fresh_world]


def variant(pg, **changes: object) -> Variant:
    return replace(Variant(rows=2 * pg.size, mesh=tuple(range(pg.size))), **changes)


def test_same_program(pg) -> None:
    y, s = variant(pg).run(pg.rank)
    assert y.tolist() == [[1.5] * 24] * 2
    assert s.tolist() == [36.0] * 2


@pytest.mark.parametrize("changes", [{"unary": "exp"}, {"constant": 0.25}, {"columns": 48}, {"axes": (0,)}], ids=str)
def test_difference_is_named_on_every_rank(changes: dict[str, object], pg) -> None:
    odd = pg.size - 1
    if pg.size < 2:
        return
    with pytest.raises(ProgramMismatchError, match=f"rank {odd} has `"):
        variant(pg, **changes if pg.rank == odd else {}).run(pg.rank)


def test_failure_of_one_rank_is_told(pg) -> None:
    if pg.size < 2:
        return
    fd = variant(pg).define()
    x, w = torch.ones(2, 24, device=pg.device), torch.ones(24, device=pg.device)
    with pytest.raises(ShardfuseError, match=r"dtype torch\.float64") as caught:
        fd.execute([x.double() if pg.rank == 0 else x, w])
    assert isinstance(caught.value, PeerLostError) == (pg.rank != 0)


def test_a_fork_from_a_rank_of_a_world_that_the_caller_made(pg) -> None:
    if pg.size < 2 or pg.device.type != "cpu":
        return
    fork_after_a_run(pg.rank, pg.size)


def test_cost(pg, record_property, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison is two round trips to the store: 0.4 ms at 2 ranks on an idle machine."""
    ranks = range(pg.size)
    texts = [f"{k}\n" + "T2 = fd.ops.add(T0, T1)\n" * 30 for k in range(100)]
    agree(ranks, "first")
    spent: list[float] = []
    for text in texts:
        began = time.perf_counter()
        agree(ranks, text)
        spent.append(time.perf_counter() - began)
    median = sorted(spent)[len(spent) // 2]
    record_property("agreement_ms", median * 1e3)
    print(f"a comparison at {pg.size} ranks: {median * 1e3:.3f} ms")
    compared: list[int] = []
    original = agreement._Side.run
    monkeypatch.setattr(agreement._Side, "run", lambda *a: compared.append(1) or original(*a))
    for text in texts:
        agree(ranks, text)
    assert compared == [], "what was agreed is asked of nobody"
    agree(ranks, "another")
    assert len(compared) == (pg.size > 1)
