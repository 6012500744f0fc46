"""Whom a rank names that finds the job's store gone with the rank that served it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from shardfuse.mesh import board
from shardfuse.mesh.rendezvous import ProcessIdentity, _started, _this_host
from shardfuse.mesh.watchdog import Watchdog


def test_a_host_that_is_killed_right_after_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 came first: it has read no record of rank 0 but the one that it reads once the world is formed."""
    monkeypatch.setattr(board, "INTERVAL", 60.0)
    store = dist.HashStore()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    guards = [Watchdog(store, rank, 2, 0, 30.0) for rank in (1, 0)]
    try:
        for guard in guards:
            guard._board.start()
        guards[0]._board.exchange(5.0)
        guards[1]._identity = ProcessIdentity(_this_host(), process.pid, _started(process.pid) or 0)
        guards[1]._board.exchange(5.0)
        assert not guards[0]._board.records
        guards[0].learn_processes()
        process.kill()
        process.wait()
        guards[0]._board.error = ConnectionError("the store's host has closed its connections")
        found = guards[0]._look()
        assert found is not None
        assert found.line(1).startswith("rank 0 ended without a word (killed, or crashed)")
    finally:
        process.kill()
        process.communicate()
        for guard in guards:
            guard.close(is_host=False)
