"""Teams of ranks and their process groups: the one place that makes torch.distributed groups."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store  # torch.distributed has it untyped
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from shardfuse.errors import NotInitializedError, RankNotInMeshError, TeamRanksError
from shardfuse.mesh.captured import instances, reset_graphs
from shardfuse.rank_errors import UnknownGroupError


@dataclass(frozen=True)
class Team:
    """Ranks that communicate, in order, and this rank's place among them.

    ranks: global ranks; their order is that of the pieces of a sharded axis, not necessarily ascending.
    index: this rank's place in `ranks`.
    """

    ranks: tuple[int, ...]
    index: int

    @classmethod
    def of(cls, ranks: Sequence[int], rank: int | None = None) -> Team:
        """The team of these ranks as seen by `rank` (this process's rank where left out).

        Raises TeamRanksError for repeated ranks and RankNotInMeshError where `rank` is not among them.
        """
        ranks = tuple(ranks)
        rank = current_rank() if rank is None else rank
        if len(set(ranks)) != len(ranks):
            raise TeamRanksError(ranks)
        if rank not in ranks:
            raise RankNotInMeshError(rank, f"the team {list(ranks)}")
        return cls(ranks, ranks.index(rank))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's global number."""
        return self.ranks[self.index]

    @cached_property
    def group_order(self) -> tuple[int, ...]:
        """For every member of the process group, which is in ascending order, its place in the team."""
        return tuple(self.ranks.index(rank) for rank in sorted(self.ranks))

    @cached_property
    def is_in_order(self) -> bool:
        """Is the process group's order the team's?"""
        return list(self.group_order) == list(range(self.size))

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """What each member gave, in the process group's order, in the team's: that of replicas in other groups too."""
        if self.is_in_order:
            return rows
        return rows[[self.group_order.index(place) for place in range(self.size)]]


def current_rank() -> int:
    """This process's rank; 0 without a default process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


# Keyed by the default group's object, which is a thread's own under the threaded test process group and a new one
# after each initialisation: a group never outlives the world it was made in.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
_groups_lock = threading.Lock()


def process_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The process group of these ranks, in ascending order; made at the first call, then kept.

    Only the members take part. The first call for some ranks is collective among them and, as every
    collective, has to come in an order that all members share. The whole world is the default group.
    Raises NotInitializedError.
    """
    default = default_group()
    members = tuple(sorted(ranks))
    if len(members) == default.size():
        return default
    with _groups_lock:
        known = _groups.setdefault(default, {})
    group = known.get(members)
    if group is None:
        group = known[members] = _new_group(default, members)
    return group


def ranks_of_group(name: str) -> tuple[int, ...]:
    """The ranks of the process group that torch knows by ``name``, in its order, as functional collectives name it.

    Raises NotInitializedError and UnknownGroupError.
    """
    default_group()
    try:
        group = cast("Any", c10d)._resolve_process_group(name)
    except (KeyError, RuntimeError, ValueError):
        raise UnknownGroupError(name) from None
    return tuple(dist.get_process_group_ranks(group))


def groups_here() -> dict[str, tuple[int, ...]]:
    """The ranks of each process group that this rank is in, in its order, by the name that torch knows it by."""
    if not dist.is_initialized():
        return {}
    names: dict[dist.ProcessGroup, str] = dict(cast("Any", c10d)._world.pg_names)
    return {name: tuple(dist.get_process_group_ranks(group)) for group, name in names.items()}


def destroy_groups() -> None:
    """Destroy the default process group and all others, and let go of them: that is what closes gloo's connections.

    What the caller holds of them, as in a variable, stays open until the process ends; but for CUDA graphs, which are
    reset where NCCL would wait for them.
    """
    with _groups_lock:
        _groups.pop(default_group(), None)
    gc.unfreeze()  # or the collector would not tell of what the caller has put aside
    objects = gc.get_objects()
    _empty_torch_meshes(objects)
    backends: dict[object, str] = cast("Any", c10d)._world.pg_backend_config
    if torch.cuda.is_initialized() and any("nccl" in backend for backend in backends.values()):
        reset_graphs(objects)
    del objects  # which hold the groups
    _forget_as_default(default_group())
    dist.destroy_process_group()


def _empty_torch_meshes(objects: Sequence[object]) -> None:
    """Empty what meshes of torch's hold of their groups, since they live as long as the DTensors on them.

    torch 2.13 holds them for torch.compile alone and finds them by name otherwise; 2.11 holds none. Whoever made a
    mesh, only the collector of garbage knows them all.
    """
    for mesh in instances(TorchDeviceMesh, objects):
        cast("dict[str, object]", getattr(mesh, "_pg_registry", {})).clear()


def _forget_as_default(group: dist.ProcessGroup) -> None:
    """Take it out of the default arguments of torch.distributed.nn's functions.

    They are ``group=dist.group.WORLD``: the group that there is when DTensor imports that module, at its first use.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        defaults = function.__defaults__ if isinstance(function, FunctionType) else None
        if defaults is not None and any(value is group for value in defaults):
            function.__defaults__ = tuple(None if value is group else value for value in defaults)


def keep_groups_for_ever() -> None:
    """In a forked process: never run the destructors of the parent's process groups and stores, not even at its end.

    They join threads that only the parent has, which takes for ever, and close connections that are the parent's.
    """
    world = cast("Any", c10d)._world
    for group, (_, store) in dict(world.pg_map).items():
        keep_for_ever(group, store)


def keep_for_ever(*objects: object) -> None:
    """Have an object outlive even the interpreter's end, which empties every module."""
    for kept in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def default_group() -> dist.ProcessGroup:
    """The default process group. Raises NotInitializedError where there is none."""
    if not dist.is_initialized():
        raise NotInitializedError("communication between ranks")
    return cast("dist.ProcessGroup", dist.group.WORLD)


def default_store() -> Store:
    """The store through which the default process group was formed. Raises NotInitializedError."""
    default_group()
    return cast("Any", c10d)._get_default_store()


def default_timeout() -> timedelta | None:
    """How long the default group's collectives wait; None where its backend (a test's) does not tell."""
    return _told_timeout(default_group())


def world_key() -> tuple[int, int]:
    """This rank, and a number that each default process group of the process has of its own (0 without one)."""
    group = _c10d._world.default_pg  # what dist.group.WORLD is, by one property instead of two
    if group is None:
        return 0, 0
    if _seen.group is None or _seen.group() is not group:
        with _groups_lock:
            number = _numbers.setdefault(group, next(_counter))
        _seen.group, _seen.key = ref(group), (group.rank(), number)
    return _seen.key


_c10d = cast("Any", c10d)


class _Seen(threading.local):
    """The default group that this thread saw last: `world_key` stands on the way of every call."""

    group: ref[dist.ProcessGroup] | None = None
    key: tuple[int, int] = (0, 0)


_seen = _Seen()
_numbers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_counter = count(1)


def stages_through_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True where the group moves this device's tensors by gloo, which lacks most collectives on a GPU."""
    if device.type == "cpu":
        return False
    return "nccl" not in c10d.get_backend_config(group)


_counted_too: WeakKeyDictionary[dist.ProcessGroup, Callable[[], int]] = WeakKeyDictionary()


def count_too(group: dist.ProcessGroup, count: Callable[[], int]) -> None:
    """Add what `count` gives to the collectives that this rank has issued in the group: those that torch knows not."""
    _counted_too[group] = count


EXCHANGES = "exchanges in kernels"
"""How names begin under which `group_sequences` has launches of kernels in which ranks wait for one another."""
_exchanges: WeakKeyDictionary[dist.ProcessGroup, Callable[[], Mapping[tuple[int, ...], int]]] = WeakKeyDictionary()


def count_exchanges(group: dist.ProcessGroup, launches: Callable[[], Mapping[tuple[int, ...], int]]) -> None:
    """Have `group_sequences` tell how many kernels this rank has launched in which these ranks of the group wait."""
    _exchanges[group] = launches


def group_sequences() -> dict[str, tuple[tuple[int, ...], int]]:
    """For every process group of this rank: its members and the number of collectives that this rank has issued."""
    world = cast("Any", c10d)._world
    names: dict[dist.ProcessGroup, str] = dict(world.pg_names)
    ranks: dict[dist.ProcessGroup, dict[int, int]] = dict(world.pg_group_ranks)
    found = {
        name: (tuple(ranks[group]), cast("Any", group)._get_sequence_number_for_group() + _counted(group))
        for group, name in names.items()
        if group in ranks
    }
    for group, launches in tuple(_exchanges.items()):
        if group in ranks:
            found |= {f"{EXCHANGES} of {members}": (members, count) for members, count in launches().items()}
    return found


def name_of_group(group: dist.ProcessGroup) -> str:
    """The name that all of its ranks know it by, under which `group_sequences` has it."""
    names: dict[dist.ProcessGroup, str] = cast("Any", c10d)._world.pg_names
    return names.get(group, "")


def _counted(group: dist.ProcessGroup) -> int:
    count = _counted_too.get(group)
    return 0 if count is None else count()


def _new_group(default: dist.ProcessGroup, members: tuple[int, ...]) -> dist.ProcessGroup:
    """`torch.distributed.new_group` for the members alone, under a name that they agree on.

    new_group(use_local_synchronization=True) names a group after its ranks *and the number of groups that the
    process has made before*, which differs between ranks, and then waits for ever; without it the whole world has
    to take part. Hence its own two steps here, with a name of the ranks alone (torch 2.11 to 2.13).
    """
    internal = cast("Any", c10d)
    world = internal._world
    backend, store = world.pg_map[default]
    rank = members.index(default.rank())
    # A bound device makes torch split the default communicator, which needs all of the world's ranks.
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        group, _ = internal._new_process_group_helper(
            len(members),
            rank,
            list(members),
            dist.Backend(backend),
            store,
            "shardfuse_" + "_".join(map(str, members)),
            timeout=_told_timeout(default) or c10d.default_pg_timeout,
        )
    finally:
        default.bound_device_id = bound
    world.pg_group_ranks[group] = {member: i for i, member in enumerate(members)}
    return cast("dist.ProcessGroup", group)


def _told_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long the group's collectives wait; None where its backend (a test's) does not tell."""
    for device in cast("Any", group)._device_types:
        options = getattr(cast("Any", group)._get_backend(device), "options", None)
        if options is not None:
            return cast("timedelta", options._timeout)
    return None
