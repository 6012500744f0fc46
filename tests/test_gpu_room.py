"""How many multiprocessors NCCL may need, by process groups that only say what they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardfuse.config import read_nccl_programs
from shardfuse.mesh import gpu_room
from shardfuse.mesh.gpu_room import GpuRoom

UNDEFINED = -(1 << 31)
"""``NCCL_CONFIG_UNDEF_INT``."""


class Group:
    """Of so many ranks.  most: what its options let NCCL have."""

    def __init__(self, size: int = 2, backend: str = "cpu:gloo,cuda:nccl", most: int | None = UNDEFINED) -> None:
        self.ranks, self.backend, self.most = size, backend, most

    def size(self) -> int:
        return self.ranks

    def _get_backend(self, device: torch.device) -> object:
        if self.most is None:
            raise RuntimeError("it is not made yet")
        return SimpleNamespace(options=SimpleNamespace(config=SimpleNamespace(max_ctas=self.most)))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(pg_map=dict[Group, object](), group_count=0)
    monkeypatch.setattr(c10d, "_world", found)
    monkeypatch.setattr(c10d, "get_backend_config", lambda group: group.backend)
    about = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_each_group_with_other_ranks_has_a_kernel_at_a_time(world: Any) -> None:
    room = GpuRoom(torch.device("cuda", 0))
    assert room.left() == 132
    for group, left in (
        (Group(), 100),
        (Group(1), 100),
        (Group(backend="cpu:gloo"), 100),
        (Group(8, "nccl", None), 68),
        (Group(most=8), 60),
        (Group(most=1000), -4),
    ):
        world.pg_map[group] = None
        assert room.left() == left
    assert room.groups == 4


def test_groups_are_counted_anew_once_there_are_others(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one took the place of another; and not in every call."""
    room, counted = GpuRoom(torch.device("cuda", 0)), list[int]()
    whole = gpu_room.programs_of_groups

    def count(groups: Any, most: int) -> list[int]:
        counted.append(len(groups))
        return whole(groups, most)

    monkeypatch.setattr(gpu_room, "programs_of_groups", count)
    world.pg_map[Group()] = None
    assert [room.left(), room.left()] == [100, 100]
    world.pg_map = {Group(1): None}
    world.group_count += 1
    assert [room.left(), room.left()] == [132, 132]
    assert counted == [1, 1]


def test_what_the_environment_says_goes_before_the_options_of_a_group(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least of its variables."""
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    world.pg_map |= {Group(): None, Group(most=4): None}
    assert GpuRoom(torch.device("cuda", 0)).left() == 132 - 2 * 16
    assert read_nccl_programs({"NCCL_MAX_CTAS": "16", "NCCL_MAX_NCHANNELS": "8"}) == 8
    assert read_nccl_programs({"NCCL_MAX_CTAS": "-1", "NCCL_MAX_NRINGS": "many"}) is None


def test_other_gpus_may_have_as_many_programs_as_nccl_ever_makes(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(multi_processor_count=148, major=10, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    world.pg_map[Group()] = None
    assert GpuRoom(torch.device("cuda", 0)).left() == 148 - 64


def test_on_a_cpu_there_is_always_room() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert GpuRoom(torch.device("cpu")).left() > 1 << 16
    finally:
        dist.destroy_process_group()
