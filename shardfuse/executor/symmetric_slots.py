"""What a program that exchanges words inside of its kernels has of the arena, and how its kernels are launched.

A region has slots at the same offset on each rank of a line of a mesh, for all kernels whose ranks exchange along it:
words of a kernel that are still there are those of an earlier launch.  A line is a dimension of a mesh of the same
ranks in the same shape, whatever its dimensions are named.  A kernel that takes more than there is has another region
made, of as many words as the next power of two: the largest takes less than twice what the largest kernel needs, and
all of them together less than four times that (8192 words and then 8193 take 8192 + 16384).  Kernels that send whole
rows have slots for each program of their grid, which all that have the same of them share.

Ranks of a program may have handed out more or less to programs of other ranks: before they make one, each tells how
much, and slots begin where the one that has handed out most goes on (``frontend/exchanges.py``).  There all have as
much left, so that they decide alike whether there is room, once for all programs of the same text, and take the slots.
They compare offsets before the first run, and what a program takes after that which is not agreed on is taken back.

Launches of all regions follow one another, replays of CUDA graphs among them (``mesh/launch_order.py``), and take no
multiprocessors that NCCL may need beside them (``mesh/gpu_room.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..codegen.claims import programs_at_once, within
from ..codegen.mesh_exchange import Reported, row_elements, slots_of, table, table_words
from ..mesh import DeviceMesh, ParallelType
from ..mesh.groups import current_rank
from ..mesh.symmetric import Arena, arena
from ..rank_errors import ExchangeTimeoutError
from ..schedulers.plan import KernelPlan, RankExchange
from .comparison import digest
from .kept_tensors import made_to_last
from .kernel import Argument, Kernel, Launch
from .launch import index_of
from .options import CompileOptions

_LINE = 16
"""Words: two regions share no line of memory."""
_LEAST = 1 << 13
"""Words of a region at the least: 64 KB are the statistics of 1000 rows of a softmax on two ranks."""

Tables = Mapping[Hashable, torch.Tensor]
"""Memory for the tables of regions that are to be made, by their keys."""
_NO_TABLES: Tables = {}


@dataclass(eq=False)
class Region:
    """``offset``, ``words``: of its slots.  ``table``: what its kernels are given, see ``codegen/mesh_exchange.py``.

    ``ranks``: that wait for one another in them, ascending.
    """

    arena: Arena
    offset: int
    words: int
    table: torch.Tensor
    ranks: tuple[int, ...]

    def launcher(self, kernel: Kernel, exchange: RankExchange) -> Launch:
        """Of ``kernel``, with the table before its arguments, on as many multiprocessors as are left.

        It raises ExchangeTimeoutError once a wait was in vain.
        """
        driver, device = kernel.driver, self.arena.device
        address = self.table.data_ptr() if device.type == "cuda" else self.table  # of which the interpreter asks more
        told, order, ranks, room = self.arena.told, self.arena.order, self.ranks, self.arena.room
        launches = dict[int, tuple[Launch, ...]]()

        def launch_exchanging(stream: int | None, *arguments: Argument) -> None:
            if told.value:
                self.arena.is_raised = True
                raise lost(self.arena)
            left = room.left()
            here = launches.get(left)
            is_less = here is None and bool(launches) and left < min(launches)
            if here is None:
                here = launches[left] = tuple(kernel.launcher_of(s) for s in within(kernel.source, exchange, left))
            is_marked = order.follow(stream, ranks)
            try:
                for launch in here:
                    launch(stream, address, *arguments)
            finally:  # what comes next follows also what was launched before one was refused
                if is_marked:
                    order.ended(stream)
            if is_less:  # behind the launch, which other ranks wait for: a warning may be an error
                self._warn_of_groups(left, exchange)

        if driver is None or isinstance(address, torch.Tensor):
            return launch_exchanging
        index, count = index_of(device), order.count_of(ranks)
        return driver.ordered(order.state, count, told, index, address, room, launches, launch_exchanging)

    def _warn_of_groups(self, left: int, exchange: RankExchange) -> None:
        """Process groups were made since a kernel was launched last, with which NCCL may need more of the GPU."""
        many = f"{self.arena.room.groups} process groups may have kernels of NCCL on {self.arena.device} at a time"
        if left < exchange.members:
            text = f"{many}, which leaves no room for those of shardfuse: make process groups before the first call"
            warnings.warn(f"{text}, or set NCCL_MAX_CTAS", stacklevel=4)
        elif self.arena.order.state.is_captured:
            text = f"{many}, more than when a CUDA graph was captured: capture it after process groups are made"
            warnings.warn(text, stacklevel=4)


def why_no_exchange(ranks: Sequence[int], options: CompileOptions) -> str | None:
    """Why programs of ``ranks`` exchange nothing inside of kernels; ``None`` where they do.

    "" where that goes without saying: where no kernels are made, and without GPUs.
    """
    if len(ranks) < 2 or options.backend == "torch":
        return ""
    found = arena()
    if isinstance(found, str):
        return "" if options.interpret else found
    return "SHARDFUSE_EXCHANGE=nccl" if options.exchange == "nccl" else None


def why_out_of_reach(mesh: DeviceMesh, parallel_type: ParallelType) -> str | None:
    """Why ranks along a dimension of ``mesh`` do not reach each other's memory; ``None`` where all do.

    The same on all ranks of the world.
    """
    reasons = (why_not_together(mesh.team(rank, parallel_type)) for rank in mesh.ranks)
    return next((reason for reason in reasons if reason is not None), None)


def why_not_together(ranks: Sequence[int]) -> str | None:
    """Why these ranks do not reach each other's memory; ``None`` where all do."""
    found = arena()
    if isinstance(found, str):
        return found
    hosts = {found.hosts.get(rank) for rank in ranks}
    return f"ranks {list(ranks)} do not reach each other's memory" if len(hosts) > 1 or None in hosts else None


def hosts_of(ranks: Sequence[int]) -> tuple[str | None, ...]:
    """By which a plan has exchanges in kernels or not: a definition may outlive a world.  Nothing without an arena."""
    found = arena()
    return () if isinstance(found, str) else tuple(found.hosts.get(rank) for rank in ranks)


def handed_out() -> int:
    """Words of the arena that this rank's programs have; 0 without one."""
    found = arena()
    return 0 if isinstance(found, str) else found.used


def hand_out_from(offset: int) -> None:
    """What is handed out next begins there, or behind."""
    found = _shared()
    found.used = max(found.used, offset)


def decide(text: str, why: str | None, plans: Sequence[KernelPlan] = (), tables: Tables = _NO_TABLES) -> None:
    """Note, as its ranks have agreed, why the program of ``text`` has collectives, for all that are of that text.

    why: ``None`` where ``plans``, its kernels, have their slots from now on, or collectives where there is no room.
    tables: what ``tables_for`` has made of the plans.  With them nothing is allocated here, where a rank that fails
    would be alone with that.
    """
    found = _shared()
    why = room(plans) if why is None else why
    if why is None:
        for plan in plans:
            region_of(plan, tables)
    found.decided[digest(text)] = why


def is_decided(text: str) -> bool:
    """Have the ranks of the program of ``text`` agreed on whether its kernels exchange?"""
    found = arena()
    return not isinstance(found, str) and digest(text) in found.decided


def why_refused(text: str) -> str | None:
    """Why the program of ``text`` has collectives, as its ranks have agreed; ``None`` where its kernels exchange."""
    found = arena()
    return None if isinstance(found, str) else found.decided.get(digest(text))


def device_in_reach() -> torch.device | None:
    """The one of this rank whose kernels reach what ranks share; ``None`` where ranks share nothing."""
    found = arena()
    return None if isinstance(found, str) else found.device


def is_in_reach(device: torch.device) -> bool:
    """Do kernels on ``device`` reach what its ranks share?  Of the GPUs of a process, one does."""
    found = device_in_reach()
    if found is None or found.type != device.type:
        return False
    return device.type != "cuda" or index_of(found) == index_of(device)


def room(plans: Sequence[KernelPlan]) -> str | None:
    """Why the arena has no room for the slots of a program's kernels; ``None`` where it has."""
    found = arena()
    if isinstance(found, str):
        return found
    wanted = sum(words for words, _ in _new_regions(found, plans).values())
    if found.used + wanted <= found.words:
        return None
    left = f"of symmetric memory {(found.words - found.used) * 8} bytes are left"
    return f"it takes {wanted * 8} bytes, {left}: SHARDFUSE_EXCHANGE_MEMORY gives more"


def tables_for(plans: Sequence[KernelPlan]) -> Tables:
    """Memory for the tables of the regions that a program's kernels do not find, before it is known where these are.

    A rank that has none left says so to the others, which wait to know whether it has.
    """
    found = _shared()

    def make() -> dict[Hashable, torch.Tensor]:
        new = _new_regions(found, plans).items()
        return {
            key: torch.empty(table_words(_exchange_of(p)), dtype=torch.int64, device=found.device)
            for key, (_, p) in new
        }

    # the first call may be within the pool of CUDA graph trees
    return made_to_last(make, found.device)


def _new_regions(found: Arena, plans: Sequence[KernelPlan]) -> dict[Hashable, tuple[int, KernelPlan]]:
    """The regions that ``plans`` do not find: the words of each, and the first kernel that takes it."""
    known, new = {key: region.words for key, region in _regions_of(found).items()}, dict[Hashable, Any]()
    for plan in plans:
        key, words = _key(known, plan)
        if key not in known:
            known[key], new[key] = words, (words, plan)
    return new


def is_crowded(plans: Sequence[KernelPlan]) -> bool:
    """Does NCCL need so many multiprocessors of this rank's GPU that a kernel would have less than half of them?"""
    found = _shared()
    return any(found.room.left() < min(programs_at_once(p), p.device.multiprocessors // 2) for p in plans)


def region_of(plan: KernelPlan, tables: Tables = _NO_TABLES) -> Region:
    """The region of a kernel, found or made; there is room.  tables: memory for its table, where that is there."""
    found, exchange = _shared(), _exchange_of(plan)
    known = _regions_of(found)
    key, words = _key({key: region.words for key, region in known.items()}, plan)
    region = known.get(key)
    if region is None:
        table = tables[key] if key in tables else tables_for([plan])[key]
        region = known[key] = made_region(found, words, table, exchange)
    return region


def made_region(found: Arena, words: int, table: torch.Tensor, exchange: RankExchange) -> Region:
    """The next ``words`` of the arena as slots of the ranks of ``exchange``; ``table`` is written."""
    assert found.used + words <= found.words, "its ranks have agreed that there is room"
    ranks = tuple(sorted(exchange.mesh.team(current_rank(), exchange.parallel_type)))
    table.copy_(torch.tensor(_entries(found, found.used, words, exchange), dtype=torch.int64, device="cpu"))
    region = Region(found, found.used, words, table, ranks)
    found.used += words
    found.loss = lambda: lost(found) if found.told.value else None
    return region


def offsets(plans: Sequence[tuple[int, KernelPlan]]) -> list[str]:
    """Where the regions of a program are, which its ranks have to have alike."""
    return [f"segment {k} exchanges words at {region_of(plan).offset}" for k, plan in plans]


@contextmanager
def taken_back_on_failure() -> Generator[None]:
    """What the body takes of the arena is free again where it raises, as it does on every rank."""
    found = arena()
    if isinstance(found, str):
        yield
        return
    used, regions = found.used, dict(found.regions)
    try:
        yield
    except BaseException:
        found.used, found.regions = used, regions
        raise


def _shared() -> Arena:
    """Where ranks have told what they have of it, there is one."""
    found = arena()
    assert not isinstance(found, str), "it was asked for"
    return found


def _exchange_of(plan: KernelPlan) -> RankExchange:
    assert plan.exchange is not None, "a kernel whose ranks exchange"
    return plan.exchange


def _regions_of(within: Arena) -> dict[Hashable, Region]:
    return cast("dict[Hashable, Region]", within.regions)


def lost(within: Arena) -> ExchangeTimeoutError:
    """What a kernel reported."""
    reported = Reported.of(within.told.value & (2**64 - 1))
    assert reported is not None, "it was seen"
    return ExchangeTimeoutError(within.rank, reported.name - 1, reported.row, reported.epoch, within.timeout)


def _key(known: Mapping[Hashable, int], plan: KernelPlan) -> tuple[Hashable, int]:
    """Which region a kernel has, and its words: of those ``known`` that are large enough the smallest, or a new one."""
    exchange = _exchange_of(plan)
    mesh, words = exchange.mesh, slots_of(plan)
    line = (mesh.shape, mesh.ranks, exchange.parallel_type)  # whatever its dimensions are named
    if exchange.is_in_rows:
        return (*line, exchange.programs, row_elements(plan)), -(-words // _LINE) * _LINE
    size = max(_LEAST, 1 << (words - 1).bit_length())
    fitting = [w for key, w in known.items() if key == (*line, w) and w >= size]
    size = min(fitting, default=size)
    return (*line, size), size


def _entries(within: Arena, offset: int, words: int, exchange: RankExchange) -> list[int]:
    """What stands in the table of a region."""
    team = exchange.mesh.team(current_rank(), exchange.parallel_type)
    position, report = team.index(within.rank), within.report.data_ptr()
    if exchange.is_in_rows:  # by the distance behind this rank
        team = (*team[position:], *team[:position])
    slots = [within.addresses[rank] + 8 * offset for rank in team]
    names = [rank + 1 for rank in team]
    return table(exchange, within.timeout, report, position, words, slots, names)
