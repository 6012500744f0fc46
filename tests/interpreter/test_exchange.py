"""Kernels whose ranks exchange statistics, one rank after the other: as often as words have to go round.

Programs of the interpreter do not wait.  Every pass of all ranks has the same number of a launch, so that what one
stores in a pass the others find in the next: after one pass for each exchange, and one, all is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exchange_cases import KINDS, PARTIAL, Ranks, define, expected, inputs, kernel_of, piece_of_output, plan_of

from benchmarks.roundings import assert_near
from shardfuse import DataType
from shardfuse.ir.expr import REDUCTIONS
from shardfuse.schedulers import sent_words


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 640, 2), (5, 96, 3), (1, 2048, 4)])
def test_what_all_ranks_have_together(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    plan = kernel_of(plan_of(define(kind, n, ranks, DataType.BFloat16), rows))
    world, given = Ranks(plan, torch.device("cpu")), inputs(kind, rows, n, torch.bfloat16, ranks)
    launches, tensors = world.launches(tmp_path, interpret=True), [world.pieces(kind, r, given) for r in range(ranks)]
    rounds = 1 + max(len(plan.exchange.statistics), 1)
    rounds += sum(e.op in REDUCTIONS for e in plan.segment.exprs) * (plan.exchange.members > 1)
    for _ in range(rounds):
        for rank, launch in enumerate(launches):
            world.tables[rank][3 + 2 * ranks :] = 7
            launch(None, *(tensors[rank][t] for t in (*plan.segment.inputs, *plan.segment.outputs)))
    wide, eager = expected(kind, [v.double() for v in given]), expected(kind, [v.float() for v in given])
    for k, out in enumerate(plan.segment.outputs):
        for rank, t in enumerate(tensors):
            parts = [piece_of_output(kind, v[k], ranks, rank) for v in (wide, eager)]
            assert_near(t[out], parts[0], parts[1].bfloat16(), n=2, what=f"output {k} of rank {rank}")
    assert all(own[3 + 2 * ranks] == 8 for own in world.tables)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "softmax"])
@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 643, 2), (5, 97, 3)])
def test_ranks_with_more_or_less_of_each_row(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    test_what_all_ranks_have_together(kind, rows, n, ranks, tmp_path)


@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 640, 2), (5, 96, 3), (1, 2048, 4)])
def test_rows_that_ranks_send(rows: int, n: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as are sent so, without so many."""
    monkeypatch.setattr(sent_words, "MOST_ELEMENTS", 0)
    test_what_all_ranks_have_together(PARTIAL, rows, n, ranks, tmp_path)


@pytest.mark.parametrize(("rows", "n"), [(1, 6144), (1, 12288)])
def test_programs_that_share_a_row_have_whole_blocks(rows: int, n: int, tmp_path: Path) -> None:
    """A part of a row that is no power of two is cut into smaller blocks: a block of more would be its neighbour's."""
    assert kernel_of(plan_of(define(PARTIAL, n, 2, DataType.BFloat16), rows)).exchange.members > 1
    test_what_all_ranks_have_together(PARTIAL, rows, n, 2, tmp_path)
