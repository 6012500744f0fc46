"""The life of a rank: find the others, form the default process group, fail together, end together."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardfuse.config import read_launch, read_settings, set_process_defaults
from shardfuse.errors import (
    AlreadyInitializedError,
    BackendsDisagreeError,
    PeerLostError,
    RendezvousError,
    ShardfuseError,
)
from shardfuse.mesh.calls import Ledger, Ledgers
from shardfuse.mesh.collective_waits import COMMUNICATION_PATIENCE
from shardfuse.mesh.ending import INTERRUPTED, end_process, fault_of, is_of_communication, sentence, shown
from shardfuse.mesh.groups import default_group, destroy_groups, group_sequences, keep_for_ever, keep_groups_for_ever
from shardfuse.mesh.meeting import MEETING_TIMEOUT, Place, agree, new_world
from shardfuse.mesh.own_device import BACKENDS, choose, own_gpu
from shardfuse.mesh.process_context import ProcessContext
from shardfuse.mesh.rendezvous import JobStore, PrefixStore, meet, open_job_store
from shardfuse.mesh.start_arguments import check_range, check_same
from shardfuse.mesh.symmetric import close_arena, how_ranks_exchange, open_arena, raise_lost_exchange
from shardfuse.mesh.watchdog import Fault, Watchdog, say
from shardfuse.rank_errors import ExchangeTimeoutError, ForkedProcessError
from shardfuse.start_errors import ExchangeMemoriesDisagreeError, WorldSizesDisagreeError

_GRACE = 3.0  # seconds that a rank that is done keeps its connections open for ranks that are not


@dataclass(eq=False)
class _Life:
    """What has to be undone at the end."""

    context: ProcessContext
    job: JobStore
    watchdog: Watchdog | None
    previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object]
    ended: bool = False

    def has_group(self) -> bool:
        """True until its default process group is destroyed, by the caller's hand maybe."""
        return _find_life() is self

    def end(self) -> None:
        """What `finalize` does, once."""
        if self.ended:
            return
        self.ended = True
        atexit.unregister(self.end)
        try:
            raise_lost_exchange(self.context.device)
        except ExchangeTimeoutError as error:
            _end(self, self.watchdog, str(error), fault_of(error, self.context.rank))
        guard = self.watchdog
        together = guard is None or guard.leave(_GRACE)
        if self.has_group() and together:
            close_arena()
        # Closed connections are how gloo tells a rank that still waits for this one; NCCL's end needs all ranks.
        if self.has_group() and (together or self.context.backend == "gloo"):
            destroy_groups()
        if guard is not None:
            guard.stop(self.context.timeout)
        if self.has_group():
            destroy_groups()
        if guard is not None:
            guard.close(is_host=self.job.is_host)
        sys.excepthook = self.previous_hook


@dataclass
class _Start:
    """A world that is being formed: its watchdog, where it has one by now, and the hook that was there before.

    That is kept where no world comes about: the error may stay uncaught, and has to be reported.
    """

    guard: Watchdog | None = None
    previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object] = sys.__excepthook__


@dataclass
class _Forked:
    """Which rank this process was forked from, if it was.

    group: the default process group, where the caller made it: a process may leave that for a world of its own.
    """

    rank: int | None = None
    group: dist.ProcessGroup | None = None


_SEEN_BY_ALL = (BackendsDisagreeError, ExchangeMemoriesDisagreeError, WorldSizesDisagreeError)
"""Errors of which every rank that came has its own."""

_UNWATCHED = nullcontext[None]()
_start = _Start()
_forked = _Forked()
# By default process group, so that the end of one world is no part of the next.
_lives: WeakKeyDictionary[dist.ProcessGroup, _Life] = WeakKeyDictionary()
_adopted: WeakKeyDictionary[dist.ProcessGroup, tuple[ProcessContext, Ledgers]] = WeakKeyDictionary()


def initialize(
    backend: str | None = None,
    *,
    timeout: float | None = None,
    watchdog: bool = True,
    exchange_memory: int | None = None,
) -> ProcessContext:
    """Form the default process group of what torchrun, mpirun or srun started; plain `python` is a world of one.

    backend: "nccl", "gloo", or None for NCCL where each rank has its own GPU (but for SHARDFUSE_SHARED_GPU), else gloo.
    timeout: seconds that a collective waits for other ranks; SHARDFUSE_TIMEOUT, else 300, where left out.
    watchdog: watch the other ranks, and end this one with a line where one of them that it needs is gone.
    exchange_memory: MB of each GPU's memory through which kernels of ranks exchange, the same on all;
    SHARDFUSE_EXCHANGE_MEMORY, else 64, where left out.

    Also sets the CUDA device and, for several ranks on a host, one thread for each; makes an error that is not
    caught end all ranks with one line, this one after what `atexit` has (5 s at most); and has `finalize` called at
    exit. Called again it returns what it returned before; ReinitializedError for arguments that differ.
    Raises AlreadyInitializedError, InitializeArgumentError, PeerLostError, and what keeps ranks from a world:
    BackendUnavailableError, BackendsDisagreeError, ExchangeMemoriesDisagreeError, ExchangeUnavailableError,
    LaunchEnvironmentError, NoStoreError, PortInUseError, RankTakenError, RendezvousError, SharedGpuError and
    WorldSizesDisagreeError.
    """
    if dist.is_initialized():
        return _again(backend, timeout, watchdog, exchange_memory)
    check_range(timeout, exchange_memory)
    if sys.excepthook is not _report_and_exit:
        _start.previous_hook, sys.excepthook = sys.excepthook, _report_and_exit
    settings, launch = read_settings(), read_launch()
    if set_process_defaults(launch):
        torch.set_num_threads(1)
    job = open_job_store(launch, MEETING_TIMEOUT)
    world = new_world(job, launch.rank)
    if watchdog and launch.world_size > 1:
        # From here on the others learn what becomes of this rank, and this rank of the others.
        connection = PrefixStore(
            "watchdog", PrefixStore(world, job.connect(MEETING_TIMEOUT + 2 * settings.heartbeat_limit))
        )
        host_rank = None if launch.agent_store else 0
        _start.guard = Watchdog(connection, launch.rank, launch.world_size, host_rank, settings.heartbeat_limit)
        _start.guard.start()
    try:
        chosen, device = choose(backend, launch, is_gpu_shared=settings.shared_gpu)
        context = ProcessContext(
            launch.rank, launch.world_size, launch.local_rank, device, chosen,
            settings.timeout if timeout is None else timeout,
            exchange_memory=exchange_memory or settings.exchange_memory,
        )  # fmt: skip
        context = _form(job, world, context, launch.local_size)
    except BaseException as error:
        _abandon(error)
        raise
    guard, _start.guard = _start.guard, None
    life = _lives[default_group()] = _Life(context, job, guard, _start.previous_hook)
    atexit.register(life.end)
    return context


def _again(backend: str | None, timeout: float | None, watchdog: bool, exchange_memory: int | None) -> ProcessContext:
    """The world that there is.  Raises AlreadyInitializedError, ReinitializedError."""
    if default_group() in _adopted:
        return _adopted[default_group()][0]
    life = _find_life()
    if life is None:
        raise AlreadyInitializedError
    made, memory = life.context, life.context.exchange_memory
    watched = (None if watchdog else False, life.watchdog is not None)
    asked = {"backend": (backend, made.backend), "timeout": (timeout, made.timeout), "watchdog": watched}
    check_same(**asked, exchange_memory=(exchange_memory, memory))
    return made


def _abandon(error: BaseException) -> None:
    """Tell the others that this rank is in no world.  Raises PeerLostError where that is another one's fault."""
    guard, _start.guard = _start.guard, None
    if guard is None:
        return
    if isinstance(error, RendezvousError) or is_of_communication(error, error.__traceback__):
        culprit = guard.culprit(COMMUNICATION_PATIENCE)
        if culprit is not None and culprit.rank is not None:
            guard.abandon(None)
            raise PeerLostError(culprit.rank, culprit.reason) from error
    # Told at once: who catches the exception is in no world all the same.
    guard.abandon(None if isinstance(error, _SEEN_BY_ALL) else sentence(error))


def _form(job: JobStore, world: str, context: ProcessContext, local_size: int) -> ProcessContext:
    """Form the default process group, all ranks together."""
    rank, world_size = context.rank, context.world_size
    own = Place(context.backend, local_size, context.exchange_memory)
    ranks_per_node = agree(job, world, rank, world_size, own)
    dist.init_process_group(
        BACKENDS[context.backend],
        store=PrefixStore(job.prefix, PrefixStore(world, job.store)),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=context.timeout),
    )
    if context.device.type == "cuda":
        own_gpu(context.device.index)
    sys.excepthook = _report_and_exit  # torch has set one that holds back what the one before prints
    if _start.guard is not None:
        _start.guard.watch_device(context.device, context.timeout)
        store = PrefixStore(job.prefix, job.store)
        meet(store, f"{world}/formed", rank, world_size, "the job's store", MEETING_TIMEOUT)
        _start.guard.learn_processes()
    if world_size > 1:
        settings, memory = read_settings(), context.exchange_memory
        interpreted = settings.triton_interpret
        open_arena(context.device, settings.exchange, memory, context.timeout, is_interpreted=interpreted)
        context = replace(context, exchange=how_ranks_exchange())
    return replace(context, ranks_per_node=ranks_per_node)


def ranks_per_node() -> int | None:
    """Of the host that has fewest ranks; ``None`` where one process is the world, or somebody else made the world."""
    life = _find_life()
    return life.context.ranks_per_node if life is not None and life.context.world_size > 1 else None


def finalize() -> None:
    """Wait until no rank needs this one any longer, then leave the world. Does nothing where there is none of ours.

    A rank that finishes before the others waits for them, for the world's timeout at most.  Under NCCL the CUDA graphs
    of the process are reset: its communicators would wait for those that hold their collectives.
    Raises ExchangeTimeoutError where a kernel has waited for another rank in vain and no call has raised it.
    """
    life = _find_life()
    if life is not None:
        raise_lost_exchange(life.context.device)
        life.end()


def adopt(context: ProcessContext, ledgers: Ledgers) -> None:
    """Have `initialize` return ``context`` for a default process group that somebody else made and will end.

    ``ledgers``: where this rank's calls are noted; he compares them.
    """
    _adopted[default_group()] = context, ledgers


def fail(error: ShardfuseError | str) -> NoReturn:
    """End every rank: print one line here, have the others print one that names this rank, exit with 1.

    Where the world is somebody else's, the error is raised, and he ends it.
    """
    if dist.is_initialized() and default_group() in _adopted:
        raise error if isinstance(error, ShardfuseError) else PeerLostError(dist.get_rank(), f"failed: {error}")
    life = _find_life()
    _end(life, None if life is None else life.watchdog, str(error), Fault(_rank_of(life), f"failed: {error}"))


def is_forked() -> bool:
    """Was this process forked from a rank?  Then it is none, whatever it has of the rank's."""
    if _forked.rank is None or _forked.group is None:
        return _forked.rank is not None
    return dist.group.WORLD is _forked.group


def check_is_a_rank(what: str) -> None:
    """Raises ForkedProcessError in a process that was forked from a rank, whose connections it must not use."""
    if is_forked() and _forked.rank is not None:
        raise ForkedProcessError(what, _forked.rank)


def own_watchdog() -> Watchdog | None:
    """That of the world which `initialize` formed here, and has not ended."""
    life = _find_life()
    return None if life is None else life.watchdog


def ledger_of(ranks: Sequence[int]) -> Ledger | None:
    """Where this rank's calls of programs of these ranks are noted; ``None`` where they are not compared."""
    ledgers = own_ledgers()
    return None if ledgers is None or len(ranks) < 2 or dist.get_rank() not in ranks else ledgers.of(ranks)


def own_ledgers() -> Ledgers | None:
    """Those of all teams that this rank is in; ``None`` where nobody compares its calls."""
    guard = own_watchdog()
    if guard is not None:
        return guard.ledgers
    adopted = None if dist.group.WORLD is None else _adopted.get(dist.group.WORLD)
    return None if adopted is None else adopted[1]


def within(group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """Around a collective of a program that the host waits in: a wait of seconds is reported to the other ranks."""
    guard = own_watchdog()
    return _UNWATCHED if guard is None else guard.collective_wait.within(group)


def issued() -> dict[str, int]:
    """How many collectives this rank has issued, by process group, where its watchdog tells others of such numbers."""
    return {} if own_watchdog() is None else {name: count for name, (_, count) in group_sequences().items()}


def note_failure(error: BaseException) -> None:
    """An exception that is reported to other ranks has a traceback, which this rank prints in whatever way it ends."""
    guard = own_watchdog()
    if guard is not None and not isinstance(error, ShardfuseError):
        guard.note_failure(shown(error, error.__traceback__, dist.get_rank()))


def _report_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    """What happens to an uncaught exception: the reason on every rank, in one line, and no hang.

    A ShardfuseError is its sentence, below the caller's lines that led there. A collective that failed because of
    another rank is that rank's fault, and says so. Ctrl-C is one line. Anything else keeps its traceback, and is this
    rank's fault.
    """
    life = _find_life()
    guard = _start.guard if life is None else life.watchdog
    rank = _rank_of(life)
    if is_of_communication(error, trace) and guard is not None:
        culprit = guard.culprit(COMMUNICATION_PATIENCE)
        if culprit is not None and culprit.rank != rank:
            guard.claim()
            guard.fail(culprit.line(rank), culprit)
    if guard is not None:
        guard.claim()  # before anything else: a rank that ends for this fault must not end this one meanwhile
    sys.stderr.write(shown(error, trace, rank))
    code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    _end(life, guard, sentence(error), fault_of(error, rank), code=code, has_claimed=True)


def _end(
    life: _Life | None, guard: Watchdog | None, line: str, fault: Fault, *, code: int = 1, has_claimed: bool = False
) -> NoReturn:
    """Say the line, tell the other ranks, and only then do what the program wants done at its end."""
    if life is not None:
        life.ended = True  # by failing: what is registered for a good end must not wait for anybody
    if guard is not None:
        if not has_claimed:
            guard.claim()
        guard.fail(line, fault, lambda: end_process(code))
    say(_rank_of(life), line)
    end_process(code)


def _rank_of(life: _Life | None) -> int:
    return _launched_rank() if life is None else life.context.rank


def _launched_rank() -> int:
    try:
        return read_launch().rank
    except ShardfuseError:  # it is what is being reported
        return 0


def _find_life() -> _Life | None:
    group = dist.group.WORLD
    return None if group is None else _lives.get(group)


def _leave_to_the_parent() -> None:
    """In a forked process: it is no rank, so it neither ends one nor reports as one.

    The groups and stores are never let go of in it: their destructors join threads that only the parent has, and
    would shut connections down that are the parent's.
    """
    if _lives or _start.guard is not None:
        keep_groups_for_ever()
    for life in tuple(_lives.values()):
        life.ended = True
        atexit.unregister(life.end)
        keep_for_ever(life.job.store, life.watchdog)
        _forked.rank = life.context.rank
    if not _lives and dist.is_initialized():
        _forked.rank, _forked.group = dist.get_rank(), default_group()
    if sys.excepthook is _report_and_exit:
        sys.excepthook = _start.previous_hook
    keep_for_ever(_start.guard)
    _lives.clear()
    _start.guard = None


os.register_at_fork(after_in_child=_leave_to_the_parent)
