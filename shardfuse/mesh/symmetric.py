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
"""Bytes of symmetric memory that each rank allocates once; docs/exchange.md says how many a program takes."""
_WORD = 8
"""Bytes that one access sends: a value of 32 bits below the number of the launch."""
_YES = "yes"


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
    rank, size = group.rank(), group.size()
    mine = _why_not(device, asked, rank, size, ranks_per_node)
    told = _said_by_all(f"{asked}\n{mine or _YES}", rank, size)
    modes, reasons = zip(*(text.split("\n", 1) for text in told), strict=True)
    reason = next((f"rank {r}: {text}" for r, text in enumerate(reasons) if text != _YES), "")
    if "symmetric" in modes and reason:
        raise ExchangeUnavailableError(reason)
    if device.type == "cuda":
        _worlds[group] = _World(None, reason) if reason else _World(_open(device, group, timeout))


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
    if asked == "nccl":
        return "SHARDFUSE_EXCHANGE=nccl"
    if device.type != "cuda":
        return "tensors are on the CPU"
    if asked == "auto":
        return "SHARDFUSE_EXCHANGE is not symmetric"
    if size < 2:
        return "it is the only rank"
    if ranks_per_node < size:
        return f"{size} ranks are on several hosts"
    own = device.index
    others = [other for other in range(torch.cuda.device_count()) if other != own]
    far = [other for other in others if not torch.cuda.can_device_access_peer(own, other)]
    if len(others) + 1 < size or far:
        return f"GPU {own} of rank {rank} does not reach the memory of the GPUs of its peers"
    return ""


def _said_by_all(text: str, rank: int, size: int) -> Sequence[str]:
    """What every rank reports, through the store: in a collective, a rank that does not come would be waited for."""
    store = PrefixStore("shardfuse/exchange", default_store())
    store.set(f"{rank}", text)
    return [store.get(f"{other}").decode() for other in range(size)]


def _open(device: torch.device, group: dist.ProcessGroup, timeout: float) -> Arena:
    forbid_multicast()
    # Only where it is asked for: the import is slow, and binds to what the environment says by then.
    import torch.distributed._symmetric_memory as symmetric

    try:
        memory = symmetric.empty(ARENA_BYTES // _WORD, dtype=torch.int64, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)  # before any peer has the address
        handle = symmetric.rendezvous(memory, group)
    except RuntimeError as error:
        raise ExchangeUnavailableError(f"torch cannot share memory between these GPUs: {error}") from error
    report = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    return Arena(device, group.rank(), tuple(handle.buffer_ptrs), memory.numel(), timeout, memory, handle, report)
