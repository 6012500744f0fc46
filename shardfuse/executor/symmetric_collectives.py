"""Collectives by kernels of shardfuse's own, between ranks that reach each other's memory: those where NCCL is slower.

NCCL moves 16 MB between two GPUs that NVLink joins in 92 us, a kernel in little more than half of that, and the latency
of a small message is that of one store and one flag.  ``codegen/collective_kernels.py`` has the kernels; this module
says which collectives they do, and has the ranks agree on them.

All kernels of a team share slots in the arena (``symmetric_slots.py``).  Before the first collective of its kind, the
ranks of the team compile it and tell one another whether they could, as they do for a fused kernel; from then on all of
them take it for each collective of so many bytes, or none does.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..codegen.collective_kernels import (
    SUMMED,
    Collective,
    Kind,
    chosen_chunk,
    collective_source,
    shared_programs,
    slot_words,
)
from ..codegen.collective_moves import UNIT, Moves, gathered, scattered
from ..codegen.mesh_exchange import table_words
from ..config import read_cache_directory
from ..device import Device, device_here
from ..errors import KernelCompileError
from ..ir.dtype import DataType
from ..mesh import DeviceMesh, ParallelType
from ..mesh.groups import Team
from ..mesh.symmetric import Arena, arena
from ..rank_errors import CapturedCollectiveError
from ..schedulers.exchange_room import free_multiprocessors
from ..schedulers.plan import RankExchange
from ..schedulers.rank_exchange import MOST_RANKS
from .agreement import agreed
from .collective_calls import is_one_step
from .comparison import digest
from .kept_tensors import made_to_last
from .kernel import Kernel, Launch
from .launch import index_of, queue_on
from .nccl_channels import Channel, Issue, Pieces
from .packing import plain
from .rank_reduction import Reduction
from .symmetric_slots import Region, hand_out_from, handed_out, is_in_reach, made_region, why_not_together
from .turns import turn_here

_SHARE = 2
"""Of the arena, collectives take no more than one part of so many: fused kernels are to find room as well."""
_BITS = {1: DataType.Int8, 2: DataType.Int16, 4: DataType.Int32, 8: DataType.Int, 16: DataType.Int}
"""By bytes of an element: integers that are moved in place of it, wherever it begins.  A complex number is two."""
_SUMMED = {t.torch: t for t in SUMMED}
_CALLS = 256
"""Collectives of plain tensors that are kept bound: a program repeats a few."""
_ELSEWHERE = "tensors are on another GPU than this rank's own"
"""What ranks compare, beside the kernel, where that is so."""
_NO_KERNEL = 1 << 62
"""What a rank tells that cannot have a kernel, in place of how much memory it has handed out."""


def symmetric_channel(team: Team, device: torch.device, dtype: torch.dtype, otherwise: Channel) -> Channel:
    """``otherwise``, or kernels for those collectives of ``team`` that they do better.  Its ranks all ask."""
    found = arena()
    if isinstance(found, str) or not _is_together(team):
        return otherwise
    return SymmetricChannel(found, team, device, dtype, otherwise)


@dataclass(frozen=True)
class SymmetricChannel:
    """Collectives of a team on tensors of ``dtype``; those that no kernel does, by ``otherwise``."""

    arena: Arena
    team: Team
    device: torch.device
    dtype: torch.dtype
    otherwise: Channel

    def by_kernel(self, kind: Kind, moves: Moves) -> Issue | None:
        """``issue(queue, given, taken)`` by a kernel; ``None`` where NCCL is faster, or the team has no kernel."""
        return _issue(self.arena, self.team, self.device, self.dtype, kind, moves)

    def all_reduce(self, op: Reduction, count: int) -> Issue:
        return self.otherwise.all_reduce(op, count)

    def all_gather(self, pieces: Pieces) -> Issue:
        return self.otherwise.all_gather(pieces)

    def reduce_scatter(self, op: Reduction, pieces: Pieces) -> Issue:
        return self.otherwise.reduce_scatter(op, pieces)

    def all_to_all(self) -> Issue:
        return self.otherwise.all_to_all()

    def group(self, issues: Sequence[Issue]) -> Issue:
        return self.otherwise.group(issues)


def result_by_kernel(kind: Kind, x: Tensor, team: Team, moves: Moves, shape: Sequence[int]) -> Tensor | None:
    """What the collective makes of ``x``, of ``shape``; ``None`` where no kernel does it, on all ranks of ``team``.

    x: of any strides.  moves: of its elements.  Within ``turn_for``.
    """
    found, device = arena(), x.device
    if isinstance(found, str) or device.type != found.device.type or moves.count == 0 or not _is_together(team):
        return None
    with _on(device):
        issue = _kept_issue(found, team, device, x.dtype, kind, moves)
        if issue is None:
            return None
        given, taken = plain(x).contiguous(), torch.empty(tuple(shape), dtype=x.dtype, device=device)
        issue(queue_on(device)(), given, taken)
        return taken


def turn_for(x: Tensor, team: Team) -> AbstractContextManager[None]:
    """Around a collective of ``x`` that may be a kernel: launches have one order, which is that of one thread.

    Raises ThreadsError in another one than that which runs programs of several ranks.
    """
    found = arena()
    if isinstance(found, str) or x.device.type != found.device.type or not _is_together(team):
        return nullcontext()
    return turn_here().of(team.ranks)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """With ``device`` the current one, whose default stream and context a launch has."""
    if device.type != "cuda" or torch.cuda.current_device() == index_of(device):
        return nullcontext()
    return torch.cuda.device(device)


def _is_together(team: Team) -> bool:
    return 1 < team.size <= MOST_RANKS and team.is_in_order and why_not_together(team.ranks) is None


def _issue(
    found: Arena, team: Team, device: torch.device, dtype: torch.dtype, kind: Kind, moves: Moves
) -> Issue | None:
    units, is_summed = moves.in_units(dtype.itemsize), kind in ("reduce_scatter", "all_reduce")
    here = device_here(device)
    is_short = units is not None and units.count * UNIT <= here.measured.collectives.longest
    if units is None or not is_short or (is_summed and dtype not in _SUMMED):
        return None
    carried = _SUMMED[dtype] if is_summed else _BITS[dtype.itemsize]
    size, ranks = units.count * UNIT, team.size
    if kind == "all_reduce" and not is_one_step(size, ranks):
        return _in_two_steps(found, team, device, dtype, moves.count)
    chunk, free = chosen_chunk(size, ranks, here), free_multiprocessors(here.multiprocessors)
    # small ones have a program for each chunk, on multiprocessors of their own
    exchange = exchange_of(team.ranks, here, is_claimed=size > chunk * free)
    is_interpreted, is_whole = device.type != "cuda", size % chunk == 0
    made = Collective(kind, carried, chunk, here, exchange, units.is_flat, is_whole)
    source = collective_source(made, units, interpret=is_interpreted)
    kernel = Kernel(source, read_cache_directory(), interpret=is_interpreted)
    region = _agreed(found, team, device, kernel, exchange)
    if region is None:
        return None
    launch, moved = region.launcher(kernel, exchange), carried.torch
    return _of_views(launch, moved) if is_interpreted else launch  # which reads any dtype at a tensor's address


def _of_views(launch: Launch, dtype: torch.dtype) -> Issue:
    """``launch`` as the interpreter takes its tensors: flat, of the kernel's ``dtype``."""

    def issue(queue: int, given: Tensor, taken: Tensor) -> None:
        launch(None, given.view(-1).view(dtype), taken.view(-1).view(dtype))

    return issue


def _in_two_steps(found: Arena, team: Team, device: torch.device, dtype: torch.dtype, count: int) -> Issue | None:
    """An all-reduce as a reduce-scatter into this rank's piece of the result, and a gather of the pieces."""
    piece, rest = divmod(count, team.size)
    scatter = gather = None
    if not rest:
        scatter = _issue(found, team, device, dtype, "reduce_scatter", scattered(1, piece, team.size))
        gather = _issue(found, team, device, dtype, "all_gather", gathered(1, piece, team.size))
    if scatter is None or gather is None:
        return None
    scatter_now, gather_now = scatter, gather

    def issue(queue: int, given: Tensor, taken: Tensor) -> None:
        mine = taken.view(-1).narrow(0, team.index * piece, piece)
        scatter_now(queue, given, mine)
        gather_now(queue, mine, taken)

    return issue


def _kept_issue(
    found: Arena, team: Team, device: torch.device, dtype: torch.dtype, kind: Kind, moves: Moves
) -> Issue | None:
    """Of tensors that no program has: kept by the arena, as long as that.

    Ranks may keep different ones: what they agreed on they do not compare again.
    """
    kept, key = cast("dict[Hashable, Issue | None]", found.issues), (team, device, dtype, kind, moves)
    if key not in kept:
        issue = _issue(found, team, device, dtype, kind, moves)
        if len(kept) >= _CALLS:
            del kept[next(iter(kept))]
        kept[key] = issue
    return kept[key]


def exchange_of(ranks: Sequence[int], device: Device, *, is_claimed: bool) -> RankExchange:
    """What a fused kernel that sends rows has: these ranks, and how many programs share the chunks of a launch."""
    programs = shared_programs(device)
    return RankExchange(
        DeviceMesh(ranks), ParallelType.mesh_x, (), programs=programs, is_claimed=is_claimed, is_in_rows=True
    )


def _agreed(found: Arena, team: Team, device: torch.device, kernel: Kernel, exchange: RankExchange) -> Region | None:
    """The slots of the team's kernels, once its ranks have compiled ``kernel``; ``None`` where not all of them could.

    They compare its text, once for each, and receive where slots begin: behind what any of them handed out.  What a
    rank may lack memory for, the table, is made before, so that all of them raise where one has none, and where one
    cannot write it, in a capture.  On another GPU than the one that shares memory there is no kernel.
    """
    line, place = ("collectives", team.ranks), "" if is_in_reach(device) else f"{_ELSEWHERE}\n"
    known, text = cast("Region | None", found.regions.get(line)), f"{place}{kernel.source.text}"
    key = digest(f"{team.ranks}\n{text}")
    if key not in found.decided:
        table: Tensor | None = None
        with agreed(team.ranks, f"collective among ranks {list(team.ranks)}\n{text}") as told:
            told.append(f"sends: {kernel.source.name}")
            if known is None:
                _check_is_not_captured(device, team)
            told.number = handed_out() if _is_possible(found, device, kernel) else _NO_KERNEL
            if known is None and told.number != _NO_KERNEL:
                size = table_words(exchange)
                table = made_to_last(lambda: torch.empty(size, dtype=torch.int64, device=device), device)
        most, words = told.most, slot_words(exchange, device_here(device))
        assert most is not None, "each text is compared once"
        is_full = known is None and most + words > found.words // _SHARE
        found.decided[key] = "some rank has none" if most == _NO_KERNEL or is_full else None
        if known is None and table is not None and found.decided[key] is None:
            hand_out_from(most)
            known = found.regions[line] = made_region(found, words, table, exchange)
    if found.decided[key] is not None:
        return None
    assert known is not None, "its ranks have agreed that there is room"
    kernel.compile(device)
    return known


def _check_is_not_captured(device: torch.device, team: Team) -> None:
    """A region's table is written by a copy that the host waits for, which no capture of a CUDA graph allows."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CapturedCollectiveError(team.ranks)


def _is_possible(found: Arena, device: torch.device, kernel: Kernel) -> bool:
    """Does the kernel compile, where ranks share memory, and does NCCL leave it half of the GPU?"""
    if not is_in_reach(device) or found.room.left() < device_here(device).multiprocessors // 2:
        return False
    try:
        kernel.compile(device)
    except KernelCompileError as error:
        warnings.warn(f"{error}\nNCCL does the collective instead, on all ranks", stacklevel=2)
        return False
    return True
