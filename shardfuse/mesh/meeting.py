"""How the ranks of a world that is being formed find out, through the store, that they are all there and agree."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist

from shardfuse.errors import BackendsDisagreeError, RendezvousError, ShardfuseError
from shardfuse.mesh.rendezvous import JobStore, PrefixStore
from shardfuse.start_errors import ExchangeMemoriesDisagreeError, RankTakenError, WorldSizesDisagreeError

MEETING_TIMEOUT = 60.0
"""Seconds; ranks are started together."""
_READ = 3.0
"""Seconds in which ranks that came to a world that cannot be read why, before the store ends with its host."""

_begun: dict[str, int] = {}
"""How many worlds this process has begun to form in each job's store."""


def new_world(job: JobStore, rank: int) -> str:
    """The name of the next world of this job.  Raises RankTakenError where another process is this rank too."""
    number = PrefixStore(job.prefix, job.store).add(f"initialized/{rank}", 1)
    _begun[job.prefix] = _begun.get(job.prefix, 0) + 1
    if number != _begun[job.prefix]:
        raise RankTakenError(rank)
    return f"world{number}"


@dataclass(frozen=True)
class Place:
    """What a rank tells the others of itself.

    local_size: ranks on its host.  exchange_memory: MB of its memory that others write to, where they exchange so.
    """

    backend: str
    local_size: int
    exchange_memory: int


def agree(job: JobStore, world: str, rank: int, world_size: int, own: Place) -> int:
    """Compare the ranks' choices; the smallest number of ranks on a host.

    Raises BackendsDisagreeError, ExchangeMemoriesDisagreeError, WorldSizesDisagreeError and RendezvousError.
    """
    store = PrefixStore(job.prefix, job.store)
    store.set(f"{world}/place/{rank}", f"{world_size} {own.backend} {own.local_size} {own.exchange_memory}")
    try:
        told = _places(store, world, rank, world_size)
        if len({place.backend for place in told}) > 1:
            raise BackendsDisagreeError([place.backend for place in told])
        if len({place.exchange_memory for place in told}) > 1:
            raise ExchangeMemoriesDisagreeError([place.exchange_memory for place in told])
    except ShardfuseError:
        _let_all_read(store, world, rank, world_size, is_host=job.is_host)
        raise
    return min(place.local_size for place in told)


def _places(store: PrefixStore, world: str, rank: int, world_size: int) -> list[Place]:
    """That of each rank.

    World sizes are compared as ranks arrive: of those that were started for another world some may never come.
    """
    found: dict[int, Place] = {}
    deadline, pause = time.monotonic() + MEETING_TIMEOUT, 0.001
    try:
        while len(found) < world_size:
            for other in range(world_size):
                if other not in found and store.check([f"{world}/place/{other}"]):
                    size, backend, *numbers = store.get(f"{world}/place/{other}").decode().split()
                    if int(size) != world_size:
                        raise WorldSizesDisagreeError(rank, world_size, other, int(size))
                    found[other] = Place(backend, *map(int, numbers))
            if time.monotonic() > deadline:
                missing = [other for other in range(world_size) if other not in found]
                where = f"the job's store, where ranks {missing} are missing,"
                raise RendezvousError(rank, world_size, where, MEETING_TIMEOUT)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
    except dist.DistError as error:
        raise RendezvousError(rank, world_size, "the job's store", MEETING_TIMEOUT) from error
    return [found[other] for other in range(world_size)]


def _let_all_read(store: PrefixStore, world: str, rank: int, world_size: int, *, is_host: bool) -> None:
    """Say that this rank has seen what is wrong; the one that serves the store stays until those that came have."""
    try:
        store.set(f"{world}/seen/{rank}", "")
        deadline = time.monotonic() + _READ
        while is_host and time.monotonic() < deadline:
            came = [other for other in range(world_size) if store.check([f"{world}/place/{other}"])]
            if store.check([f"{world}/seen/{other}" for other in came]):
                return
            time.sleep(0.02)
    except dist.DistError:
        return  # the store is gone, and with it all readers
