# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""Memory that every rank of a host can write to over NVLink: one arena, made by all ranks at once in `initialize`.

All of torch's symmetric memory, whose interface is private, is used here (tried with torch 2.11 and 2.13).  There is
one allocation and one rendezvous for each world, on the default process group: plans are made at different times on
different ranks, and a rendezvous of some ranks in another order than others hangs.  torch's signal pads and NVLink
multicast are not used.

The arena is zeroed once and handed out from its beginning, never taken back; see ``executor/regions.py``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardfuse.config import Exchange, forbid_multicast
from shardfuse.mesh.groups import default_group, default_store
from shardfuse.mesh.rendezvous import PrefixStore
from shardfuse.rank_errors import ExchangeUnavailableError

ARENA_BYTES = 64 * 2**20
_WORD = 8
_ATOMICS = 3
"""``CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED``.  Source: ``cuda.h``."""


@dataclass(eq=False)
class Arena:
    """``addresses``: of the arena, in this rank's address space, as each rank has it.  ``words``: of 64 bits, of each.

    ``used``: words that programs have, the same number on every rank.  ``timeout``: seconds that a word is waited for.
    """

    device: torch.device
    rank: int
    addresses: tuple[int, ...]
    words: int
    timeout: float
    memory: torch.Tensor | None
    handle: object
    report: torch.Tensor
    """One word in the host's memory, which kernels write and read: what was waited for in vain, else 0."""
    used: int = 0
    regions: dict[Hashable, object] = field(default_factory=dict[Hashable, object])
    """What programs have of it (``executor/regions.py``)."""
    told: ctypes.c_int64 = field(init=False)
    """``report``, as the host reads it: in a fraction of what a tensor's element takes."""

    def __post_init__(self) -> None:
        self.told = ctypes.c_int64.from_address(self.report.data_ptr())


@dataclass
class _World:
    """``arena``, or the reason why there is none."""

    arena: Arena | None
    reason: str = ""


# By default process group, so that a new world has an arena of its own.
_worlds: WeakKeyDictionary[dist.ProcessGroup, _World] = WeakKeyDictionary()


def open_arena(device: torch.device, asked: Exchange, timeout: float, ranks_per_node: int) -> None:
    """Make the arena of the default process group's ranks, all together, where each can have it.

    asked: what this rank's settings say.  timeout: seconds that a rank waits for its peers.
    Raises ExchangeUnavailableError, on every rank, where some rank asks for symmetric memory that they cannot have.
    """
    group = default_group()
    ranks = _Ranks(group.rank(), group.size())
    mine = _why_not(device, asked, ranks.rank, ranks.size, ranks_per_node)
    told = ranks.said(f"{asked}\n{mine}")
    modes, reasons = zip(*(text.split("\n", 1) for text in told), strict=True)
    reason = first_of(reasons)
    found: Arena | None = None
    if device.type == "cuda" and not reason:
        made = _allocated(device)
        reason = ranks.reason("" if isinstance(made, torch.Tensor) else made)
        if isinstance(made, torch.Tensor) and not reason:
            opened = _opened(made, group, timeout)
            reason = ranks.reason(opened if isinstance(opened, str) else "")
            found = None if reason or isinstance(opened, str) else opened
    if "symmetric" in modes and reason:
        raise ExchangeUnavailableError(reason)
    if device.type == "cuda":
        _worlds[group] = _World(found, reason)


def arena() -> Arena | str:
    """That of the default process group; or why it has none, "" where that goes without saying: without GPUs."""
    world = _worlds.get(default_group()) if dist.is_initialized() else None
    if world is None:
        return ""
    return world.reason if world.arena is None else world.arena


def close_arena() -> None:
    """Let go of it: no rank's kernels write to another any longer."""
    world = _worlds.pop(default_group(), None) if dist.is_initialized() else None
    if world is not None:
        if world.arena is not None:
            world.arena.memory = world.arena.handle = None
        world.arena = None


def _why_not(device: torch.device, asked: Exchange, rank: int, size: int, ranks_per_node: int) -> str:
    """Why this rank has no memory that the others reach; "" where it has."""
    if asked == "nccl":
        return "SHARDFUSE_EXCHANGE=nccl"
    if device.type != "cuda":
        return "tensors are on the CPU"
    if size < 2:
        return "it is the only rank"
    if ranks_per_node < size:
        return f"{size} ranks are on several hosts"
    own = device.index
    others = [other for other in range(torch.cuda.device_count()) if other != own]
    far = [other for other in others if not torch.cuda.can_device_access_peer(own, other)]
    if len(others) + 1 < size or far:
        return f"GPU {own} of rank {rank} does not reach the memory of the GPUs of its peers"
    slow = [other for other in others if asked == "auto" and not has_atomics(own, other)]
    return f"no NVLink joins GPU {own} of rank {rank} and GPU {slow[0]}" if slow else ""


def has_atomics(own: int, other: int) -> bool:
    """Does the link from GPU ``own`` to ``other`` carry atomic operations?  NVLink does, and PCI Express does not.

    Source: CUDA driver API, ``CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED``.
    """
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    devices = [_driver_index(driver, k) for k in (own, other)]
    return driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _ATOMICS, *devices) == 0 and value.value == 1


def _driver_index(driver: ctypes.CDLL, k: int) -> int:
    """The driver's handle of the GPU that this process counts as ``k``."""
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), k)
    return device.value


@dataclass
class _Ranks:
    """What ranks tell each other through the store: nobody is waited for in a collective that he does not come to."""

    rank: int
    size: int
    rounds: int = 0

    def said(self, text: str) -> Sequence[str]:
        """What every rank says in this round."""
        store = PrefixStore(f"shardfuse/exchange/{self.rounds}", default_store())
        self.rounds += 1
        store.set(f"{self.rank}", text)
        return [store.get(f"{other}").decode() for other in range(self.size)]

    def reason(self, mine: str) -> str:
        """That of the first rank that has one, "" where none has."""
        return first_of([text.removeprefix("\n") for text in self.said(f"\n{mine}")])


def first_of(reasons: Sequence[str]) -> str:
    """The first of the ranks' reasons, with its rank."""
    return next((f"rank {r}: {text}" for r, text in enumerate(reasons) if text), "")


def _allocated(device: torch.device) -> torch.Tensor | str:
    """Memory for the arena, or why there is none."""
    forbid_multicast()
    import torch.distributed._symmetric_memory as symmetric

    try:
        memory = symmetric.empty(ARENA_BYTES // _WORD, dtype=torch.int64, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)  # before any peer has the address
    except RuntimeError as error:
        return f"torch cannot share memory between these GPUs: {error}"
    return memory


def _opened(memory: torch.Tensor, group: dist.ProcessGroup, timeout: float) -> Arena | str:
    """The arena in ``memory``, which every rank of ``group`` has, or why there is none."""
    import torch.distributed._symmetric_memory as symmetric

    try:
        handle = symmetric.rendezvous(memory, group)
    except RuntimeError as error:
        return f"torch cannot share memory between these GPUs: {error}"
    report = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    addresses = tuple(handle.buffer_ptrs)
    return Arena(memory.device, group.rank(), addresses, memory.numel(), timeout, memory, handle, report)
