"""Which sharded programs a rank has called, so that ranks whose calls differ learn it without a cost of every call.

The ranks of a team (those of all meshes of a fusion) have to call the same programs in the same order. A call appends a
reference to a list, no more. The watchdog's thread takes the list in at each beat, publishes the number of calls and a
digest of all of them, and compares the other ranks' with its own:

    rank 0: 7 calls, digest of calls 1 to 7        rank 1: 9 calls; its digest of calls 1 to 7 is the same, or a fault

A rank that is late is no fault: only calls that both ranks have made are compared. A rank that waits for the others
before a program's first run publishes that program as its next call. Where digests differ, every rank of the team
publishes its latest calls with their texts, and the first that differs is named.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from shardfuse.errors import ProgramMismatchError

_CHAIN = 1 << 15
"""Calls back to which a rank can compare with one that is behind it."""
_TAIL = 4096
"""Calls back to which it can say what they were."""
_BITS = (1 << 62) - 1


@dataclass(frozen=True, eq=False)
class Call:
    """A program as its team knows it.  ``text``: what its ranks have alike; ``digest``: of the text, 62 bits."""

    text: str
    digest: int

    @classmethod
    def of(cls, text: str) -> Call:
        return cls(text, int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") & _BITS)


NO_CALL = Call("", 0)
"""Of a program that nobody compares."""


class Told(NamedTuple):
    """What a rank publishes of a team.

    calls: how many it has made. chain: digest of them all. waits: digest of the program that it waits to call, or 0.
    differs: it has seen that calls differ, and every rank is to publish what it called.
    """

    calls: int
    chain: int
    waits: int
    differs: bool


class Ledger:
    """This rank's calls in one team.

    calls: what was called since the watchdog last took it in; the caller appends. waits: the program for whose first
    run this rank waits for the others. found: why it waits in vain, once that is known. latest: the program that this
    rank called last, in whatever team.
    """

    def __init__(self, ranks: Sequence[int], latest: list[Call] | None = None) -> None:
        self.ranks = tuple(ranks)
        self.latest = [NO_CALL] if latest is None else latest
        self.calls: list[Call] = []
        self.waits: Call | None = None
        self.found: ProgramMismatchError | None = None
        self.differs = False
        self._until = 0.0
        self.told = Told(0, 0, 0, False)
        self._waits: Call | None = None
        self._count = 0
        self._chain = array("q")  # of the last calls, this rank's chain after each
        self._tail: deque[Call] = deque(maxlen=_TAIL)

    def note(self, call: Call) -> None:
        """This rank calls a program now."""
        self.calls.append(call)
        self.latest[0] = call

    def has_time_to_raise(self, error: ProgramMismatchError, seconds: float) -> bool:
        """Have the waiting caller raise the error, where it stands in the caller's program; False where it did not."""
        if self.found is None:
            self.found, self._until = error, time.monotonic() + seconds
        return time.monotonic() < self._until

    @property
    def key(self) -> str:
        return ",".join(map(str, self.ranks))

    def take_in(self) -> Told:
        """Move what was called since into the record; what there is to tell now.  The watchdog's thread alone does."""
        waits = self.waits
        new = len(self.calls)
        for call in self.calls[:new]:
            before = self._chain[-1] if self._chain else 0
            self._chain.append(_linked(before, call.digest))
        self._tail.extend(self.calls[:new])
        del self.calls[:new]
        self._count += new
        del self._chain[: max(len(self._chain) - _CHAIN, 0)]
        # A wait that began or ended meanwhile may be for one of the calls that were counted, or for the one after.
        self._waits = waits if waits is self.waits else None
        chain = self._chain[-1] if self._chain else 0
        self.told = Told(self._count, chain, self._waits.digest if self._waits else 0, self.differs)
        return self.told

    def contradicts(self, other: Told) -> bool:
        """Has another rank called, or does it wait to call, another program than this rank at the same place?"""
        chain = self._chain_at(other.calls)
        if chain is not None and chain != other.chain:
            return True
        after = self._chain_at(other.calls + 1)
        return other.waits != 0 and after is not None and after != _linked(other.chain, other.waits)

    def _chain_at(self, count: int) -> int | None:
        """The chain after so many calls; None where they were not made yet, or too long ago."""
        if count == 0:
            return 0
        place = len(self._chain) - 1 - (self._count - count)
        return self._chain[place] if 0 <= place < len(self._chain) else None

    def tail(self) -> str:
        """The latest calls, the one that this rank waits for included, for the other ranks to read."""
        calls = [*self._tail, *([self._waits] if self._waits else [])]
        texts = {str(call.digest): call.text for call in calls}
        return json.dumps([self._count - len(self._tail) + 1, [call.digest for call in calls], texts])


def first_difference(ranks: Sequence[int], tails: Mapping[int, str]) -> ProgramMismatchError | None:
    """The first call at which the ranks' programs differ; None where what they published does not show one."""
    calls: dict[int, dict[int, str]] = {}
    for rank, tail in tails.items():
        first, digests, texts = cast("tuple[int, list[int], dict[str, str]]", json.loads(tail))
        for k, digest in enumerate(digests):
            calls.setdefault(first + k, {})[rank] = texts[str(digest)]
    for number in sorted(calls):
        if len(set(calls[number].values())) > 1:
            return ProgramMismatchError(dict(sorted(calls[number].items())), f"call {number} of ranks {list(ranks)}")
    return None


def _linked(chain: int, digest: int) -> int:
    return ((chain * 6364136223846793005 + digest) ^ (chain >> 29)) & _BITS


class Ledgers:
    """The ledgers of all teams that this rank is in, and what follows from the other ranks'."""

    def __init__(self, rank: int, latest: list[Call] | None = None) -> None:
        self._rank = rank
        self._latest = latest
        self._known: dict[tuple[int, ...], Ledger] = {}
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def of(self, ranks: Sequence[int]) -> Ledger:
        team = tuple(ranks)
        ledger = self._known.get(team)
        if ledger is None:
            ledger = self._known.setdefault(team, Ledger(team, self._latest))
        return ledger

    def told(self) -> dict[str, Told]:
        """What there was to tell at the last comparison, by team."""
        return {ledger.key: ledger.told for ledger in tuple(self._known.values())}

    def take_in(self) -> None:
        """Take in what was called by now, so that it is told from here on."""
        with self._lock:
            for ledger in tuple(self._known.values()):
                ledger.take_in()

    def is_in_doubt(self) -> bool:
        """Has a difference been seen that is not named yet?"""
        return any(ledger.differs for ledger in tuple(self._known.values()))

    def compare(
        self, others: Mapping[int, Mapping[str, Told]], publish: Callable[[str, str], None],
        read: Callable[[str], str | None],
    ) -> tuple[Ledger, ProgramMismatchError] | None:  # fmt: skip
        """Take in what was called, and find a call that differs from another rank's.

        others: what they tell, by rank and team. publish, read: texts in the store by key; what is read comes later.
        """
        with self._lock:  # nothing in here waits
            for ledger in tuple(self._known.values()):
                ledger.take_in()
                told = {rank: others[rank][ledger.key] for rank in ledger.ranks if ledger.key in others.get(rank, {})}
                if ledger.differs or any(other.differs or ledger.contradicts(other) for other in told.values()):
                    error = self._difference(ledger, told, publish, read)
                    if error is not None:
                        return ledger, error
        return None

    def _difference(
        self, ledger: Ledger, told: Mapping[int, Told], publish: Callable[[str, str], None],
        read: Callable[[str], str | None],
    ) -> ProgramMismatchError | None:  # fmt: skip
        """The first difference, once the others have published what they called."""
        if not ledger.differs:
            ledger.differs = True
            self._until[ledger.key] = time.monotonic() + _PATIENCE
        publish(_tail_key(ledger, self._rank), ledger.tail())
        tails = {rank: read(_tail_key(ledger, rank)) for rank in ledger.ranks if rank != self._rank}
        has_patience = time.monotonic() < self._until[ledger.key]
        if None in tails.values() and has_patience:
            return None
        known = {rank: tail for rank, tail in tails.items() if tail is not None}
        error = first_difference(ledger.ranks, {self._rank: ledger.tail(), **known})
        if error is not None or has_patience:
            return error
        if not any(ledger.contradicts(other) for other in told.values()):
            ledger.differs = False  # what was told had not gone on yet: all that is told by now agrees
            return None
        told = {self._rank: ledger.told, **told}
        texts = {rank: f"{other.calls} calls, digest {other.chain:x}" for rank, other in told.items()}
        return ProgramMismatchError(texts, f"one of the calls of ranks {list(ledger.ranks)}, thousands of calls ago,")


_PATIENCE = 4.0
"""Seconds that a rank waits for what others called: one of them may have ended."""


def _tail_key(ledger: Ledger, rank: int) -> str:
    return f"calls/{ledger.key}/{rank}"
