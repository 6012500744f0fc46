"""What ranks tell one another through the job's store, read and written by a thread that no other thread waits for.

A store whose process is stopped answers neither with a value nor with an error, for as long as that lasts. So the
thread here is the only one that asks it, it holds no lock meanwhile, and whoever wants an answer says for how long.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

from shardfuse.mesh.calls import Told
from shardfuse.mesh.collective_waits import ReportedWait
from shardfuse.mesh.rendezvous import ProcessIdentity, Store

T = TypeVar("T")
State = Literal["working", "leaving", "left", "failed"]

INTERVAL = 0.5
"""Seconds between two rounds, where none is asked for."""
_KEPT = 40
"""Rounds for which a text is kept that is not read any more."""


@dataclass(frozen=True)
class Record:
    """What a rank tells the others about itself.

    sequences: once it leaves, or tells of a wait, for every process group by name the number of collectives that it has
    issued. calls: by team, what it called. wait: the collective in which it waits, once that has taken seconds.
    """

    identity: ProcessIdentity
    state: State = "working"
    beat: int = 0
    sequences: Mapping[str, int] = field(default_factory=dict[str, int])
    calls: Mapping[str, Told] = field(default_factory=dict[str, Told])
    wait: ReportedWait | None = None

    def to_json(self) -> str:
        told = dict(self.sequences), dict(self.calls), self.wait
        return json.dumps([self.identity.to_json(), self.state, self.beat, *told])

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        identity, state, beat, sequences, calls, wait = json.loads(text)
        told = {key: Told(*values) for key, values in cast("dict[str, tuple[int, int, int, bool]]", calls).items()}
        waits = None if wait is None else ReportedWait(*wait)
        return cls(ProcessIdentity.from_json(identity), state, beat, sequences, told, waits)


class Board:
    """A thread that writes this rank's record, and reads the others', once in a while and when asked to.

    compose: this rank's record as it is now. is_served: False where the store is gone for certain; asking it would
    only fill the terminal with torch's warnings.

    records: of the other ranks, as far as they are there. failures: what ranks tell about failures. Both are replaced,
    never changed. error: what the store failed with; no round follows it.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, compose: Callable[[], Record], is_served: Callable[[], bool]
    ) -> None:
        self.records: Mapping[int, Record] = {}
        self.failures: Mapping[int, str] = {}
        self.error: Exception | None = None
        self.rounds = 0
        self._store = store
        self._answers = 0
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._compose = compose
        self._is_served = is_served
        self._changed = threading.Condition()
        self._begun = 0
        self._wanted = 0
        self._is_closed = False
        self._posts: dict[str, str] = {_failure_key(rank): ""}  # a key that is there is read with the others' at once
        self._unread: dict[str, int] = {}  # of each key that is asked for, the rounds since it was
        self._found: dict[str, str] = {}
        self._seen: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="shardfuse-board", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, key: str, text: str) -> None:
        """Write a text in the next round."""
        with self._changed:
            self._posts[key] = text

    def tell_failure(self, rank: int | None, reason: str) -> None:
        """Write, in the next round, that the job has failed: by a rank's fault, or by that of all (None)."""
        self.post(_failure_key(self._rank), json.dumps([rank, reason]))

    def read(self, key: str) -> str | None:
        """A text of another rank as of the last round; None where it was not there, or was not asked for before.

        It is read from the store in the round after each call, and forgotten without a call for some rounds.
        """
        with self._changed:
            self._unread[key] = 0
            return self._found.get(key)

    def unanswered(self) -> int | None:
        """The number of the question that the store has not answered yet, within a round; None between two rounds.

        A round has several: on a machine that others keep busy each is answered, and all of them take seconds.
        """
        with self._changed:
            return self._answers if self._begun != self.rounds else None

    def exchange(self, timeout: float) -> bool:
        """Have a round begin now; True where it ends within so many seconds."""
        with self._changed:
            goal = self._wanted = self._begun + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.rounds >= goal or self.error or self._is_closed, timeout)
            return self.rounds >= goal

    def close(self) -> None:
        """No further rounds. One that the store does not answer is left behind."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted > self._begun or self._is_closed, INTERVAL)
                if self._is_closed:
                    return
                self._begun += 1
                posts, self._posts = self._posts, {}
                asked = [key for key, rounds in self._unread.items() if rounds == 0]
                self._unread = {key: rounds + 1 for key, rounds in self._unread.items() if rounds < _KEPT}
            try:
                if not self._is_served():
                    raise ConnectionError("the process that served the store has ended")
                found = self._round(posts, asked)
            except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
                with self._changed:
                    self.error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._found = {key: text for key, text in {**self._found, **found}.items() if key in self._unread}
                self.rounds = self._begun
                self._changed.notify_all()

    def _round(self, posts: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
        """One exchange with the store, which may take for ever."""
        for key, text in posts.items():
            self._answered(self._store.set(key, text))
        self._answered(self._store.set(_record_key(self._rank), self._compose().to_json()))
        records = self._read_present({rank: _record_key(rank) for rank in self._others})
        failures = self._read_present({rank: _failure_key(rank) for rank in self._others})
        self.records = {rank: Record.from_json(text) for rank, text in records.items()}
        self.failures = failures
        there = [key for key in asked if self._answered(self._store.check([key]))]
        return {key: self._answered(self._store.get(key)).decode() for key in there}

    def _read_present(self, keys: Mapping[int, str]) -> dict[int, str]:
        """What there is: a key that was never set would be waited for."""
        missing = [key for key in keys.values() if key not in self._seen]
        if missing and self._answered(self._store.check(missing)):
            self._seen.update(missing)
        else:
            self._seen.update(key for key in missing if self._answered(self._store.check([key])))
        there = {rank: key for rank, key in keys.items() if key in self._seen}
        if not there:
            return {}
        values = self._answered(self._store.multi_get(list(there.values())))
        return {rank: value.decode() for rank, value in zip(there, values, strict=True)}

    def _answered(self, answer: T) -> T:
        self._answers += 1
        return answer


def _record_key(rank: int) -> str:
    return f"record/{rank}"


def _failure_key(rank: int) -> str:
    return f"failure/{rank}"
