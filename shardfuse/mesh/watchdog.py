"""The watchdog: a thread in every rank that ends it with one line when a rank that it needs is gone.

Every rank keeps one record in the job's store: a beat, whether it works, leaves, has left or has failed, which sharded
programs it has called (`calls.py`), and, once it leaves, how many collectives it has issued in each process group.
Every rank reads all records twice a second. Another rank cannot be waited for any longer

1. where it says that it failed,
2. where it runs on this host and its process has ended without a word,
3. where its beat stands still for longer than the limit; where the store does not answer, that is its host's silence,
4. where it leaves, this rank has issued more collectives, or launched more kernels that exchange, than it, and this
   rank's GPU has stood still for seconds, or its host has waited in a collective: it waits for what never comes (gloo
   tells sooner: the leaving rank closes its connections, but those of a group that its program still holds),
5. where it has called another program than this rank at the same place,
6. where a collective on this rank's GPU that torch does not watch has waited for longer than the group's timeout,
7. where a kernel of this rank has waited for it in vain, and no call of this rank has raised that.

A rank that leaves and that the others do not need any longer is no fault.

The store is asked by a thread of its own (`board.py`); the watchdog decides by what that has read, and nothing here
waits for the store without a limit. Time in which this process itself stood still, as of a job that was suspended, is
no rank's silence.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from shardfuse.errors import PeerLostError
from shardfuse.mesh.board import INTERVAL, Board, Record, State
from shardfuse.mesh.calls import Ledgers
from shardfuse.mesh.collective_waits import CollectiveWait, ReportedWait
from shardfuse.mesh.gloo_aborts import HeldAbort
from shardfuse.mesh.gpu_waits import StreamProbe, waited_on_gpu
from shardfuse.mesh.groups import EXCHANGES, group_sequences
from shardfuse.mesh.rendezvous import ProcessIdentity, Store
from shardfuse.mesh.silence import Silence
from shardfuse.mesh.symmetric import lost_exchange
from shardfuse.mesh.termination import SigtermThread, end_by_sigterm

_STANDSTILL = 4.0  # seconds without an end of what the GPU was given, once a rank has left
_FAREWELL = 3.0  # seconds that a failing rank gives the others to read why, before its launcher ends them
_ANSWER = 1.5  # seconds that the store has for one exchange at the end, which takes it less than a millisecond
_WORDLESS = "ended without a word (killed, or crashed)"
_TERMINATED = "was ended by SIGTERM"
_OWN_WORDS = 3.0  # seconds that a rank has to end by its own exception, which has a traceback


@dataclass(frozen=True)
class Fault:
    """Why a rank cannot go on.  rank: whose fault it is; None where it is that of all, and the reason says it all."""

    rank: int | None
    reason: str

    def line(self, reader: int) -> str:
        """What the rank ``reader`` says of it."""
        if self.rank is None:
            return self.reason
        return f"this rank {self.reason}" if self.rank == reader else str(PeerLostError(self.rank, self.reason))


def _wait_key(rank: int) -> str:
    return f"wait/{rank}"


class Watchdog:
    """Watches the other ranks from a thread of its own.

    store: a connection of its own. host_rank: the rank that serves the store, None where the launcher does.
    heartbeat_limit: seconds after which a rank without a new beat counts as gone.
    """

    def __init__(self, store: Store, rank: int, world_size: int, host_rank: int | None, heartbeat_limit: float) -> None:
        self.collective_wait = CollectiveWait(rank, self.culprit)
        self.ledgers = Ledgers(rank, self.collective_wait.latest)
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._host_rank = host_rank
        self._limit = heartbeat_limit
        self._probe: StreamProbe | None = None
        self._timeout = float("inf")
        self._claimed = threading.Lock()
        self._stop = threading.Event()
        self._identity = ProcessIdentity.of_this_process()
        self._state: State = "working"
        self._sequences: dict[str, int] = {}
        self._beat = 0
        self._board = Board(store, rank, world_size, self._compose, lambda: not self._host_has_ended())
        self._silence = Silence()
        self._trace = ""
        self._left_to_itself: float | None = None
        self._lost_since: float | None = None
        self._thread = threading.Thread(target=self._watch, name="shardfuse-watchdog", daemon=True)
        self._sigterm = SigtermThread(self._end_by_sigterm)
        self._abort = HeldAbort(
            lambda: self._beat if self._thread.is_alive() and self._board.error is None else None, self._claimed.locked
        )

    # for the main thread

    def start(self) -> None:
        """Begin to beat and to watch: a rank that has not been seen yet is not missed."""
        self._board.start()
        self._board.exchange(_ANSWER)  # the others are to see a rank that ends at once
        self._thread.start()
        self._sigterm.start()
        self._abort.start()

    def watch_device(self, device: torch.device, timeout: float) -> None:
        """Tell where this rank computes, and for how many seconds it waits for others, once it has a process group."""
        self._probe, self._timeout = StreamProbe(device), timeout

    def learn_processes(self) -> None:
        """Read all ranks' records, now that each has written one: from then on the end of any process is seen."""
        self._board.exchange(_ANSWER)

    def lost(self, rank: int) -> str | None:
        """Why the rank will come to nothing any more, as it tells by itself; None while it works."""
        record = self._board.records.get(rank)
        state = "working" if record is None else record.state
        return {"working": None, "failed": "has failed"}.get(state, "has left")

    def wait_of(self, rank: int) -> tuple[ReportedWait, Mapping[str, int]] | None:
        """The collective in which the rank waits, and what it has issued; None while it reports none."""
        record = self._board.records.get(rank)
        return None if record is None or record.wait is None else (record.wait, record.sequences)

    def program_of(self, rank: int, wait: ReportedWait) -> str | None:
        """The text of the program that the rank is in; None where that was not read yet."""
        text = self._board.read(_wait_key(rank))
        serial, program = (None, "") if text is None else json.loads(text)
        return program if serial == wait.serial else None

    def note_failure(self, trace: str) -> None:
        """Keep the text of the first exception that the others were told of: this rank may be ended without it."""
        self._trace = self._trace or trace

    def leave(self, timeout: float) -> bool:
        """Say that this rank issues no more collectives, and wait up to `timeout` seconds until all others say so.

        True where they do. The watch goes on meanwhile.
        """
        self._sequences = {name: issued for name, (_, issued) in group_sequences().items()}
        self.ledgers.take_in()
        self._state = "leaving"
        return self._wait(("leaving", "left"), timeout)

    def stop(self, timeout: float) -> None:
        """Wait for the others as `leave` does, for longer, then end the watch."""
        lost = self._last_difference() if self._wait(("leaving", "left"), timeout) else self._look()
        if lost is not None:
            self._end_for(lost)
        self._stop.set()
        self._thread.join()
        self._sigterm.stop()
        self._abort.stop()
        self._state = "left"
        self._board.exchange(_ANSWER)

    def close(self, *, is_host: bool) -> None:
        """Ask the store no more; where this rank serves it, once no other rank needs it."""
        if is_host:
            self._wait(("left",), _FAREWELL, or_lost=True)
        self._board.close()

    def abandon(self, reason: str | None) -> None:
        """End the watch of a world that did not come about; ``reason``: for those who wait; None if they know it."""
        self._stop.set()
        self._sigterm.stop()
        self._abort.stop()
        told = self._tell(None if reason is None else Fault(self._rank, f"failed: {reason}"))
        if told and reason is not None:
            self._wait(("failed", "left"), _FAREWELL, or_lost=True)
        self._board.close()

    def culprit(self, patience: float) -> Fault | None:
        """What explains that a collective failed here, where it is found within `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            self._board.exchange(min(_ANSWER, max(deadline - time.monotonic(), 0.0)))
            found = self._look() or self._differing_calls() or self._needed_leaver()
            if found is not None or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def claim(self) -> None:
        """From here on this thread ends the process: one failure, one line. A second thread waits in here."""
        if not self._claimed.acquire(blocking=False):
            threading.Event().wait()

    def fail(self, line: str, fault: Fault, leave: Callable[[], NoReturn] = lambda: os._exit(1)) -> NoReturn:
        """Print one line, tell the others of the fault, give them time to read it, and end by `leave`.

        For the thread that has claimed it.
        """
        try:
            say(self._rank, line)
            if self._tell(fault):
                self._wait(("failed", "left"), _FAREWELL, or_lost=True)
        finally:
            leave()

    def _tell(self, fault: Fault | None) -> bool:
        self._state = "failed"  # also without a fault: who has its own error has not ended without a word
        if fault is not None:
            self._board.tell_failure(fault.rank, fault.reason)
        return self._board.exchange(_ANSWER)

    def _wait(self, states: Sequence[State], timeout: float, *, or_lost: bool = False) -> bool:
        """True once every other rank is in one of the states; False at the end of the time, or where the store is gone.

        or_lost: nor waits for one that has ended or is silent, which the watchdog otherwise ends this rank for.
        """
        deadline, pause = time.monotonic() + timeout, 0.005
        while time.monotonic() < deadline:
            answered = self._board.exchange(min(_ANSWER, deadline - time.monotonic()))
            if self._board.error is not None:
                return False
            if answered and all(self._is_in(rank, states, or_lost) for rank in self._others):
                return True
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return False

    def _is_in(self, rank: int, states: Sequence[State], or_lost: bool) -> bool:
        record = self._board.records.get(rank)
        if record is None:
            return False
        is_lost = record.identity.has_ended() or self._silence.of.get(rank, 0.0) > self._limit
        return record.state in states or (or_lost and is_lost)

    # for the watchdog's thread

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._silence.listen(self._board)
            found = self._look() or self._differing_calls() or self._blocking_leaver() or self._endless_wait()
            found = found or self._lost_exchange()
            if found is None or self._stop.is_set() or self._may_end_by_itself(found):
                continue
            self._end_for(found)

    def _end_for(self, found: Fault) -> NoReturn:
        self.claim()
        if found.rank == self._rank:
            sys.stderr.write(self._trace)
        self.fail(found.line(self._rank), found)

    def _end_by_sigterm(self) -> NoReturn:
        """Name the rank that a launcher sent SIGTERM for, if it is one; else say that it was sent, as to all ranks."""
        self._board.exchange(_ANSWER)
        found = self._look()
        self.claim()
        if found is None or found.reason == _TERMINATED:
            found = Fault(self._rank, _TERMINATED)
        self.fail(found.line(self._rank), found, end_by_sigterm)

    def _may_end_by_itself(self, found: Fault) -> bool:
        """For a while, where an exception is what went wrong here, and may be uncaught."""
        if found.rank != self._rank or not self._trace:
            return False
        self._left_to_itself = self._left_to_itself or time.monotonic()
        return time.monotonic() - self._left_to_itself < _OWN_WORDS

    def _compose(self) -> Record:
        """This rank's record for the next round; the board's thread asks for it."""
        self._beat += 1
        wait, issued = self.collective_wait.reported(waited_on_gpu()) if self._state == "working" else (None, {})
        if wait is not None:
            self._board.post(_wait_key(self._rank), self.collective_wait.text(wait))
        sequences = self._sequences if wait is None else issued
        return Record(self._identity, self._state, self._beat, sequences, self.ledgers.told(), wait)

    # what is found: none of these waits for the store

    def _look(self) -> Fault | None:
        return self._told_failure() or self._ended_process() or self._lost_store() or self._silent_peer()

    def _told_failure(self) -> Fault | None:
        for text in self._board.failures.values():
            if text:
                rank, reason = json.loads(text)
                return Fault(rank, reason)
        return None

    def _ended_process(self) -> Fault | None:
        for rank, record in tuple(self._board.records.items()):
            if record.state not in ("working", "leaving") or not record.identity.has_ended():
                continue
            if not self._host_has_ended() and self._board.exchange(_ANSWER):  # its last words may not be read yet
                told = self._told_failure()
                if told is not None or self._board.records[rank].state in ("left", "failed"):
                    return told
            elif self._has_ended_after_all(rank):
                continue
            return Fault(rank, _WORDLESS)
        return None

    def _has_ended_after_all(self, host: int) -> bool:
        """The store has ended with its host, when neither needed the other any longer: in order, as far as is known."""
        record = self._board.records.get(host)
        return self._state in ("leaving", "left") and record is not None and record.state in ("leaving", "left")

    def _host_has_ended(self) -> bool:
        """True where the store is gone for certain; asking it would only fill the terminal with torch's warnings."""
        record = None if self._host_rank is None else self._board.records.get(self._host_rank)
        return record is not None and record.identity.has_ended()

    def _lost_store(self) -> Fault | None:
        host = self._host_rank or 0
        if self._board.error is None or self._has_ended_after_all(host):
            return None
        for _ in range(40):  # 2 s: a process that ends closes its connections first, on a busy machine long before
            if self._host_has_ended():
                return Fault(host, _WORDLESS)
            time.sleep(0.05)
        return Fault(host, "cannot be reached: the store that it or its launcher served is gone")

    def _silent_peer(self) -> Fault | None:
        if self._silence.of_store > self._limit:
            server = "it" if self._host_rank is not None else "it or its launcher"
            reason = f"has given no sign of life for {self._silence.of_store:.0f} s: the store that {server} serves"
            return Fault(self._host_rank or 0, f"{reason} does not answer")
        for rank, silence in tuple(self._silence.of.items()):
            if silence > self._limit and self._board.records[rank].state in ("working", "leaving"):
                return Fault(rank, f"has given no sign of life for {silence:.0f} s")
        return None

    def _differing_calls(self) -> Fault | None:
        calls = {rank: record.calls for rank, record in self._board.records.items()}
        found = self.ledgers.compare(calls, self._board.post, self._board.read)
        if found is None:
            return None
        ledger, error = found
        if ledger.has_time_to_raise(error, _OWN_WORDS):
            return None
        return Fault(None, str(error))

    def _last_difference(self) -> Fault | None:
        """Among all that was called, now that every rank has told it: the last call may have been another one."""
        while not self._stop.is_set():
            found = self._differing_calls()
            if found is not None or not self.ledgers.is_in_doubt():
                return found
            self._board.exchange(_ANSWER)
            time.sleep(0.05)
        return None

    def _blocking_leaver(self) -> Fault | None:
        leaver = self._needed_leaver()
        if leaver is None or self._probe is None:
            return None
        return leaver if max(self._probe.standstill(), self.collective_wait.waited()) > _STANDSTILL else None

    def _endless_wait(self) -> Fault | None:
        waited = waited_on_gpu()
        if waited <= self._timeout:
            return None
        return Fault(
            None,
            f"rank {self._rank} has waited for {waited:.0f} s in a collective on its GPU, longer than the timeout of "
            "its process group: another rank has not come to it, or its GPU stands still",
        )

    def _lost_exchange(self) -> Fault | None:
        """Where results are NaN and nobody was told: the next call would raise it, but maybe none comes."""
        lost, now = lost_exchange(), time.monotonic()
        self._lost_since = None if lost is None else self._lost_since or now
        if lost is None or self._lost_since is None or now - self._lost_since < _OWN_WORDS:
            return None
        return Fault(None, str(lost))

    def _needed_leaver(self) -> Fault | None:
        records = self._board.records
        leavers = {rank: peer for rank, peer in records.items() if peer.state in ("leaving", "left")}
        if not leavers or self._probe is None:
            return None
        for name, (ranks, issued) in group_sequences().items():
            for rank in ranks:
                is_exchange = name.startswith(EXCHANGES)
                if rank in leavers and issued > leavers[rank].sequences.get(name, 0 if is_exchange else issued):
                    what = "exchange in a kernel, number" if is_exchange else "collective"
                    return Fault(rank, f"left before {what} {issued} of ranks {list(ranks)}")
        return None


def say(rank: int, line: str) -> None:
    """Print one line for this rank, in one piece, whatever other ranks print."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"shardfuse: rank {rank}: {' '.join(line.split())}\n".encode())
