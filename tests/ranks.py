"""Many ranks in one process: a thread a rank, over torch's threaded test process group, with real values."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from shardfuse.tools.threaded_group import install_threaded_group, remove_threaded_group

T = TypeVar("T")

# Seconds that the others get to end once a rank has raised: some wait where nobody can wake them.
_GRACE = 2.0


class RanksHungError(AssertionError):
    """Some ranks did not end in time; the message names them and shows where they stand."""


def run_ranks(size: int, function: Callable[[int, int], T], timeout: float = 60) -> list[T]:
    """Run `function(rank, size)` as every rank of a world, and return what they returned, by rank.

    What a rank raises is raised here, with a note that names the rank (the lowest, where several raise).
    Raises RanksHungError where ranks are still running after `timeout` seconds.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    store = dist.HashStore()
    over: list[bool] = []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            results[rank] = function(rank, size)
            dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 raised again in the caller's thread
            errors[rank] = error
            if not over:  # a rank that was left behind must not end a later world
                ProcessLocalGroup.exception_handle(error)

    with _threaded_world():
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        _join(threads, errors, timeout)
        hung = {rank: thread for rank, thread in enumerate(threads) if thread.is_alive()}
        over.append(True)
        stacks = "".join(f"\nrank {rank}:\n{_stack_of(thread)}" for rank, thread in hung.items())
    own = {rank: error for rank, error in errors.items() if not _was_interrupted(error)}
    if own:
        rank = min(own)
        own[rank].add_note(f"raised on rank {rank} of {size}; ranks that raised: {sorted(own)}")
        raise own[rank]
    if hung:
        raise RanksHungError(f"ranks {sorted(hung)} of {size} still run after {timeout:g} s:{stacks}")
    assert not errors, f"ranks {sorted(errors)} were interrupted, and none raised"
    return [results[rank] for rank in range(size)]


@contextmanager
def _threaded_world():
    _set_thread_isolation_mode(True)
    install_threaded_group()
    try:
        yield
    finally:
        ProcessLocalGroup.reset()
        remove_threaded_group()
        _set_thread_isolation_mode(False)


def _join(threads: list[threading.Thread], errors: dict[int, BaseException], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        if errors:
            deadline = min(deadline, time.monotonic() + _GRACE)
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            return
        alive = [thread for thread in threads if thread.is_alive()]
        if alive:  # the last may have ended since
            alive[0].join(0.02)


def _was_interrupted(error: BaseException) -> bool:
    """True for what the threaded group raises in the others once one rank has raised."""
    return isinstance(error, SystemExit) and str(error) == "Test termination event occurs."


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(ended)\n"
