"""Memory that every rank of a host can write to over NVLink: an arena for each host, made in `initialize`.

There is one allocation for each process, and one exchange of handles for each world, by all ranks of the default
process group at once: plans are made at different times on different ranks, and who waits there for another hangs.
NVLink multicast is not used.

The arena is zeroed once and handed out from its beginning, never taken back; see ``executor/symmetric_slots.py``.
"""

from __future__ import annotations

import ctypes
import platform
import socket
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardfuse.config import Exchange
from shardfuse.mesh import host_memory, peer_memory
from shardfuse.mesh.gpu_room import GpuRoom
from shardfuse.mesh.groups import count_exchanges, default_group, default_store
from shardfuse.mesh.launch_order import LaunchOrder
from shardfuse.mesh.rendezvous import PrefixStore, ProcessIdentity
from shardfuse.rank_errors import ExchangeTimeoutError, ExchangeUnavailableError

_MB = 2**20
_IN_ORDER = "x86_64"
"""A processor whose stores other processes see in order, as ranks on a CPU need: there is no fence in Triton's
interpreter."""
_WORD = 8
"""Bytes that one access sends: a value of 32 bits below the number of the launch."""


@dataclass(eq=False)
class Arena:
    """``addresses``: of each rank's part, by ranks, in this rank's address space.  ``words``: of 64 bits, of each.

    ``used``: words that programs of this rank have.  ``timeout``: seconds that a word is waited for.
    """

    device: torch.device
    rank: int
    addresses: Mapping[int, int]
    words: int
    timeout: float
    report: torch.Tensor
    """One word in the host's memory, which kernels write and read: what was waited for in vain, else 0."""
    hosts: Mapping[int, str] = field(default_factory=dict[int, str])
    """Of every rank of the world: those of one host reach each other's memory."""
    used: int = 0
    regions: dict[Hashable, object] = field(default_factory=dict[Hashable, object])
    """What programs have of it (``executor/symmetric_slots.py``)."""
    issues: dict[Hashable, object] = field(default_factory=dict[Hashable, object])
    """Collectives of plain tensors that are kept bound (``executor/symmetric_collectives.py``)."""
    decided: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """By digests of programs' texts, as their ranks agreed: why no kernel exchanges, ``None`` where one does."""
    order: LaunchOrder = field(init=False)
    """In which the kernels of all its programs are launched."""
    room: GpuRoom = field(init=False)
    """How many multiprocessors each of them may take."""
    loss: Callable[[], ExchangeTimeoutError | None] = field(init=False)
    """What ``report`` says, where it says anything."""
    is_raised: bool = field(init=False, default=False)
    """Has an exception told the caller of the report?"""
    told: ctypes.c_int64 = field(init=False)
    """``report``, as the host reads it: in a fraction of what a tensor's element takes."""

    def __post_init__(self) -> None:
        self.order, self.loss, self.room = LaunchOrder(self.device), lambda: None, GpuRoom(self.device)
        self.told = ctypes.c_int64.from_address(self.report.data_ptr())


@dataclass
class _World:
    """``arena``, or the reason why there is none."""

    arena: Arena | None
    reason: str = ""


# By default process group, so that a new world has an arena of its own.
_worlds: WeakKeyDictionary[dist.ProcessGroup, _World] = WeakKeyDictionary()


def open_arena(
    device: torch.device, asked: Exchange, megabytes: int, timeout: float, *, is_interpreted: bool = False
) -> None:
    """Make the arena of each host of the default process group, all ranks together, where its ranks can have it.

    asked: what this rank's settings say.  megabytes: of each rank's part, which all ranks have alike; docs/exchange.md
    says how many a program takes.  timeout: seconds that a rank waits for its peers.  is_interpreted: kernels run under
    Triton's interpreter, on the CPU.
    Raises ExchangeUnavailableError, on every rank, where some rank asks for symmetric memory that they cannot have.
    """
    group = default_group()
    rank, everywhere = group.rank(), _Ranks(group.rank(), tuple(range(group.size())), "world")
    mine = _why_not(device, asked, is_interpreted)
    about = _identity(device.index) if device.type == "cuda" and not mine else ("", "")
    told = {r: t.split("\n") for r, t in everywhere.said("\n".join([asked, mine, _host(), *about])).items()}
    hosts = {r: host for r, (_, _, host, _, _) in told.items()}
    reason = first_of({r: why for r, (_, why, *_) in told.items()})
    reason = reason or _why_unlike({r: kind for r, (*_, kind) in told.items()})
    if not reason and len(set(hosts.values())) == len(hosts):
        reason = "no two ranks are on one host"
    shared: dict[int, int] | str = reason
    if not reason:
        here = tuple(r for r, host in hosts.items() if host == hosts[rank])
        together = _Ranks(rank, here, f"host of {here[0]}")
        shared = _joined(device, asked, megabytes * _MB, together, {r: told[r][3:] for r in here})
        reason = first_of(everywhere.said(shared if isinstance(shared, str) else ""))
        if reason and not isinstance(shared, str):
            _close(device, [address for peer, address in shared.items() if peer != rank])
    if reason and any(mode == "symmetric" for mode, *_ in told.values()):
        raise ExchangeUnavailableError(reason)
    found: Arena | None = None
    if not reason and not isinstance(shared, str):
        report = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        found = Arena(device, rank, shared, megabytes * _MB // _WORD, timeout, report, hosts)
        count_exchanges(group, found.order.launches)
    if device.type == "cuda" or found is not None:
        _worlds[group] = _World(found, reason)


def arena() -> Arena | str:
    """That of the default process group; or why it has none, "" where that goes without saying: without GPUs."""
    world = _worlds.get(default_group()) if dist.is_initialized() else None
    if world is None:
        return ""
    return world.reason if world.arena is None else world.arena


def how_ranks_exchange() -> str:
    """By "kernels", or by "collectives" and why, where a program has anything to exchange."""
    found = arena()
    return f"collectives: {found or 'tensors are on the CPU'}" if isinstance(found, str) else "kernels"


def lost_exchange() -> ExchangeTimeoutError | None:
    """What a kernel of this rank has waited for in vain, where no exception has told the caller.

    A thread may ask while another ends the world.
    """
    group = dist.group.WORLD
    world = None if group is None else _worlds.get(group)
    found = None if world is None else world.arena
    return None if found is None or found.is_raised else found.loss()


def raise_lost_exchange(device: torch.device) -> None:
    """Wait for the ``device``.  Raises ExchangeTimeoutError where a wait was in vain and no exception has told it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    found, lost = arena(), lost_exchange()
    if lost is not None and isinstance(found, Arena):
        found.is_raised = True
        raise lost


def close_arena() -> None:
    """Let go of it: no rank's kernels write to another any longer.

    Warns of what cannot be closed, which ends with the process: the rest of a world's end is to follow.
    """
    world = _worlds.pop(default_group(), None) if dist.is_initialized() else None
    if world is not None:
        if world.arena is not None:
            own = world.arena.addresses[world.arena.rank]
            device = world.arena.device
            with _on(device):
                _close(device, [address for address in world.arena.addresses.values() if address != own])
        world.arena = None


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _memory_of(device: torch.device) -> ModuleType:
    return peer_memory if device.type == "cuda" else host_memory


def _why_not(device: torch.device, asked: Exchange, is_interpreted: bool) -> str:
    """Why this rank has no memory that others reach, whatever their GPUs; "" where it may have."""
    if asked == "nccl":
        return "SHARDFUSE_EXCHANGE=nccl"
    if device.type != "cuda" and not (is_interpreted and asked == "symmetric" and platform.machine() == _IN_ORDER):
        return "tensors are on the CPU"
    return ""


def _host() -> str:
    """What the ranks of this host have alike, and no others."""
    identity = ProcessIdentity.of_this_process()
    return identity.host or f"{socket.gethostname()} {identity.pid}"


def _identity(index: int) -> tuple[str, str]:
    """What other processes know a GPU by, and of which kind it is."""
    found = cast("Any", torch.cuda).get_device_properties(index)
    return str(found.uuid), f"{found.name} of {found.multi_processor_count} multiprocessors"


def _why_unlike(kinds: Mapping[int, str]) -> str:
    """Why ranks would plan otherwise than one another: grids, and what is worth an exchange, follow from the GPU."""
    first, kind = next(iter(kinds.items()))
    return next((f"rank {r} has {other}, rank {first} has {kind}" for r, other in kinds.items() if other != kind), "")


def _joined(
    device: torch.device, asked: Exchange, size: int, ranks: _Ranks, gpus: Mapping[int, Sequence[str]]
) -> dict[int, int] | str:
    """The addresses of the parts of an arena, of ``size`` bytes each, of all ranks of a host, or why they have none."""
    reason = first_of(ranks.said(_why_not_joined(device, asked, ranks.rank, gpus)))
    if reason:
        return reason
    with _on(device):
        return _shared(device, size, ranks)


def _why_not_joined(device: torch.device, asked: Exchange, rank: int, gpus: Mapping[int, Sequence[str]]) -> str:
    """Why the GPU of ``rank`` does not do with those of its host, by rank; "" where it does.

    Ranks may number the GPUs of the host in ways of their own (``CUDA_VISIBLE_DEVICES``).
    """
    if device.type != "cuda":
        return ""
    own = device.index
    here = {_identity(k)[0]: k for k in range(torch.cuda.device_count())}
    for peer, (name, _) in gpus.items():
        if peer == rank:
            continue
        other = here.get(name)
        if name == gpus[rank][0]:  # they take turns, and each has the memory of both
            if asked == "auto":
                return f"rank {rank} and rank {peer} share a GPU"
            continue
        if other is None or not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} of rank {rank} does not reach the memory of the GPU of rank {peer}"
        try:
            is_slow = asked == "auto" and not peer_memory.has_atomics(own, other)
        except RuntimeError as error:
            return f"links of GPU {own} are not known: {error}"
        if is_slow:
            return f"no NVLink joins GPU {own} of rank {rank} and the GPU of rank {peer}"
    return ""


@dataclass
class _Ranks:
    """What ``members`` report to each other through the store: no rank waits in a collective for one that never comes.

    ``name``: of these members, which each of them has alike.
    """

    rank: int
    members: tuple[int, ...]
    name: str
    rounds: int = 0

    def said(self, text: str) -> dict[int, str]:
        """What every member says in this round."""
        store = PrefixStore(f"shardfuse/exchange/{self.name}/{self.rounds}", default_store())
        self.rounds += 1
        store.set(f"{self.rank}", text)
        return {other: store.get(f"{other}").decode() for other in self.members}


def first_of(reasons: Mapping[int, str]) -> str:
    """The first of the ranks' reasons, with its rank unless all have the same or it has one."""
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return next((text if text.startswith("rank ") else f"rank {r}: {text}" for r, text in reasons.items() if text), "")


def _shared(device: torch.device, size: int, ranks: _Ranks) -> dict[int, int] | str:
    """Where each rank's memory is in this process's address space, or why some rank has none that the others reach."""
    memory, handle, own, why = _memory_of(device), b"", 0, ""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # has the GPU's context be this thread's
    except RuntimeError as error:
        why = f"the GPU does not come to an end of what it was given: {error}"
    # It is that of an earlier world of these processes, where there was one: what a kernel of that stores late, for a
    # rank that has given up, must not come after this rank's is zeroed.  So all GPUs have ended before any does so.
    reason = first_of(ranks.said(why))
    if reason:
        return reason
    try:
        own = memory.allocate(device.index, size)
        memory.zero(own, size)  # before any peer has it
        handle = memory.exported(own)
    except RuntimeError as error:
        why = f"these GPUs cannot share memory: {error}"
    told = {r: text.split("\n", 1) for r, text in ranks.said(f"{handle.hex()}\n{why}").items()}
    if any(text for _, text in told.values()):
        return first_of({r: text for r, (_, text) in told.items()})
    addresses = dict[int, int]()
    try:
        for rank, (text, _) in told.items():
            addresses[rank] = own if rank == ranks.rank else memory.opened(bytes.fromhex(text))
    except RuntimeError as error:
        why = f"these GPUs cannot share memory: {error}"
    reason = first_of(ranks.said(why))
    if reason:
        _close(device, [address for address in addresses.values() if address != own])
    return reason or addresses


def _close(device: torch.device, addresses: Sequence[int]) -> None:
    """Let go of peers' memory, of as much as can be."""
    for address in addresses:
        try:
            _memory_of(device).close(address)
        except RuntimeError as error:
            warnings.warn(f"the memory of another GPU was not closed: {error}", stacklevel=3)
