"""Which sharded programs a rank has called, so that ranks whose calls differ learn it without a cost of every call.

The ranks of a team (those of all meshes of a fusion) have to call the same programs in the same order. A call appends a
reference to a list, no more. The watchdog's thread takes the list in at each beat, publishes the number of calls and a
digest of all of them, and compares the other ranks' with its own:

    rank 0: 7 calls, digest of calls 1 to 7        rank 1: 9 calls; its digest of calls 1 to 7 is the same, or a fault

A rank that is late is no fault: only calls that both ranks have made are compared. Where digests differ, every rank of
the team publishes its latest calls with their texts, and the first that differs is named.

A rank that waits for the others before a program's first run publishes that program as what it is going to call. That
may come to nothing: the first run fails on another rank, all get over it, and go on with another program. So it is no
call, and on another rank nothing follows from it, but that one that has called another program there publishes its
calls. By these the rank that waits learns that it waits in vain, if it still does.
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

from shardfuse.errors import CallLeftOutError, ProgramMismatchError
from shardfuse.source_line import SourceLine

_CHAIN = 1 << 15
"""Calls back to which a rank can compare with one that is behind it."""
_TAIL = 4096
"""Calls back to which it can say what they were."""
_BITS = (1 << 62) - 1


@dataclass(frozen=True, eq=False)
class Call:
    """A program as its team knows it.

    text: what its ranks have alike; digest: of the text, 62 bits.
    name: what an error calls it, and the caller's line that it is from, where that is known.
    line: of a call that is no program, the first of the caller's that made it.
    """

    text: str
    digest: int
    name: str = ""
    line: SourceLine | None = None

    @classmethod
    def of(cls, text: str, name: str = "", line: SourceLine | None = None) -> Call:
        return cls(text, int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") & _BITS, name, line)

    @property
    def shown(self) -> str:
        """What an error calls it; nothing of a program without a name."""
        name = self.name or ("" if "\n" in self.text else self.text)
        return name if self.line is None else f"{name}, first called at {self.line}"


NO_CALL = Call("", 0)
"""Of a program that is not compared."""
FAILED_RUN = Call.of("the run of the call before, which failed")
"""What follows a call whose run has failed.  The other ranks' runs of it wait for this one, or take what it sends in
its next call for what it has not sent: they have to know."""
_REFUSED = Call.of("a call that was refused").digest
_LEFT_OUT = FAILED_RUN.digest, _REFUSED


def refused_call(reason: str) -> Call:
    """In the place of a call that this rank has refused.  Equal on ranks that have all refused it, whatever for."""
    return Call(f"a call that was refused: {reason}", _REFUSED)


class Told(NamedTuple):
    """What a rank publishes of a team.

    calls: how many it has made. chain: digest of them all. waits: digest of the program that it waits to call, or 0.
    differs: calls that were made differ, and every rank is to publish what it called.
    """

    calls: int
    chain: int
    waits: int
    differs: bool


class Ledger:
    """This rank's calls in one team.

    calls: what was called since the watchdog last took it in; the caller appends. waits: the program for whose first
    run this rank waits for the others, an object of this wait alone. in_vain: a wait, and why it is in vain. latest:
    the program that this rank called last, in whatever team.
    """

    def __init__(self, ranks: Sequence[int], latest: list[Call] | None = None) -> None:
        self.ranks = tuple(ranks)
        self.latest = [NO_CALL] if latest is None else latest
        self.calls: list[Call] = []
        self.waits: Call | None = None
        self.in_vain: tuple[Call, ProgramMismatchError] | None = None
        self.differs = False
        self._until = 0.0
        self.told = Told(0, 0, 0, False)
        self.taken_wait: Call | None = None
        """What this rank waited for, as the call after all that were taken in."""
        self._count = 0
        self._moving = threading.Lock()
        self._chain = array("q")  # of the last calls, this rank's chain after each
        self._tail: deque[Call] = deque(maxlen=_TAIL)

    def __deepcopy__(self, memo: object) -> Ledger:
        """A copy of a definition is called by the same rank."""
        return self

    def note(self, call: Call) -> None:
        """This rank calls a program now."""
        self.calls.append(call)
        self.latest[0] = call

    def note_refused(self, call: Call) -> None:
        """This rank leaves a call out.  Of a team that has sent nothing, not all that are left out are kept."""
        if len(self.calls) < _TAIL or not self._has_sent_nothing():
            self.note(call)

    def _has_sent_nothing(self) -> bool:
        return self._count == 0 and all(call.digest == _REFUSED for call in self.calls)

    def made(self) -> int:
        """How many calls this rank has made by now."""
        with self._moving:
            return self._count + len(self.calls)

    def has_time_to_raise(self, error: ProgramMismatchError, seconds: float) -> bool:
        """Have the waiting caller raise the error, where it stands in the caller's program; False where it did not."""
        waits = self.waits
        if waits is None:
            return False
        self.in_vain = waits, error
        self._until = self._until or time.monotonic() + seconds
        return time.monotonic() < self._until

    def why_in_vain(self, waits: Call) -> ProgramMismatchError | None:
        """Why this wait is in vain, as far as it is known."""
        found = self.in_vain
        return found[1] if found is not None and found[0] is waits else None

    @property
    def key(self) -> str:
        return ",".join(map(str, self.ranks))

    def take_in(self) -> Told:
        """Move what was called since into the record; what there is to tell now.  The watchdog's thread alone does."""
        waits = self.waits
        # Ranks that have sent one another nothing may leave out what they like.
        new = len(self.calls)
        new = 0 if self._has_sent_nothing() else new
        for call in self.calls[:new]:
            before = self._chain[-1] if self._chain else 0
            self._chain.append(_linked(before, call.digest))
        self._tail.extend(self.calls[:new])
        with self._moving:
            del self.calls[:new]
            self._count += new
        del self._chain[: max(len(self._chain) - _CHAIN, 0)]
        # A wait that began or ended meanwhile may be for one of the calls that were counted, or for the one after.
        self.taken_wait = waits if waits is self.waits else None
        chain = self._chain[-1] if self._chain else 0
        self.told = Told(self._count, chain, self.taken_wait.digest if self.taken_wait else 0, self.differs)
        return self.told

    def contradicts(self, other: Told) -> bool:
        """Has another rank called another program than this rank at the same place?"""
        chain = self._chain_at(other.calls)
        return chain is not None and chain != other.chain

    def is_waited_past(self, other: Told) -> bool:
        """Does another rank wait to call another program than this rank has called at that place?"""
        after = self._chain_at(other.calls + 1)
        return other.waits != 0 and after is not None and after != _linked(other.chain, other.waits)

    def _chain_at(self, count: int) -> int | None:
        """The chain after so many calls; None where they were not made yet, or too long ago."""
        if count == 0:
            return 0
        place = len(self._chain) - 1 - (self._count - count)
        return self._chain[place] if 0 <= place < len(self._chain) else None

    def tail(self, *coming: Call) -> str:
        """The latest calls, for the other ranks to read.  ``coming``: what would be called after them."""
        calls = [*self._tail, *coming]
        texts = {str(call.digest): (call.text, call.shown) for call in calls}
        return json.dumps([self._count - len(self._tail) + 1, [call.digest for call in calls], texts])


def first_difference(ranks: Sequence[int], tails: Mapping[int, str]) -> ProgramMismatchError | None:
    """The first call at which the ranks' programs differ; None where what they published does not show one."""
    calls: dict[int, dict[int, Call]] = {}
    for rank, tail in tails.items():
        first, digests, texts = cast("tuple[int, list[int], dict[str, tuple[str, str]]]", json.loads(tail))
        for k, digest in enumerate(digests):
            text, name = texts[str(digest)]
            calls.setdefault(first + k, {})[rank] = Call(text, digest, name)
    for number in sorted(calls):
        made = dict(sorted(calls[number].items()))
        if len({call.digest for call in made.values()}) > 1:
            place = f"call {number} of ranks {list(ranks)}"
            names = {rank: call.shown for rank, call in made.items()}
            left_out = {rank: names[rank] for rank, call in made.items() if call.digest in _LEFT_OUT}
            if left_out:
                others = {rank: name or "another call" for rank, name in names.items() if rank not in left_out}
                return CallLeftOutError(left_out, others, place)
            texts = {rank: call.text for rank, call in made.items()}
            return ProgramMismatchError(texts, place, names if all(names.values()) else None)
    return None


def _linked(chain: int, digest: int) -> int:
    return ((chain * 6364136223846793005 + digest) ^ (chain >> 29)) & _BITS


class Ledgers:
    """The ledgers of all teams that this rank is in, and what follows from the other ranks'."""

    def __init__(self, rank: int, latest: list[Call] | None = None) -> None:
        self._rank = rank
        self._latest = [NO_CALL] if latest is None else latest
        self._known: dict[tuple[int, ...], Ledger] = {}
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def of(self, ranks: Sequence[int]) -> Ledger:
        team = tuple(ranks)
        ledger = self._known.get(team)
        if ledger is None:
            ledger = self._known.setdefault(team, Ledger(team, self._latest))
        return ledger

    @property
    def latest(self) -> Call:
        """The program that this rank called last, in whatever team."""
        return self._latest[0]

    def around(self, ranks: Sequence[int]) -> list[Ledger]:
        """Those of teams that all of ``ranks`` are in."""
        return [ledger for ledger in tuple(self._known.values()) if set(ranks) <= set(ledger.ranks)]

    def told(self) -> dict[str, Told]:
        """What there was to tell at the last comparison, by team."""
        return {ledger.key: ledger.told for ledger in tuple(self._known.values())}

    def made(self) -> dict[str, int]:
        """How many calls this rank has made by now, by team."""
        return {ledger.key: ledger.made() for ledger in tuple(self._known.values())}

    def take_in(self) -> None:
        """Take in what was called by now, so that it is published from here on."""
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
                else:
                    self._look_at_waits(ledger, told, publish, read)
        return None

    def _difference(
        self, ledger: Ledger, told: Mapping[int, Told], publish: Callable[[str, str], None],
        read: Callable[[str], str | None],
    ) -> ProgramMismatchError | None:  # fmt: skip
        """The first difference, once the others have published what they called."""
        if not ledger.differs:
            ledger.differs = True
            self._until[ledger.key] = time.monotonic() + _PATIENCE
        mine = ledger.tail()
        publish(_tail_key(ledger, self._rank), mine)
        tails = {rank: read(_tail_key(ledger, rank)) for rank in ledger.ranks if rank != self._rank}
        has_patience = time.monotonic() < self._until[ledger.key]
        if None in tails.values() and has_patience:
            return None
        known = {rank: tail for rank, tail in tails.items() if tail is not None}
        error = first_difference(ledger.ranks, {self._rank: mine, **known})
        if error is not None or has_patience:
            return error
        told = {self._rank: ledger.told, **told}
        texts = {rank: f"{other.calls} calls, digest {other.chain:x}" for rank, other in told.items()}
        return ProgramMismatchError(texts, f"one of the calls of ranks {list(ledger.ranks)}, thousands of calls ago,")

    def _look_at_waits(
        self, ledger: Ledger, told: Mapping[int, Told], publish: Callable[[str, str], None],
        read: Callable[[str], str | None],
    ) -> None:  # fmt: skip
        """Have a rank learn that waits for a program in whose place others have called another one."""
        if any(ledger.is_waited_past(other) for other in told.values()):
            publish(_tail_key(ledger, self._rank), ledger.tail())
        waits = ledger.taken_wait
        ahead = [rank for rank, other in told.items() if other.calls > ledger.told.calls]
        if waits is None or not ahead:
            return
        tails = {rank: tail for rank in ahead if (tail := read(_tail_key(ledger, rank))) is not None}
        error = first_difference(ledger.ranks, {self._rank: ledger.tail(waits), **tails})
        if error is not None:
            ledger.in_vain = waits, error


_PATIENCE = 4.0
"""Seconds that a rank waits for what others called: one of them may have ended."""


def _tail_key(ledger: Ledger, rank: int) -> str:
    return f"calls/{ledger.key}/{rank}"
