"""Whom a rank names that finds the job's store gone with the rank that served it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import cast

import pytest
import torch.distributed as dist

from shardfuse.mesh import board
from shardfuse.mesh.board import Board, Record
from shardfuse.mesh.rendezvous import ProcessIdentity, Store, _started, _this_host
from shardfuse.mesh.silence import Silence
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


def test_a_rank_that_gives_up_a_world_with_an_error_of_its_own_has_not_ended_without_a_word() -> None:
    """Rank 1 has read that the world sizes differ; rank 0 is slow, and finds its process gone before it has read it."""
    store = dist.HashStore()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    guards = [Watchdog(store, rank, 2, 0, 30.0) for rank in (0, 1)]
    try:
        guards[1]._identity = ProcessIdentity(_this_host(), process.pid, _started(process.pid) or 0)
        for guard in (guards[1], guards[0]):
            guard._board.start()
            guard._board.exchange(5.0)
        assert guards[0]._board.records[1].state == "working"
        guards[1].abandon(None)
        process.kill()
        process.wait()
        assert guards[0]._look() is None
    finally:
        process.kill()
        process.communicate()
        guards[0].close(is_host=False)


class Slow:
    """A store that answers each question when it is let."""

    def __init__(self) -> None:
        self.answers = threading.Semaphore(0)
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Callable[..., object]:
        ask = getattr(self._store, name)

        def asked(*of: object) -> object:
            self.answers.acquire()
            return ask(*of)

        return asked


def test_a_store_is_silent_that_answers_no_question_however_long_a_round_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that others keep busy take seconds for a round, of which each question is answered."""
    now = [0.0]
    monkeypatch.setattr("shardfuse.mesh.silence.time.monotonic", lambda: now[0])
    store, silence = Slow(), Silence()
    here = ProcessIdentity.of_this_process()
    asking = Board(cast("Store", store), 0, 2, lambda: Record(here), lambda: True)
    asking.start()

    def listened() -> float:
        now[0] += 2 * board.INTERVAL
        silence.listen(asking)
        return silence.of_store

    try:
        asking.exchange(0.0)
        for question in range(3):
            while asking.unanswered() != question:
                time.sleep(0.001)
            assert listened() == 0.0, "the one before was answered"
            assert [listened() for _ in range(3)] == [2 * board.INTERVAL * k for k in (1, 2, 3)]
            store.answers.release()
        assert asking.rounds == 0
    finally:
        store.answers.release(1000)
        asking.close()
