"""The watchdog: a thread in every rank that ends it with one line when a rank that it needs is gone.

Every rank keeps one record in the job's store: a beat, whether it works, leaves, has left or has failed, and, once
it leaves, how many collectives it has issued in each process group. Every rank reads all records twice a second.
Another rank cannot be waited for any longer

1. where it says that it failed,
2. where it runs on this host and its process has ended without a word,
3. where its beat stands still for longer than the limit,
4. where it leaves, this rank has issued more collectives than it, and this rank's GPU has stood still for seconds:
   it waits in a collective that never ends. (gloo tells by itself: the leaving rank closes its connections.)

A rank that leaves while the others have nothing more to do with it disturbs nobody.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, cast

import torch
import torch.distributed as dist

from shardfuse.errors import PeerLostError
from shardfuse.mesh.groups import group_sequences
from shardfuse.mesh.rendezvous import ProcessIdentity, Store

State = Literal["working", "leaving", "left", "failed"]

_INTERVAL = 0.5  # seconds between two looks
_STANDSTILL = 4.0  # seconds without an end of what the GPU was given, once a rank has left
_FAREWELL = 3.0  # seconds that a failing rank gives the others to read why, before its launcher ends them


@dataclass(frozen=True)
class Record:
    """What a rank tells the others about itself.

    sequences: once it leaves, for every process group by name the number of collectives that it has issued.
    """

    identity: ProcessIdentity
    state: State = "working"
    beat: int = 0
    sequences: Mapping[str, int] = field(default_factory=dict[str, int])

    def to_json(self) -> str:
        return json.dumps([self.identity.to_json(), self.state, self.beat, dict(self.sequences)])

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        identity, state, beat, sequences = json.loads(text)
        return cls(ProcessIdentity.from_json(identity), state, beat, sequences)


_waits: list[Callable[[], float]] = []


def watch_waits(waiting: Callable[[], float]) -> None:
    """Have every watchdog ask for how many seconds a collective that torch does not watch has been waiting."""
    if waiting not in _waits:
        _waits.append(waiting)


class StreamProbe:
    """Tells for how long a GPU's default stream has not come to an end of what it was given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._since = 0.0

    def standstill(self) -> float:
        """Seconds since a mark was set that the stream has not reached; 0 where it has reached the last one."""
        if self._device.type != "cuda":
            return 0.0
        if self._event is None or self._event.query():
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.default_stream(self._device))
            self._since = time.monotonic()
            return 0.0
        return time.monotonic() - self._since


class Watchdog:
    """Watches the other ranks from its own thread over its own connection to the store.

    host_rank: the rank that serves the store, None where the launcher does. device: where this rank computes.
    heartbeat_limit: seconds after which a rank without a new beat counts as gone.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        host_rank: int | None,
        device: torch.device,
        heartbeat_limit: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._host_rank = host_rank
        self._limit = heartbeat_limit
        self._probe = StreamProbe(device)
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._own = Record(ProcessIdentity.of_this_process())
        self._peers: dict[int, Record] = {}
        self._moved: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, name="shardfuse-watchdog", daemon=True)

    def announce(self) -> None:
        """Put this rank's record into the store, without which the others cannot look."""
        self._store.set(_failure_key(self._rank), "")
        self._write(self._own)

    def start(self) -> None:
        """Begin to watch. Every rank has announced itself."""
        self._read_records()
        self._thread.start()

    def leave(self, timeout: float) -> bool:
        """Say that this rank issues no more collectives, and wait up to `timeout` seconds until all others say so.

        True where they do. The watch goes on meanwhile.
        """
        sequences = {name: issued for name, (_, issued) in group_sequences().items()}
        self._write(replace(self._own, state="leaving", sequences=sequences))
        return self._wait(("leaving", "left"), timeout)

    def stop(self, timeout: float) -> None:
        """Wait for the others as `leave` does, for longer, then end the watch."""
        self._wait(("leaving", "left"), timeout)
        self._stop.set()
        self._thread.join()
        self._write(replace(self._own, state="left"))

    def wait_for_the_last(self) -> None:
        """Wait until no other rank needs the store that this one serves."""
        self._wait(("left",), _FAREWELL)

    def culprit(self, patience: float) -> PeerLostError | None:
        """The rank that explains why a collective failed here, where one is found within `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            found = self._look() or self._needed_leaver()
            if found is not None or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def fail(self, line: str, failure: PeerLostError) -> NoReturn:
        """Print one line, tell the others of the failure, give them time to read it, and end this process."""
        with self._lock:  # held until the process ends: one failure, one line
            say(self._rank, line)
            if self._host_has_ended():
                os._exit(1)
            try:
                self._store.set(_failure_key(self._rank), json.dumps([failure.rank, failure.reason]))
                self._write(replace(self._own, state="failed"))
                self._wait(("failed", "left"), _FAREWELL)
            finally:  # also where the store is gone
                os._exit(1)

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL):
            with self._lock:
                found = self._look()
                if found is None and self._needed_leaver() and self._probe.standstill() > _STANDSTILL:
                    found = self._needed_leaver()
                if found is not None and not self._stop.is_set():
                    itself = found.rank == self._rank
                    self.fail(f"this rank {found.reason}" if itself else str(found), found)

    def _look(self) -> PeerLostError | None:
        """One look at the others; beats on the way."""
        with self._lock:
            found = self._ended_process()
            if found is not None or self._host_has_ended():
                return found
            try:
                self._write(replace(self._own, beat=self._own.beat + 1))
                failures = self._read_records()
            except dist.DistError:
                return self._ended_process() or self._lost_store()
            return _told_failure(failures) or self._silent_peer()

    def _ended_process(self) -> PeerLostError | None:
        for rank, peer in self._peers.items():
            if peer.state in ("working", "leaving") and peer.identity.has_ended():
                return PeerLostError(rank, "ended without a word (killed, or crashed)")
        return None

    def _host_has_ended(self) -> bool:
        """True where the store is gone for certain; asking it would only fill the terminal with torch's warnings."""
        return self._host_rank in self._peers and self._peers[self._host_rank].identity.has_ended()

    def _lost_store(self) -> PeerLostError | None:
        """The store answers no more. Where its host has left in good order, the others are left in good order too."""
        host = self._peers.get(self._host_rank or 0)
        if self._own.state in ("leaving", "left") and host is not None and host.state in ("leaving", "left"):
            return None
        return PeerLostError(
            self._host_rank or 0, "cannot be reached: the store that it or its launcher served is gone"
        )

    def _silent_peer(self) -> PeerLostError | None:
        for rank, peer in self._peers.items():
            silence = time.monotonic() - self._moved[rank]
            if peer.state in ("working", "leaving") and silence > self._limit:
                return PeerLostError(rank, f"has given no sign of life for {silence:.0f} s")
        return None

    def _needed_leaver(self) -> PeerLostError | None:
        leavers = {rank: peer for rank, peer in self._peers.items() if peer.state in ("leaving", "left")}
        if not leavers:
            return None
        for name, (ranks, issued) in group_sequences().items():
            for rank in ranks:
                if rank in leavers and issued > leavers[rank].sequences.get(name, issued):
                    return PeerLostError(rank, f"left before collective {issued} of ranks {list(ranks)}")
        return None

    def _read_records(self) -> list[bytes]:
        """Take in every record; returns what the ranks say about failures."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        values = self._store.multi_get([*map(_record_key, others), *map(_failure_key, others)])
        now = time.monotonic()
        for rank, text in zip(others, values, strict=False):
            record = Record.from_json(text)
            if rank not in self._peers or record != self._peers[rank]:
                self._peers[rank] = record
                self._moved[rank] = now
        return values[len(others) :]

    def _wait(self, states: Sequence[State], timeout: float) -> bool:
        """Until every other rank is in one of the states or has ended (True), or the time is up, or the store gone."""
        deadline = time.monotonic() + timeout
        pause = 0.005
        while time.monotonic() < deadline:
            if self._host_has_ended():
                return False
            try:
                with self._lock:
                    self._read_records()
            except dist.DistError:
                return False
            if all(peer.state in states or peer.identity.has_ended() for peer in self._peers.values()):
                return True
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return False

    def _write(self, record: Record) -> None:
        with self._lock:
            self._own = record
            self._store.set(_record_key(self._rank), record.to_json())


def say(rank: int, line: str) -> None:
    """Print one line for this rank, in one piece, whatever other ranks print."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"shardfuse: rank {rank}: {' '.join(line.split())}\n".encode())


def _told_failure(failures: Sequence[bytes]) -> PeerLostError | None:
    for text in failures:
        if text:
            rank, reason = cast("tuple[int, str]", json.loads(text))
            return PeerLostError(rank, reason)
    return None


def _record_key(rank: int) -> str:
    return f"record/{rank}"


def _failure_key(rank: int) -> str:
    return f"failure/{rank}"
