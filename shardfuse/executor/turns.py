# pyright: reportPrivateUsage=false
"""Programs that communicate are run by one thread: ranks then come to their collectives in one order.

The collectives of a process group are paired in the order in which each rank issues them.  Two threads of a rank issue
theirs in any order, so that one thread's would be paired with the other's of another rank: wrong values, or an abort.

1. The first thread that runs such a program is the one that does.  Another one takes over where that has ended, or by
   ``run_in_this_thread()``, which a program calls at the same point on every rank.
2. Any other thread is refused.  The first one goes on where it is the same one on every rank, by name: then no program
   was paired with another thread's.  Each rank tells the others whose turn it is, through the store, once for each
   owner.  Where it is not the same, every thread is refused until one takes over, as what was paired is not known.
3. Where two threads come at once, each may be the first one on some rank: a program of one is then paired with the
   other's.  So behind the first run of an owner the ranks of the program look who ran it elsewhere: a name that another
   thread of this rank has is such a pair.  Ranks may call their threads differently, and one may use its main thread;
   a thread that took over, as any of a pool may do, says itself that it is the right one.
4. The threads in which autograd runs a backward act for the thread that called it.

Programs without collectives run in any number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from ..mesh.groups import current_rank, default_group, default_store, world_size
from ..mesh.rendezvous import PrefixStore, Store
from ..rank_errors import ThreadsError
from .agreement import failures_told
from .comparison import digest

_graph_task: Callable[[], int] = cast(Any, torch._C)._current_graph_task_id  # pyright: ignore[reportPrivateUsage]
_Foreign: type[threading.Thread] = cast(Any, threading)._DummyThread  # of a thread that Python did not start


class Owners(Protocol):
    """Whose turn it is on other ranks, by the number of the owner: of all that a rank has had, ``team`` being ``None``,
    or of those that ran programs of the ranks of ``team``."""

    def publish(self, team: Sequence[int] | None, number: int, name: str) -> None:
        """Tell that the owner of this number has this name here."""
        ...

    def names(self, team: Sequence[int] | None, number: int) -> list[str]:
        """What the ranks that have had so many owners by now have told of theirs."""
        ...


class _StoredOwners:
    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._world = range(ranks)

    def publish(self, team: Sequence[int] | None, number: int, name: str) -> None:
        self._store.set(f"{_key(team)}/{number}/{self._rank}", name)

    def names(self, team: Sequence[int] | None, number: int) -> list[str]:
        keys = [f"{_key(team)}/{number}/{rank}" for rank in (self._world if team is None else team)]
        return [self._store.get(key).decode() for key in keys if self._store.check([key])]


def _key(team: Sequence[int] | None) -> str:
    return "world" if team is None else digest(str(tuple(team)))


@dataclass
class _Team:
    """The owners that have run programs of these ranks.  seen: the number of the last one; count: how many they are;
    is_new: is it in its first run?
    """

    ranks: tuple[int, ...]
    seen: int = 0
    count: int = 0
    is_new: bool = False


class Turn:
    """Whose turn it is on this rank.  ``with turn.of(ranks):`` around a run of a program of these ranks."""

    def __init__(self, owners: Owners | None = None) -> None:
        self._owners = owners
        self.number = 0
        """Of the owners that this rank has had."""
        self._published = 0
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._inside: threading.Thread | None = None
        """The thread that is running a program."""
        self._depth = 0
        """The programs that it is in: one may be run within another."""
        self._refused: str | None = None
        self._took_over = False
        """Did the owner say so itself?"""
        self._came: set[str] = set()
        """The names of threads that were refused, some of which have ended."""
        self._teams: dict[tuple[int, ...], _Team] = {}

    def __deepcopy__(self, memo: object) -> Turn:
        """A copy of a definition runs on the same rank."""
        return self

    def of(self, ranks: Sequence[int]) -> Held:
        return Held(self, ranks, self._teams.setdefault(tuple(ranks), _Team(tuple(ranks))))

    def enter(self) -> str | None:
        """``None``, or the name of the thread whose turn it is."""
        me = threading.current_thread()
        with self._lock:
            inside = self._inside
            if me is not self._owner or self._refused is not None or (inside is not None and inside is not me):
                taken = self._taken(me)
                if taken is not None:
                    self._refused = me.name
                    self._came.add(me.name)
                    return taken
            self._inside = me
            self._depth += 1
            return None

    def take_over(self) -> str | None:
        """``None``, or the name of the thread that is running a program."""
        me = threading.current_thread()
        with self._lock:
            if self._is_another_inside(me):
                return self._name()
            self._own(me)
            self._took_over = True
            self._refused = None
            self._came.clear()
            return None

    def tell(self) -> None:
        """Tell the other ranks whose turn it is, where they do not know."""
        if self._published != self.number and self._owners is not None:
            self._owners.publish(None, self.number, self._name())
            self._published = self.number

    def begin(self, team: _Team) -> None:
        """Before a run of a program of ``team``: where its owner is a new one, tell the others."""
        if team.seen != self.number and self._owners is not None:
            team.seen, team.count, team.is_new = self.number, team.count + 1, True
            self._owners.publish(team.ranks, team.count, self._name())

    def paired(self, team: _Team) -> str | None:
        """Behind the first run of an owner: the name of another thread of this rank, with whose run it was paired.

        All of ``team`` have published theirs by then: a first run of a program waits for them.
        """
        team.is_new = False
        if self._owners is None or self._took_over or self._owner in (None, threading.main_thread()):
            return None
        told = set(self._owners.names(team.ranks, team.count)) - {self._name()}
        found = next((name for name in sorted(told) if name in self._came or _is_another_here(name)), None)
        if found is not None:
            with self._lock:
                self._refused = found
        return found

    def forgive(self) -> bool:
        """Go on after a thread was refused, where no program was paired with one of its; False where one may have been.

        A rank that has not told yet, and has another owner, finds that out itself, as this one has told before it asks.
        """
        if self._owners is None:
            return False
        self.tell()
        if any(name != self._name() for name in self._owners.names(None, self.number)):
            return False
        with self._lock:
            self._refused = None
        return True

    def owner(self) -> threading.Thread | None:
        return self._owner

    def is_mine(self) -> bool:
        """Is it this thread's turn, and no other one inside?"""
        me = threading.current_thread()
        return self._owner is me and not self._is_another_inside(me)

    def _own(self, me: threading.Thread) -> None:
        self._owner = me
        _owners.add(me)
        self._took_over = False
        self.number += 1

    def _taken(self, me: threading.Thread) -> str | None:
        # Threads, not their numbers: the system gives a new one that of one that has ended.
        if self._is_another_inside(me):
            return self._name()
        if self._refused is not None:
            return self._refused
        if self._owner is me:
            return None
        if self._owner is not None and self._owner.is_alive():
            return None if is_of_autograd(me) else self._name()
        if not is_of_autograd(me):  # which acts for another, whose turn it would be
            self._own(me)
        return None

    def _is_another_inside(self, me: threading.Thread) -> bool:
        inside = self._inside
        return inside is not None and inside is not me

    def _name(self) -> str:
        return "another thread" if self._owner is None else self._owner.name


def is_of_autograd(thread: threading.Thread) -> bool:
    """Is it one in which autograd runs a backward now?"""
    return isinstance(thread, _Foreign) and _graph_task() != -1


def _is_another_here(name: str) -> bool:
    """Has a thread this name that is neither the main one nor one of another rank, where ranks are threads?

    A rank that has ended its process group may still be a thread: whoever has had a turn is a rank's.
    """
    return any(t.name == name and t not in _owners and t is not threading.main_thread() for t in threading.enumerate())


class Held:
    """Around a run of a program of ``ranks``.  ``repeat.c`` does the same where nothing has changed.

    told: the number of the owner of whom the other ranks know, which is not told again."""

    __slots__ = ("ranks", "team", "told", "turn")

    def __init__(self, turn: Turn, ranks: Sequence[int], team: _Team) -> None:
        self.turn = turn
        self.ranks = ranks
        self.team = team
        self.told = 0

    def __enter__(self) -> None:
        turn, me = self.turn, threading.current_thread()
        with turn._lock:  # what ``Turn.enter`` comes to where nothing has changed: a run has no time for its calls
            inside = turn._inside
            is_inside = turn._refused is None and (inside is None or inside is me)
            is_inside = is_inside and (turn._owner is me or is_of_autograd(me))
            if is_inside:
                turn._inside = me
                turn._depth += 1
        if not is_inside or turn.number != self.told:
            self._enter(is_inside)

    def _enter(self, is_inside: bool) -> None:
        while not is_inside and (taken := self.turn.enter()) is not None:
            error = ThreadsError(threading.current_thread().name, taken)
            if not self.turn.forgive():
                with failures_told(self.ranks):
                    raise error
            if not self.turn.is_mine():
                raise error
        number = self.turn.number
        if number != self.told:
            self.turn.tell()
            self.turn.begin(self.team)
            self.told = number

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        turn = self.turn
        paired = turn.paired(self.team) if self.team.is_new and error is None else None
        # Without the lock: the depth is the thread's that is inside, and no other one comes in until that is None.  So
        # that is written last, and what a thread that takes over forgets, who was refused, is read first.
        refused = turn._refused
        turn._depth -= 1
        if turn._depth == 0:
            turn._inside = None
        if paired is not None:
            raise ThreadsError(threading.current_thread().name, paired)
        if refused is not None and error is None:
            go_on(self, refused)


def go_on(held: Held, refused: str) -> None:
    """Behind a run during which the thread of this name was refused.

    Raises ThreadsError where a program of other ranks may have been paired with one of its.
    """
    if not held.turn.forgive():
        raise ThreadsError(threading.current_thread().name, refused)


# A rank has a default process group of its own, also where ranks are threads of one process.
_turns: WeakKeyDictionary[dist.ProcessGroup, Turn] = WeakKeyDictionary()
_turns_lock = threading.Lock()
_owners: WeakSet[threading.Thread] = WeakSet()
"""Threads that have had a turn."""


def turn_here() -> Turn:
    """This rank's.  Raises NotInitializedError where there is no process group."""
    with _turns_lock:
        group = default_group()
        if group not in _turns:
            store = PrefixStore("shardfuse/turns", default_store())
            _turns[group] = Turn(_StoredOwners(store, current_rank(), world_size()))
        return _turns[group]


def run_in_this_thread() -> None:
    """From now on this thread runs the programs that communicate with other ranks.

    The first thread that runs one does until it ends.  Call this where another one goes on, at the same point of the
    program on every rank, while no thread runs a fusion.
    Raises ThreadsError where one does, NotInitializedError where there is no process group.
    """
    taken = turn_here().take_over()
    if taken is not None:
        raise ThreadsError(threading.current_thread().name, taken)
