"""The life of a rank: find the others, form the default process group, fail together, end together."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardfuse.config import LaunchConfig, read_launch, read_settings, set_process_defaults
from shardfuse.errors import (
    AlreadyInitializedError,
    BackendsDisagreeError,
    BackendUnavailableError,
    PeerLostError,
    RendezvousError,
    ShardfuseError,
)
from shardfuse.mesh.groups import destroy_groups
from shardfuse.mesh.rendezvous import JobStore, PrefixStore, open_job_store
from shardfuse.mesh.watchdog import Watchdog, say
from shardfuse.source_line import is_callers
from shardfuse.start_errors import InitializeArgumentError, RankTakenError, ReinitializedError, WorldSizesDisagreeError

# What a backend's name stands for: with NCCL, tensors on the CPU (counters, flags) are gloo's.
_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
_RENDEZVOUS_TIMEOUT = 60.0  # seconds; ranks are started together
_COMMUNICATION_PATIENCE = 2.0  # seconds to find the rank behind a collective that failed
_EXIT_HANDLERS = 5.0  # seconds that atexit's functions have in a rank that fails
_INTERRUPTED = 128 + signal.SIGINT  # the exit code that shells give Ctrl-C
_GRACE = 3.0  # seconds that a rank that is done keeps its connections open for ranks that are not


@dataclass(frozen=True)
class ProcessContext:
    """This process's place in the world, and the device that it computes on.

    backend: "nccl" (with gloo for tensors on the CPU) or "gloo". timeout: seconds that a collective waits.
    ranks_per_node: of the host that has fewest ranks, the same on all.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    timeout: float
    ranks_per_node: int = 1


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
        return dist.is_initialized() and _lives.get(_default_group()) is self

    def end(self) -> None:
        """What `finalize` does, once."""
        if self.ended:
            return
        self.ended = True
        atexit.unregister(self.end)
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        guard = self.watchdog
        together = guard is None or guard.leave(_GRACE)
        # Closed connections are how gloo tells a rank that still waits for this one; NCCL's end needs all ranks.
        if self.has_group() and (together or self.context.backend == "gloo"):
            destroy_groups()
        if guard is not None:
            guard.stop(self.context.timeout)
        if self.has_group():
            destroy_groups()
        if guard is not None and self.job.is_host:
            guard.wait_for_the_last()
        sys.excepthook = self.previous_hook


# By default process group, so that the end of one world is no part of the next.
_lives: WeakKeyDictionary[dist.ProcessGroup, _Life] = WeakKeyDictionary()
_adopted: WeakKeyDictionary[dist.ProcessGroup, ProcessContext] = WeakKeyDictionary()
_worlds: dict[str, int] = {}
"""How many worlds this process has begun to form in each job's store."""


def initialize(backend: str | None = None, *, timeout: float | None = None, watchdog: bool = True) -> ProcessContext:
    """Form the default process group of what torchrun, mpirun or srun started; plain `python` is a world of one.

    backend: "nccl", "gloo", or None for NCCL where every rank has a GPU of its own and gloo elsewhere.
    timeout: seconds that a collective waits for other ranks; SHARDFUSE_TIMEOUT, else 300, where left out.
    watchdog: watch the other ranks, and end this one with a line where one of them that it needs is gone.

    Also sets the CUDA device and, for several ranks on a host, one thread for each; makes an error that nobody
    catches end all ranks with one line, this one after what `atexit` has (5 s at most); and has `finalize` called at
    exit. Called again it returns what it returned before; ReinitializedError for arguments that differ.
    Raises InitializeArgumentError, BackendUnavailableError, BackendsDisagreeError, WorldSizesDisagreeError,
    RankTakenError, LaunchEnvironmentError, RendezvousError, PortInUseError, NoStoreError and AlreadyInitializedError.
    """
    if dist.is_initialized():
        if _default_group() in _adopted:
            return _adopted[_default_group()]
        life = _find_life()
        if life is None:
            raise AlreadyInitializedError
        _check_same(life, backend, timeout, watchdog)
        return life.context
    if timeout is not None and not (_is_number(timeout) and 0 < timeout < float("inf")):
        raise InitializeArgumentError("timeout", timeout, "a positive number of seconds")
    sys.excepthook, previous_hook = _report_and_exit, sys.excepthook
    settings, launch = read_settings(), read_launch()
    if set_process_defaults(launch):
        torch.set_num_threads(1)
    context = _choose(backend, launch, settings.timeout if timeout is None else timeout)
    job = open_job_store(launch, _RENDEZVOUS_TIMEOUT)
    world, ranks_per_node = _agree(job, context, launch.local_size)
    context = replace(context, ranks_per_node=ranks_per_node)
    guard = None
    if watchdog and context.world_size > 1:
        store = PrefixStore("watchdog", PrefixStore(world, job.connect(settings.heartbeat_limit)))
        host_rank = None if launch.agent_store else 0
        guard = Watchdog(store, context.rank, context.world_size, host_rank, context.device, settings.heartbeat_limit)
        guard.announce()
    dist.init_process_group(
        _BACKENDS[context.backend],
        store=PrefixStore(job.prefix, PrefixStore(world, job.store)),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=context.timeout),
    )
    sys.excepthook = _report_and_exit  # torch has set one that holds back what the one before prints
    if guard is not None:
        _meet(job, f"{world}/formed", context)
        guard.start()
    life = _lives[_default_group()] = _Life(context, job, guard, previous_hook)
    atexit.register(life.end)
    return context


def ranks_per_node() -> int | None:
    """Of the host that has fewest ranks; ``None`` where one process is the world, or somebody else made the world."""
    life = _find_life()
    return life.context.ranks_per_node if life is not None and life.context.world_size > 1 else None


def finalize() -> None:
    """Wait until no rank needs this one any longer, then leave the world. Does nothing where there is none of ours.

    A rank that finishes before the others waits for them, for the world's timeout at most.
    """
    life = _find_life()
    if life is not None:
        life.end()


def adopt(context: ProcessContext) -> None:
    """Have `initialize` return ``context`` for a default process group that somebody else made and will end."""
    _adopted[_default_group()] = context


def fail(error: ShardfuseError | str) -> NoReturn:
    """End every rank: print one line here, have the others print one that names this rank, exit with 1.

    Where the world is somebody else's, the error is raised, and he ends it.
    """
    if dist.is_initialized() and _default_group() in _adopted:
        raise error if isinstance(error, ShardfuseError) else PeerLostError(dist.get_rank(), f"failed: {error}")
    life = _find_life()
    _end(life, str(error), f"failed: {error}")


def _check_same(life: _Life, backend: str | None, timeout: float | None, watchdog: bool) -> None:
    """Raise ReinitializedError for what was asked for and the world has not."""
    if backend is not None and backend != life.context.backend:
        raise ReinitializedError("backend", backend, life.context.backend)
    if timeout is not None and timeout != life.context.timeout:
        raise ReinitializedError("timeout", timeout, life.context.timeout)
    if not watchdog and life.watchdog is not None:
        raise ReinitializedError("watchdog", watchdog, True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _choose(backend: str | None, launch: LaunchConfig, timeout: float) -> ProcessContext:
    """The backend and the device, by the GPUs that this process sees."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = launch.local_size <= gpus and dist.is_nccl_available()
    chosen = backend or ("nccl" if enough else "gloo")
    if not isinstance(chosen, str) or chosen not in _BACKENDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BackendUnavailableError(chosen, f"shardfuse knows {' and '.join(sorted(_BACKENDS))}")
    if chosen == "nccl" and not enough:
        raise BackendUnavailableError(chosen, f"{launch.local_size} ranks on this host have {gpus} GPUs")
    device = torch.device("cuda", launch.local_rank) if chosen == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return ProcessContext(launch.rank, launch.world_size, launch.local_rank, device, chosen, timeout)


def _agree(job: JobStore, context: ProcessContext, local_size: int) -> tuple[str, int]:
    """Compare the ranks' choices; a name for this world, which no earlier one in the same store had, and the smallest
    number of ranks on a host."""
    store = PrefixStore(job.prefix, job.store)
    number = store.add(f"initialized/{context.rank}", 1)
    _worlds[job.prefix] = _worlds.get(job.prefix, 0) + 1
    if number != _worlds[job.prefix]:
        raise RankTakenError(context.rank)
    world = f"world{number}"
    store.set(f"{world}/place/{context.rank}", f"{context.world_size} {context.backend} {local_size}")
    try:
        told = _places(store, world, context)
        if len({backend for backend, _ in told}) > 1:
            raise BackendsDisagreeError([backend for backend, _ in told])
    except ShardfuseError:
        _let_all_read(store, world, context, job)
        raise
    return world, min(size for _, size in told)


def _places(store: PrefixStore, world: str, context: ProcessContext) -> list[tuple[str, int]]:
    """The backend and the number of ranks on its host of each rank.

    World sizes are compared as ranks arrive: of those that were started for another world some may never come.
    """
    found: dict[int, tuple[str, int]] = {}
    deadline, pause = time.monotonic() + _RENDEZVOUS_TIMEOUT, 0.001
    try:
        while len(found) < context.world_size:
            for rank in range(context.world_size):
                if rank not in found and store.check([f"{world}/place/{rank}"]):
                    size, backend, local_size = store.get(f"{world}/place/{rank}").decode().split()
                    if int(size) != context.world_size:
                        raise WorldSizesDisagreeError(context.rank, context.world_size, rank, int(size))
                    found[rank] = backend, int(local_size)
            if time.monotonic() > deadline:
                missing = [rank for rank in range(context.world_size) if rank not in found]
                raise RendezvousError(context.rank, context.world_size, f"the job's store, where ranks {missing} are "
                                      "missing,", _RENDEZVOUS_TIMEOUT)  # fmt: skip
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
    except dist.DistError as error:
        raise RendezvousError(context.rank, context.world_size, "the job's store", _RENDEZVOUS_TIMEOUT) from error
    return [found[rank] for rank in range(context.world_size)]


def _let_all_read(store: PrefixStore, world: str, context: ProcessContext, job: JobStore) -> None:
    """Say that this rank has seen what is wrong; the one that serves the store stays until those that came have."""
    try:
        store.set(f"{world}/seen/{context.rank}", "")
        deadline = time.monotonic() + _GRACE
        while job.is_host and time.monotonic() < deadline:
            came = [r for r in range(context.world_size) if store.check([f"{world}/place/{r}"])]
            if store.check([f"{world}/seen/{rank}" for rank in came]):
                return
            time.sleep(0.02)
    except dist.DistError:
        return  # the store is gone: nobody is left to read


def _meet(job: JobStore, key: str, context: ProcessContext) -> None:
    """A barrier in the store."""
    store = PrefixStore(job.prefix, job.store)
    store.set(f"{key}/{context.rank}", "")
    try:
        store.wait([f"{key}/{rank}" for rank in range(context.world_size)], timedelta(seconds=_RENDEZVOUS_TIMEOUT))
    except dist.DistError as error:
        raise RendezvousError(context.rank, context.world_size, "the job's store", _RENDEZVOUS_TIMEOUT) from error


def _report_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    """What happens to an exception that nobody caught: the reason on every rank, in one line, and no hang.

    A ShardfuseError is its sentence, below the caller's lines that led there. A collective that failed because of
    another rank is that rank's fault, and says so. Ctrl-C is one line. Anything else keeps its traceback.
    """
    life = _find_life()
    guard = None if life is None else life.watchdog
    if isinstance(error, KeyboardInterrupt):
        _end(life, "interrupted", "was interrupted", code=_INTERRUPTED)
    if isinstance(error, ShardfuseError):
        if not isinstance(error, PeerLostError):
            _show(life, _callers_part(error, trace))
    else:
        is_communication = isinstance(error, RuntimeError)  # torch raises it, or a class of it, for collectives
        culprit = None if guard is None else guard.culprit(_COMMUNICATION_PATIENCE if is_communication else 0.0)
        if culprit is not None and is_communication:
            _end(life, str(culprit), culprit.reason, culprit.rank)
        _show(life, "".join(traceback.format_exception(kind, error, trace)))
    line = str(error).replace("\n  at ", "; at ") if isinstance(error, ShardfuseError) else f"{kind.__name__}: {error}"
    _end(life, line, f"failed: {line}")


def _callers_part(error: ShardfuseError, trace: TracebackType | None) -> str:
    """The traceback without frames of shardfuse and torch, which the sentence speaks for; notes below."""
    frames = [frame for frame in traceback.extract_tb(trace) if is_callers(frame.filename)]
    notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    return f"Traceback (most recent call last):\n{''.join(traceback.format_list(frames))}{notes}"


def _show(life: _Life | None, text: str) -> None:
    sys.stderr.write(textwrap.indent(text, f"[rank{_rank_of(life)}]: ", lambda line: True))


def _end(life: _Life | None, line: str, reason: str, culprit: int | None = None, code: int = 1) -> NoReturn:
    """Say the line, tell the other ranks, and only then do what the program wants done at its end."""
    rank = _rank_of(life)
    if life is not None:
        life.ended = True  # by failing: what is registered for a good end must not wait for anybody
    if life is not None and life.watchdog is not None:
        life.watchdog.fail(line, PeerLostError(rank if culprit is None else culprit, reason), lambda: _exit(code))
    say(rank, line)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End with what `atexit` has, for a few seconds at most, and with all that was printed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, once the other ranks have ended
    late = threading.Timer(_EXIT_HANDLERS, os._exit, (code,))
    late.daemon = True
    late.start()
    try:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _rank_of(life: _Life | None) -> int:
    return _launched_rank() if life is None else life.context.rank


def _launched_rank() -> int:
    try:
        return read_launch().rank
    except ShardfuseError:  # it is what is being reported
        return 0


def _find_life() -> _Life | None:
    return _lives.get(_default_group()) if dist.is_initialized() else None


def _default_group() -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", cast("Any", dist).group.WORLD)
