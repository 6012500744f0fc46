"""Before a program's first run its ranks compare it: through the store, with a timeout, never by a collective.

What is compared is a text that every rank must have alike: the definition with its shardings, unsharded sizes,
options and versions. Only such agreed facts start a comparison, each text once for each rank, so that a rank that binds
a program anew for facts of its own (strides, an evicted cache entry) waits for no other rank.

1. Every rank counts the comparisons of its team. At count k it puts the digest of its text under `team/k/rank`, and
   waits until all of the team have done so. Equal digests: done, two round trips.
2. Digests that differ are seen by all: each puts its text under `team/k/text/rank`, and names the first line that
   differs.
3. A rank that could not make its program puts the reason in place of the digest, so that no rank waits for it.
4. A rank that fails before it comes to comparison k says so under `at/rank`: that one is not held, the next is k again.
5. A rank that waits for longer says under `at/rank` where it waits and with which text; one that fails says why. So
   two ranks that wait for each other with different teams, ranks that wait in a circle, in a collective too, and all
   that wait for those, end at once.
6. The watchdog knows who has left, and what those do who are elsewhere: a rank that has left is not waited for, and
   where another has called another program instead of this one, the difference is raised here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..config import read_settings
from ..errors import PeerLostError, ProgramMismatchError, ShardfuseError
from ..mesh.calls import Call, Ledger
from ..mesh.groups import current_rank, default_group, default_store, default_timeout, world_size
from ..mesh.process import check_is_a_rank, is_forked, issued, ledger_of, note_failure, own_ledgers, own_watchdog
from ..mesh.rendezvous import PrefixStore, Store
from ..rank_errors import RanksLateError, WaitingCircleError
from ..source_line import caller_line
from .circles import Wait, find_circle
from .comparison import OK, Comparison, Made, Told, digest
from .failures import Failure, Failures, sentence_of

_QUIET = 0.2  # seconds of waiting before a rank says where it waits
SHORTEST, LONGEST = 20e-6, 0.05  # seconds between two looks into the store
_CALLS_COMPARED = 5.0  # seconds in which the watchdog tells of a call that differs, by its number


@contextmanager
def agreed(ranks: Sequence[int], text: str, call: str | None = None) -> Generator[Made]:
    """Compare ``text`` with the other ``ranks``' once the body has made the program; they get a failure in it.

    What the body puts into the list is compared too.
    ``call``: the text that the program's calls are noted by, where that is another one.
    Raises ProgramMismatchError, RanksLateError and PeerLostError, on every rank that does not raise what its body did.
    """
    side = side_of(ranks)
    made = Made()
    try:
        yield made
    except Exception as error:
        if side is not None and not is_forked():
            note_failure(error)
            if side.compare(Comparison(tuple(ranks), text, tuple(made), call), error) is None:
                side.tell_failure(error, ranks)
        raise
    if side is not None:
        check_is_a_rank(f"a fusion over ranks {list(ranks)} was called")
        made.most = side.compare(Comparison(tuple(ranks), text, tuple(made), call, number=made.number), None)


def agree(ranks: Sequence[int], text: str, call: str | None = None) -> None:
    """`agreed` before an exchange of sizes.  ``call``: as there."""
    with agreed(ranks, text, call) as made:
        made.append("sizes are exchanged")


@contextmanager
def failures_told(ranks: Sequence[int]) -> Generator[None]:
    """Report what fails in the body to ``ranks`` that wait for it: this rank does not know yet what to compare."""
    try:
        yield
    except Exception as error:
        side = side_of(ranks)
        if side is not None and not is_forked() and not _is_alone.get():
            note_failure(error)
            side.tell_failure(error, ranks)
        raise


@contextmanager
def asked_alone() -> Generator[None]:
    """In the body each rank may fail alone: no other one is told."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


_is_alone: ContextVar[bool] = ContextVar("is_alone", default=False)


def name_call(error: ShardfuseError) -> None:
    """Have ``error`` name the caller's line that is running now, which has called what other ranks have not."""
    line = caller_line(in_modules=True)
    if line is not None:
        error.at([f"{line}  # the call"])


# By default process group, so that a new world starts from zero on every rank.
_sides: WeakKeyDictionary[dist.ProcessGroup, _Side] = WeakKeyDictionary()


def side_of(ranks: Sequence[int]) -> _Side | None:
    """This rank's part in comparisons of ``ranks``; ``None`` where it has none."""
    if len(ranks) < 2 or world_size() < 2 or current_rank() not in ranks:
        return None
    check_is_a_rank(f"a fusion over ranks {list(ranks)} was called")
    group = default_group()
    side = _sides.get(group)
    if side is None:
        limit = default_timeout()
        seconds = read_settings().timeout if limit is None else limit.total_seconds()
        store = PrefixStore("shardfuse/agreement", default_store())
        side = _sides[group] = _Side(store, current_rank(), seconds)
    return side


class _Side:
    """This rank's part in all comparisons of one world."""

    def __init__(self, store: Store, rank: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.timeout = timeout
        # Never forgotten: a rank that forgot a text alone would wait for ranks that have not.  32 bytes for each set of
        # sizes of each program, whose plan took much longer to make.
        self.agreed: set[str] = set()
        self.counts: dict[tuple[int, ...], int] = {}
        self.failures = Failures()
        self.waits = 0
        self.has_told = False
        self.found_circle: float | None = None

    def compare(self, comparison: Comparison, failure: Exception | None) -> int | None:
        """The largest of the ranks' numbers; ``None`` where this text was agreed before, and nothing was compared."""
        team = comparison.ranks
        mark = digest(f"{team}\n{comparison.text}")
        if mark in self.agreed:
            return None
        comparison = replace(comparison, k=self.counts.get(team, 0))
        self.counts[team] = comparison.k + 1
        try:
            most = self.run(comparison, mark, failure)
        except (dist.DistNetworkError, ConnectionError) as error:
            raise PeerLostError(0, "or its launcher served a store that cannot be reached any longer") from error
        except (ProgramMismatchError, RanksLateError, WaitingCircleError) as error:
            name_call(error)
            raise
        if failure is None:
            self.agreed.add(mark)
        return most

    def run(self, comparison: Comparison, mark: str, failure: Exception | None) -> int:
        made = digest("\n".join(comparison.made))
        number = comparison.number
        mine = json.dumps([mark, OK if failure is None else sentence_of(failure), made, number])
        self.store.set(comparison.key(self.rank), mine)
        self.take_back()
        try:
            self.wait(comparison, [comparison.key(r) for r in comparison.ranks])
        except PeerLostError:  # the rank that failed did not come to this comparison, nor will it be held
            self.counts[comparison.ranks] = comparison.k
            self.store.delete_key(comparison.key(self.rank))
            raise
        except ShardfuseError as error:  # who comes too late must not go on alone
            self.store.set(comparison.key(self.rank), json.dumps([mark, sentence_of(error), made, number]))
            raise
        if comparison.k > 0:  # all have come to k, so k - 1 is not read any longer
            self.store.delete_key(replace(comparison, k=comparison.k - 1).key(self.rank))
        found = self.store.multi_get([comparison.key(r) for r in comparison.ranks])
        told = {r: cast("Told", json.loads(v)) for r, v in zip(comparison.ranks, found, strict=True)}
        if any(other != mark for other, *_ in told.values()):
            raise self.mismatch(comparison)
        failed = next((r for r, (_, verdict, *_) in told.items() if verdict != OK), None)
        if failed is not None and failure is None:
            raise PeerLostError(failed, f"failed: {told[failed][1]}")
        if failed is None and any(other != made for _, _, other, _ in told.values()):
            raise self.mismatch(comparison)
        return max(other for *_, other in told.values())

    def mismatch(self, comparison: Comparison) -> ProgramMismatchError:
        """Every rank sees that digests differ, so every rank gives its text."""
        self.store.set(comparison.key(self.rank, "text/"), "\n".join([comparison.text, *comparison.made]))
        keys = [comparison.key(r, "text/") for r in comparison.ranks]
        self.wait(comparison, keys)
        texts = [value.decode() for value in self.store.multi_get(keys)]
        error = ProgramMismatchError(dict(zip(comparison.ranks, texts, strict=True)))
        self.tell_failure(error, comparison.ranks, comparison.k)
        return error

    def wait(self, comparison: Comparison, keys: Sequence[str]) -> None:
        """Until all keys are there. Looks instead of waiting in the store: that would hold up its other users."""
        began = time.monotonic()
        pause, is_quiet = SHORTEST, True
        self.found_circle = None
        ledger = ledger_of(comparison.ranks)
        try:
            while not self.store.check(list(keys)):
                waited = time.monotonic() - began
                if waited > self.timeout:
                    missing = [r for r, key in zip(comparison.ranks, keys, strict=True) if not self.store.check([key])]
                    late = RanksLateError(missing, self.timeout, comparison.text)
                    self.tell_failure(late, comparison.ranks, comparison.k)
                    raise late
                if waited > _QUIET:
                    if is_quiet:
                        self.tell_of_wait(comparison, ledger)
                        is_quiet = False
                    waits = None if ledger is None else ledger.waits
                    in_vain = None if ledger is None or waits is None else ledger.why_in_vain(waits)
                    self.look_at_missing(comparison, keys)
                    # A rank that calls another program has come to this one or has failed in it before it did: so that
                    # it has called another one is a difference only where neither is found after that was known.
                    if in_vain is not None and not self.store.check(list(keys)):
                        raise in_vain
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)
        finally:
            if ledger is not None:
                ledger.waits = None
        if not is_quiet:
            self.take_back()

    def tell_of_wait(self, comparison: Comparison, ledger: Ledger | None) -> None:
        self.waits += 1
        where = {"ranks": comparison.ranks, "k": comparison.k, "text": comparison.text}
        self.tell("waits", **where, serial=self.waits, issued=issued())
        if ledger is not None and comparison.made:  # else nothing is sent, and no call is noted
            ledger.waits = Call.of(comparison.text if comparison.call is None else comparison.call)

    def look_at_missing(self, comparison: Comparison, keys: Sequence[str]) -> None:
        """Raise where a rank that is waited for never comes: it failed, has left, or waits for this one elsewhere."""
        guard = own_watchdog()
        for rank, key in zip(comparison.ranks, keys, strict=True):
            if rank == self.rank or self.store.check([key]):
                continue
            lost = None if guard is None else guard.lost(rank)
            if lost is not None and not self.store.check([key]):
                reason = f"{lost} before it came to the next program of ranks {list(comparison.ranks)}"
                self.tell_of_failure(rank, reason, self.failing(comparison.ranks, comparison.k))
                raise PeerLostError(rank, reason)
            state = self.state_of(rank)
            if state is not None and self.is_failure(state, comparison) and not self.store.check([key]):
                raise self.passed_on(state)
            if not self.store.check([key]):
                error = self.never_comes(comparison, rank, state)
                if error is not None:
                    self.tell_failure(error, comparison.ranks, comparison.k)
                    raise error

    def is_failure(self, state: Mapping[str, object], comparison: Comparison) -> bool:
        """Has a rank failed, not as this one has, and not gone on, which this one, that calls alike, would have too?"""
        if state["what"] != "failed":
            return False
        failure = Failure.told(state)
        came = comparison.k if failure.team == comparison.ranks else self.counts.get(failure.team, 0)
        if came > failure.k or self.failures.knows(failure):
            return False
        ledger = ledger_of(comparison.ranks)
        return ledger is None or ledger.made() <= cast("dict[str, int]", state["calls"]).get(ledger.key, 0)

    def never_comes(
        self, comparison: Comparison, rank: int, state: Mapping[str, object] | None
    ) -> ShardfuseError | None:
        """An error where ``rank``, which this one waits for, waits for this one, itself or by way of others."""
        if state is not None and state["what"] == "waits":
            team = tuple(cast("list[int]", state["ranks"]))
            if team == comparison.ranks:
                return None
            if self.rank in team and self.counts.get(team, 0) == state["k"]:
                return ProgramMismatchError({self.rank: comparison.text, rank: str(state["text"])})
        circle = find_circle(self.rank, rank, self.wait_of)
        if circle is None:
            return None
        if len(circle) > 1 or not circle[0].wait.is_collective:
            links = [(link.rank, link.other, link.wait.ranks) for link in circle]
            return WaitingCircleError([(self.rank, rank, comparison.ranks), *links])
        return self.late_for_collective(comparison, rank)

    def late_for_collective(self, comparison: Comparison, rank: int) -> ShardfuseError | None:
        """``rank`` is in a collective that this one comes to only behind this comparison: what each is in.

        ``None`` where what ``rank`` is in has not been read yet, or the comparison of calls may say more.
        """
        self.found_circle = self.found_circle or time.monotonic()
        if comparison.made and time.monotonic() - self.found_circle < _CALLS_COMPARED:
            return None
        texts = {self.rank: comparison.text}
        guard = own_watchdog()
        for other in comparison.ranks:
            wait = None if guard is None else guard.wait_of(other)
            program = None if guard is None or wait is None else guard.program_of(other, wait[0])
            if program:
                texts[other] = program
        if rank not in texts:
            return None
        place = f"a collective that rank {rank} waits in, and rank {self.rank} does not come to,"
        return ProgramMismatchError(dict(sorted(texts.items())), place)

    def wait_of(self, rank: int) -> Wait | None:
        """What ``rank`` waits in, as it reports."""
        state = self.state_of(rank)
        if state is not None and state["what"] == "waits":
            team = cast("list[int]", state["ranks"])
            waiting = Comparison(tuple(team), k=cast(int, state["k"]))
            return Wait(state, team, [other for other in team if not self.store.check([waiting.key(other)])])
        guard = own_watchdog()
        wait = None if guard is None else guard.wait_of(rank)
        if wait is None:
            return None
        reported, own = wait
        ranks = sorted({other for members in reported.groups.values() for other in members} - {rank})
        missing = [other for other in ranks if reported.missing(own, other, self.issued_by(other))]
        return Wait(("collective", reported.serial), [rank, *ranks], missing, is_collective=True)

    def issued_by(self, rank: int) -> Mapping[str, int]:
        """How many collectives a rank that waits has issued, by process group; nothing where it does not wait."""
        if rank == self.rank:
            return issued()
        state, guard = self.state_of(rank), own_watchdog()
        if state is not None and state["what"] == "waits":
            return cast("dict[str, int]", state["issued"])
        wait = None if guard is None else guard.wait_of(rank)
        return {} if wait is None else wait[1]

    def state_of(self, rank: int) -> dict[str, object] | None:
        """What ``rank`` says under `at/rank`; what it takes back meanwhile is nothing."""
        key = f"at/{rank}"
        if not self.store.check([key]):
            return None
        text = self.store.get(key)
        return cast("dict[str, object]", json.loads(text))

    # what this rank says of itself

    def passed_on(self, state: Mapping[str, object]) -> PeerLostError:
        """Who failed, and where, is named to those that wait for this rank, not who noticed."""
        rank, reason = cast(int, state["rank"]), str(state["reason"])
        self.tell_of_failure(rank, reason, Failure.told(state))
        return PeerLostError(rank, reason)

    def tell_failure(self, error: Exception, ranks: Sequence[int], k: int | None = None) -> None:
        """``k``: of the comparison of ``ranks`` that it failed in; left out, it failed before the next one."""
        self.tell_of_failure(self.rank, f"failed: {sentence_of(error)}", self.failing(ranks, k))

    def failing(self, ranks: Sequence[int], k: int | None) -> Failure:
        """That of this rank, at the place where it is."""
        team = tuple(sorted(ranks))
        ledger = ledger_of(team)
        return self.failures.next(team, self.counts.get(team, 0) if k is None else k, ledger.made() if ledger else 0)

    def tell_of_failure(self, rank: int, reason: str, failure: Failure) -> None:
        self.failures.add(failure)
        ledgers = own_ledgers()
        calls = {} if ledgers is None else ledgers.made()
        self.tell("failed", rank=rank, reason=reason, failure=failure, calls=calls)

    def tell(self, what: str, **facts: object) -> None:
        self.store.set(f"at/{self.rank}", json.dumps({"what": what, **facts}))
        self.has_told = True

    def take_back(self) -> None:
        """A failure that the caller got over is forgotten."""
        if self.has_told:  # not deleted: who looks whether it is there, and then reads it, would wait for it
            self.tell("works")
            self.has_told = False
