"""Simulation: a sharded program on threads of one process on a CPU, a thread a rank, with real values.

1. Each thread forms the default process group of its rank over torch's threaded test group; `initialize()` finds it.
2. One rank runs at a time. It hands the baton on where it would wait for others: in a collective, in the store, asleep.
3. With the baton goes the state of the random number generators, which are one for the process: each rank draws the
   numbers that it would draw in a process of its own, and every run gives the same numbers.
4. Where a rank raises, all end, and `simulate` raises what the first one raised. Ranks that come to a collective with
   different ones, or from different programs, all raise that (`meeting_point.py`).
5. Where every rank waits in a collective to which not all have come, or looks into the store again and again for what
   no rank puts there, none can go on: `simulate` says where each stands. A busy machine that is slow to wake a thread
   is no such standstill.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch._C._distributed_c10d as _bindings
import torch.distributed as dist
import torch.testing._internal.distributed.multi_threaded_pg as _threaded
from torch._C._distributed_c10d import HashStore, Store

from ..base_error import shown
from ..errors import PeerLostError
from ..executor import agreement
from ..mesh.calls import Ledgers
from ..mesh.process import ProcessContext, adopt
from ..rank_errors import SimulationError, SimulationStuckError, SimulationTimeoutError
from .meeting_point import Meeting, MeetingPoint, end_collectives, exit_if_over, was_ended
from .threaded_group import install_threaded_group, remove_threaded_group

T = TypeVar("T")

_STANDSTILL = 1.0  # seconds without a step after which ranks that all wait in collectives count as stuck
_STANDSTILL_IN_STORE = 3.0  # where some look into the store again and again: those have to have had their turn
_LOOK = 0.1  # seconds up to which one that sleeps after it found nothing in the store will look again
_LOOK_AGAIN = 0.002  # seconds between two looks of one that waits in the store
_GRACE = 2.0  # seconds that the others get to end once a rank has raised
_threads: Any = _threaded  # torch's test group has no types
_PACKAGE = __file__.removesuffix("tools/simulation.py")
_isolate_threads: Callable[[bool], None] = cast(Any, _bindings)._set_thread_isolation_mode


def simulate(
    fn: Callable[..., T], world_size: int = 8, *, args: Sequence[object] = (), timeout: float | None = None
) -> list[T]:
    """Run ``fn(*args)`` as every rank of a world of ``world_size``; returns what the ranks returned, by rank.

    In ``fn``, `shardfuse.initialize()` gives the rank's place, and torch.distributed works as on a CPU.  What a rank
    raises is raised here, of several the first, with notes that name the ranks.  ``timeout``: seconds for the whole
    run, without limit where left out.
    Raises SimulationError inside of another world and for what is no function, SimulationStuckError where no rank can
    go on, SimulationTimeoutError where the time is over.
    """
    if dist.is_initialized():
        raise SimulationError("a process group is initialised already", "call simulate() where there is none")
    if not callable(fn):  # pyright: ignore[reportUnnecessaryComparison]
        raise SimulationError(f"fn={shown(fn)}", "pass a function, which each rank calls")
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SimulationError(f"world_size={world_size!r}", "pass 1 or more")
    is_number = timeout is None or (isinstance(timeout, int | float) and not isinstance(timeout, bool))  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or (timeout is not None and not timeout > 0):
        raise SimulationError(f"timeout={shown(timeout)}", "pass seconds, more than 0, or leave it out")
    return _World(world_size).run(lambda: fn(*args), timeout)


class _World:
    """The ranks of one simulation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.baton = _Baton()
        self.store = _SharedStore(HashStore(), self.baton)
        self.errors: dict[int, BaseException] = {}
        self.where: dict[int, threading.Thread] = {}
        self.is_over = False

    def run(self, fn: Callable[[], T], timeout: float | None) -> list[T]:
        results: dict[int, T] = {}

        def rank_main(rank: int) -> None:
            try:
                with self.baton.held():
                    self.enter(rank)
                    results[rank] = fn()
                    dist.destroy_process_group()
            except BaseException as error:  # noqa: BLE001 raised again in the caller's thread
                self.errors[rank] = error
                if not self.is_over:  # a rank that was left behind must not end a later world
                    end_collectives(error)

        with _threaded_world(self.baton):
            for rank in range(self.size):
                thread = threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
                self.where[rank] = thread
                thread.start()
            stuck = self.watch(timeout)
            self.is_over = True
        own = {rank: error for rank, error in self.errors.items() if not was_ended(error)}
        if own:
            raise self.first_of(own)
        if stuck is not None:
            raise stuck
        return [results[rank] for rank in range(self.size)]

    def first_of(self, own: Mapping[int, BaseException]) -> BaseException:
        """The error that the others follow from, with notes of them.  own: by rank, the first one to be raised first.

        A rank that cannot go on without another may say so before that one has ended.
        """
        rank = next((rank for rank, error in own.items() if not _is_of_another(rank, error)), next(iter(own)))
        first = own[rank]
        first.add_note(f"raised on rank {rank} of {self.size}; ranks that raised: {sorted(own)}")
        texts: dict[str, list[int]] = {}
        for other in sorted(own.keys() - {rank}):
            texts.setdefault(f"{type(own[other]).__name__}: {own[other]}", []).append(other)
        texts.pop(f"{type(first).__name__}: {first}", None)
        for text, ranks in texts.items():
            first.add_note(f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} raised {text}")
        return first

    def enter(self, rank: int) -> None:
        limit = timedelta(days=1)  # the standstill is noticed long before
        dist.init_process_group("threaded", store=self.store, rank=rank, world_size=self.size, timeout=limit)
        context = ProcessContext(rank, self.size, rank, torch.device("cpu"), "gloo", limit.total_seconds())
        adopt(context, Ledgers(rank))

    def watch(self, timeout: float | None) -> SimulationStuckError | SimulationTimeoutError | None:
        """Until all have ended, or none can go on."""
        end = None if timeout is None else time.monotonic() + timeout
        while any(thread.is_alive() for thread in self.where.values()):
            if self.errors:
                self.let_end()
                return None
            late = end is not None and time.monotonic() > end
            if late or self.is_still():
                places = {rank: _place(thread) for rank, thread in self.where.items() if thread.is_alive()}
                end_collectives(None)
                self.let_end()
                if late and timeout is not None:
                    return SimulationTimeoutError(timeout, self.size, places)
                return SimulationStuckError(self.size, places)
            alive = [thread for thread in self.where.values() if thread.is_alive()]
            if alive:  # the last may have ended since
                alive[0].join(0.02)
        return None

    def is_still(self) -> bool:
        """Do all that live wait for each other?  A thread that has not begun, or is about to end, does not."""
        idents = [thread.ident for thread in self.where.values() if thread.is_alive()]
        return all(ident in self.baton.ranks for ident in idents) and self.baton.is_still()

    def let_end(self) -> None:
        deadline = time.monotonic() + _GRACE
        for thread in self.where.values():
            thread.join(max(0.0, deadline - time.monotonic()))


class _Baton:
    """Held by the one rank that runs; handed on in the order in which ranks asked for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.queue: deque[threading.Event] = deque()
        self.is_held = False
        self.asleep = 0
        self.looking = 0
        self.missed: dict[int, bool] = {}
        self.looks: dict[int, int] = {}
        """By thread that looks into the store: how often it has found nothing since the last step of any rank."""
        self.inside: dict[int, Meeting] = {}
        """By thread: the collective that it waits in."""
        self.last_step = time.monotonic()
        self.random = _random_state()
        self.ranks: dict[int, None] = {}

    @contextmanager
    def held(self) -> Generator[None]:
        self.ranks[threading.get_ident()] = None
        self.take(self.random)
        try:
            yield
        finally:
            del self.ranks[threading.get_ident()]
            self.give()

    @contextmanager
    def handed_on(self, *, asleep: bool = False, looking: bool = False) -> Generator[None]:
        """The body waits, and others run; in a thread that is no rank it just waits."""
        if threading.get_ident() not in self.ranks:
            yield
            return
        state = _random_state()
        self.give(asleep=asleep, looking=looking)
        try:
            yield
        finally:
            self.take(state, asleep=asleep, looking=looking)

    def take(self, state: tuple[object, ...], *, asleep: bool = False, looking: bool = False) -> None:
        turn = threading.Event()
        with self.lock:
            self.asleep -= asleep
            self.looking -= looking
            if self.is_held:
                self.queue.append(turn)
            else:
                self.is_held = True
                turn.set()
        turn.wait()
        if not looking:
            self.step()
        _set_random_state(state)

    def give(self, *, asleep: bool = False, looking: bool = False) -> None:
        if not looking:
            self.step()
        with self.lock:
            self.asleep += asleep
            self.looking += looking
            if self.queue:
                self.queue.popleft().set()
            else:
                self.is_held = False

    def step(self) -> None:
        """The rank that holds the baton goes on."""
        self.last_step = time.monotonic()
        self.looks.clear()

    @contextmanager
    def within(self, meeting: Meeting) -> Generator[None]:
        """A rank that has come to a collective waits there while others run."""
        thread = threading.get_ident()
        self.inside[thread] = meeting
        try:
            with self.handed_on():
                yield
        finally:
            del self.inside[thread]

    def found(self, is_there: bool) -> bool:
        """A rank has looked for something in the store."""
        if not is_there:
            self.missed[threading.get_ident()] = True
        return is_there

    def is_looking(self, seconds: float) -> bool:
        """Has the rank that is about to sleep found nothing in the store since it last slept, and will look again?"""
        thread = threading.get_ident()
        is_one = self.missed.pop(thread, False) and seconds <= _LOOK
        if is_one:
            self.looks[thread] = self.looks.get(thread, 0) + 1
        return is_one

    def is_still(self) -> bool:
        """Does every rank wait for what no other brings, and has done so for long?

        A collective to which all have come goes on by itself, however late its ranks are woken.
        """
        with self.lock:
            limit = _STANDSTILL_IN_STORE if self.looking else _STANDSTILL
            if self.is_held or self.asleep or time.monotonic() - self.last_step <= limit:
                return False
            if sum(count > 1 for count in self.looks.values()) < self.looking:  # one has not looked since
                return False
            return not any(meeting.is_complete for meeting in self.inside.values())


class _SharedStore(Store):
    """A store that all ranks share. One that waits in it hands the baton on."""

    def __init__(self, inner: Store, baton: _Baton) -> None:
        super().__init__()
        self.inner = inner
        self.baton = baton

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.inner.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.baton.found(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=5)) -> None:  # type: ignore[override]
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys) and time.monotonic() < end:
            time.sleep(_LOOK_AGAIN)  # looked for as by one that polls, so that a standstill is seen
        self.inner.wait(keys, timedelta(milliseconds=1))  # which raises torch's error for what is not there

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self.inner.compare_set(key, expected_value, desired_value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self.inner.multi_get(keys)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 torch calls it by its C++ name
        return self.inner.delete_key(key)


@contextmanager
def _threaded_world(baton: _Baton) -> Generator[None]:
    """torch.distributed with a world of its own for each thread, as torch's tests have it, while the body runs."""
    join, start, sleep = _threads.Collective.join, _threads.ProcessLocalGroup._start_coll, time.sleep
    hook = sys.excepthook  # of which each rank's init_process_group makes one that writes the rank, too
    meeting_point = MeetingPoint(baton.within)

    def join_and_compare(self: object, place: int, data: object) -> object:
        return meeting_point.join(self, place, data)

    def start_collective(collective: object, group: object) -> object:
        meeting_point.start(collective, group)
        return start(collective, group)

    def sleep_without_baton(seconds: float) -> None:
        looking = baton.is_looking(seconds)
        if looking:  # for what another rank was to put into the store
            exit_if_over()
        with baton.handed_on(asleep=not looking, looking=looking):
            sleep(seconds)

    _isolate_threads(True)
    install_threaded_group()
    _threads.Collective.join, time.sleep = join_and_compare, sleep_without_baton
    _threads.ProcessLocalGroup._start_coll = staticmethod(start_collective)
    try:
        yield
    finally:
        _threads.Collective.join, time.sleep = join, sleep
        _threads.ProcessLocalGroup._start_coll = start
        _threads.ProcessLocalGroup.reset()
        _isolate_threads(False)
        sys.excepthook = hook
        remove_threaded_group()


def _random_state() -> tuple[object, ...]:
    """The state of torch's generator of the CPU, Python's, and numpy's where numpy is there."""
    numpy = cast(Any, sys.modules.get("numpy"))
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_state(state: tuple[object, ...]) -> None:
    of_torch, of_python, of_numpy = cast("tuple[torch.Tensor, Any, Any]", state)
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        cast(Any, sys.modules["numpy"]).random.set_state(of_numpy)


def _is_of_another(rank: int, error: BaseException) -> bool:
    """Does an error of this rank, or what it was raised for, say that another rank is the reason?"""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, PeerLostError) and found.rank != rank:
            return True
        found = found.__cause__ or found.__context__
    return False


def _place(thread: threading.Thread) -> str:
    """Where a rank waits: the innermost line outside of torch and of shardfuse, and what it called."""
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    foreign = ("/torch/", "/threading.py", "/contextlib.py", "<shardfuse", _PACKAGE)
    own = [k for k, f in enumerate(stack) if not any(part in f.filename for part in foreign)]
    if not own:
        return "at its end"
    where, called = stack[own[-1]], [f for f in stack[own[-1] + 1 :] if not f.name.startswith(("wrapper", "_", "<"))]
    names = [f.name for f in called if _PACKAGE in f.filename and f.filename != __file__][:1]
    names += [f.name for f in called if "/torch/distributed/" in f.filename][:1]
    if any(f.filename == agreement.__file__ for f in called):
        names.append("comparing its program with the others'")
    return f"{where.filename}:{where.lineno} ({', '.join(names) or where.name})"
