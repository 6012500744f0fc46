"""Where simulated ranks meet in a collective: each says what it has come to, and all get one error where that differs.

torch's threaded group adds up whatever its ranks bring, in the order in which they bring it.  Here the last rank of a
collective to come compares before anything is moved:

1. The program: of a collective that shardfuse issues, the calls that each rank has made so far, of every team that all
   ranks of the collective are in.  They are noted in ledgers as on processes (``mesh/calls.py``), which the watchdog
   compares there.
2. The collective itself, whoever issues it: its kind, operation, root, shape and dtype.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.testing._internal.distributed.multi_threaded_pg as _threaded

from ..errors import ShardfuseError
from ..mesh.calls import Ledger, first_difference
from ..mesh.process import own_ledgers
from ..rank_errors import CollectivesDifferError
from ..source_line import GENERATED, SourceLine, caller_line

ENDED = "Test termination event occurs."
"""What torch's group lets a rank exit with that waits in a collective once another one has raised."""
_threads: Any = _threaded  # torch's test group has no types
_TORCH = torch.__file__.removesuffix("__init__.py")
_PACKAGE = __file__.removesuffix("tools/meeting_point.py")
_BARRIER = "barrier"


@dataclass(frozen=True)
class Visit:
    """What a rank has come to a collective with.

    what: the collective, which is the same text on all of its ranks.  ledgers: by team, of its calls, where shardfuse
    issues the collective; None where the caller does.  program: the text of its latest call.
    """

    what: str
    ledgers: Mapping[str, Ledger] | None
    program: str
    line: SourceLine | None

    @classmethod
    def here(cls, brought: object, data: object, ranks: tuple[int, ...]) -> Visit:
        """This rank's.  brought: torch's object of the kind of collective; data: its tensors; ranks: its members."""
        is_own, is_barrier = _issued_by()
        what = _BARRIER if is_barrier else _described(cast(Any, brought), cast(Any, data))
        ledgers = own_ledgers() if is_own else None
        if ledgers is None:
            return cls(what, None, "", caller_line(in_modules=True))
        ledgers.take_in()
        known = {ledger.key: ledger for ledger in ledgers.around(ranks) if ledger.told.calls}
        return cls(what, known, ledgers.latest.text, caller_line(in_modules=True))

    def calls(self) -> dict[str, tuple[int, int]] | None:
        """How many calls of each team it has made, and the digest of them all."""
        return None if self.ledgers is None else {key: x.told[:2] for key, x in self.ledgers.items()}

    def __str__(self) -> str:
        last = self.program.splitlines()[-1].strip() if self.program else ""
        program = "" if self.ledgers is None else f" of the program that ends in `{last}`" if last else " of shardfuse"
        return f"{self.what}{program}{f' at {self.line}' if self.line is not None else ''}"


@dataclass(eq=False)
class Meeting:
    """One collective.  size: how many ranks have to come; visits: of those that have, by their place in the group."""

    size: int
    ranks: tuple[int, ...]
    visits: dict[int, Visit] = field(default_factory=dict[int, Visit])
    failure: Callable[[], BaseException] | None = None
    """Makes the error, one for each rank that raises it: the ranks differ, or torch cannot do what they ask for."""

    @property
    def is_complete(self) -> bool:
        """Of two ranks that share a group object both come as one."""
        return len(self.visits) == self.size

    def compare(self) -> None:
        """Find out whether the ranks have come to the same."""
        visits = {self.ranks[place]: visit for place, visit in sorted(self.visits.items())}
        if len({(v.what, str(v.calls())) for v in visits.values()}) > 1:
            self.failure = lambda: _difference(visits)

    def do(self, work: Callable[[object], None], data: object) -> None:
        """Have torch do it.  What it raises is raised on every rank: the others would wait for ever."""
        try:
            work(data)
        except Exception as error:  # noqa: BLE001 raised by every rank in its own thread
            found = error
            self.failure = lambda: _another(found)


def _difference(visits: Mapping[int, Visit]) -> ShardfuseError:
    """Of ranks that have not come to the same."""
    teams = {key: ledger.ranks for visit in visits.values() for key, ledger in (visit.ledgers or {}).items()}
    for key, team in sorted(teams.items()):
        known = {rank: visit.ledgers[key] for rank, visit in visits.items() if visit.ledgers and key in visit.ledgers}
        error = first_difference(team, {rank: ledger.tail() for rank, ledger in known.items()})
        if error is not None:
            error.at(f"{visit.line}  # rank {rank}" for rank, visit in visits.items() if visit.line is not None)
            return error
    return CollectivesDifferError({rank: str(visit) for rank, visit in visits.items()})


class MeetingPoint:
    """In place of torch's, which compares nothing.  within: around the wait of a rank for the others."""

    def __init__(self, within: Callable[[Meeting], AbstractContextManager[None]]) -> None:
        self._within = within
        self._meetings: WeakKeyDictionary[object, Meeting] = WeakKeyDictionary()
        self._brought: dict[int, tuple[object, tuple[int, ...]]] = {}
        """By thread: the kind of collective that it is about to join, and the ranks of its group."""

    def start(self, collective: object, group: Any) -> None:
        """This rank is about to join a collective."""
        members = cast("dict[int, int]", group._world().pg_group_ranks[group])
        self._brought[threading.get_ident()] = collective, tuple(sorted(members, key=lambda rank: members[rank]))

    def join(self, collective: Any, place: int, data: object) -> object:
        """Come to a collective as its rank number ``place``, and leave it once it is done.

        Raises ProgramMismatchError and CollectivesDifferError, and what torch raises, on every rank of it.
        """
        exit_if_over()
        brought, ranks = self._brought.pop(threading.get_ident())
        meeting = self._meetings.setdefault(collective, Meeting(collective._world_size, ranks))
        meeting.visits[place] = Visit.here(brought, data, ranks)
        collective._data[place] = data
        if meeting.is_complete:
            meeting.compare()
            if meeting.failure is None:
                meeting.do(collective._collective.work, collective._data)
            if meeting.failure is not None:
                _forget(collective)
            with collective._done_cond:
                collective._done = True
                collective._done_cond.notify_all()
        else:
            with self._within(meeting), collective._done_cond:
                collective._done_cond.wait_for(lambda: collective._done or is_over())
            if not collective._done:
                exit_if_over()
        if meeting.failure is not None:
            raise meeting.failure()
        return _threads.ret_work(data)


def is_over() -> bool:
    """Has a rank raised, so that the others end?"""
    return _threads.ProcessLocalGroup._terminate.is_set()


def exit_if_over() -> None:
    """End this rank where another one has raised."""
    if is_over():
        sys.exit(ENDED)


def was_ended(error: BaseException) -> bool:
    """True for what `exit_if_over` raises."""
    return isinstance(error, SystemExit) and str(error) == ENDED


def end_collectives(error: BaseException | None) -> None:
    """Let every rank leave the collective that it waits in.  torch's own function walks a table that ranks change."""
    with _threads.ProcessLocalGroup._coll_lock:
        _threads.ProcessLocalGroup.exception_handle(error)


def _another(error: BaseException) -> BaseException:
    """One like it, with torch's lines: one object raised in two threads would have the notes and the lines of both."""
    try:
        return copy.copy(error).with_traceback(error.__traceback__)
    except Exception:  # noqa: BLE001 an error need not be made of its arguments
        return RuntimeError(f"{type(error).__name__}: {error}")


def _forget(collective: object) -> None:
    """A collective that has failed is not the next one of its group, which ranks that catch the error may come to."""
    with _threads.ProcessLocalGroup._coll_lock:
        running = _threads.ProcessLocalGroup._cur_coll_on_pgs
        for name in [name for name, other in running.items() if other is collective]:
            del running[name]


def _issued_by() -> tuple[bool, bool]:
    """Has shardfuse issued the collective that this rank is in?  And is it a barrier?"""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    is_barrier = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            is_barrier = is_barrier or frame.f_code.co_name == _BARRIER
        elif not file.startswith(f"{_PACKAGE}tools/"):
            return file.startswith((_PACKAGE, GENERATED)), is_barrier
        frame = frame.f_back
    return False, is_barrier


def _described(kind: Any, data: Any) -> str:
    """What all ranks of a collective have alike of it.  Pieces that may differ between ranks are of one dtype."""
    match type(kind).__name__:
        case "AllReduce":
            tensors = ", ".join(f"{_dtype(x)}{list(x.shape)}" for x in data)
            return f"all_reduce ({_operation(kind.op)}) of {tensors}"
        case "ReduceScatter":
            return f"reduce_scatter ({_operation(kind.op)}) of {_pieces(data[1][0])}"
        case "AllGather":
            return f"all_gather of {_pieces(data[0][0])}"
        case "Broadcast":
            return f"broadcast from rank {kind.src} of {_pieces(_threads.flatten_list(data))}"
        case "AllToAllBase":
            return f"all_to_all of {_dtype(data[0])}"
        case "AllToAll":
            return f"all_to_all of {_dtype(data[0][0])}"
        case "Scatter":
            return f"scatter from rank {kind.src} of {_dtype(data[0][0])}"
        case "Gather":
            return f"gather to rank {kind.dst} of {_dtype(data[1][0])}"
        case name:
            return name


def _operation(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()


def _pieces(tensors: list[torch.Tensor]) -> str:
    """Their numbers of elements: torch moves them whatever their shapes are."""
    texts = [f"{_dtype(x)}[{x.numel()}]" for x in tensors]
    return f"{len(texts)} x {texts[0]}" if len(texts) > 1 == len(set(texts)) else ", ".join(texts)


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
