"""The benchmark of sharded losses: each is right by its own rule, and one that is wrong is reported."""

from __future__ import annotations

import pytest
import torch

from benchmarks import losses
from benchmarks.losses import COMPILED, OWN, PLAIN, run_losses
from benchmarks.workload import Case

pytestmark = pytest.mark.mpi


def test_right_losses_have_no_note(pg, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    found = list(run_losses([Case.parse(f"48x{32 * pg.size}:float32")], pg.device, rounds=1))
    assert [[row.impl for row in rows] for rows in found] == [[OWN, PLAIN, COMPILED]] * 2
    assert [row.note for rows in found for row in rows] == [""] * 6


def test_a_gradient_that_is_off_is_reported(pg, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    right = losses.Sharded._of

    def wrong(sharded: losses.Sharded, loss: losses.Loss) -> tuple[torch.Tensor, torch.Tensor]:
        value, gradient = right(sharded, loss)
        return value, gradient * 0.999

    monkeypatch.setattr(losses.Sharded, "_of", wrong)
    found = list(run_losses([Case.parse(f"48x{32 * pg.size}:float32")], pg.device, rounds=1))
    assert all(row.note.startswith("WRONG") for rows in found for row in rows if row.impl == OWN)
