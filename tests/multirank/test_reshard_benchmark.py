"""The benchmark of changes of sharding, at a size that shows only that it runs and is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.reshard import OWN, PEER, run_reshard
from benchmarks.workload import Case

pytestmark = pytest.mark.mpi


def test_every_change_is_right(pg) -> None:
    if pg.size != 4:
        pytest.skip("four ranks have every change, on a line and on a grid")
    rows = [row for found in run_reshard([Case.parse("64x64")], pg.device, rounds=1) for row in found]
    assert [r for r in rows if r.impl == OWN and (r.note or not r.us)] == []
    changes = [r for r in rows if r.impl == PEER]
    assert len(changes) == 15
    assert all(r.us or "torch" in r.note or "failed" in r.note for r in changes)
    whole, collective, kernels, unsharded = (r for r in rows if r.workload.startswith("row_sharded_backward"))
    assert whole.workload == "row_sharded_backward, all_reduce"  # one for dw and db
    assert all(r.us for r in (whole, collective, kernels, unsharded))
