"""What the driver is asked for around a launch that waits for other GPUs: by C, and by Python where that does it."""

from __future__ import annotations

import ctypes
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from exchange_cases import PARTIAL, NotedKernel, define, kernel_of, plan_of
from test_driver import COMPILER, Fake, aligned
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardfuse import DataType
from shardfuse.codegen.source import KernelSource
from shardfuse.errors import KernelLaunchError
from shardfuse.executor.driver import Driver
from shardfuse.executor.kernel import Launch
from shardfuse.executor.symmetric_slots import Region
from shardfuse.mesh import gpu_room, peer_memory
from shardfuse.mesh.launch_order import LaunchOrder
from shardfuse.mesh.symmetric import Arena
from shardfuse.rank_errors import ExchangeTimeoutError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

BF16 = DataType.BFloat16
GPU = torch.device("cuda", 3)
RANKS = (0, 1)
GRID = 90


class FakeKernel:
    """What is launched: a table, two tensors, a number, and the integers of its source."""

    def __init__(self, fake: Fake, source: KernelSource, *, is_in_c: bool) -> None:
        self.fake, self.source = fake, source
        self.driver: Driver | None = fake.driver if is_in_c else None
        self.through_triton = list[tuple[object, ...]]()

    def launcher_of(self, source: KernelSource) -> Launch:
        def failed(message: str) -> NoReturn:
            raise KernelLaunchError("kernel", message, source.grid, 128, 64)

        def otherwise(*given: object) -> None:
            self.through_triton.append(given)

        numbers = "q" * len(source.integers)
        return self.fake.driver.launcher(
            4096, 3, source.grid, 128, 64, False, "www", "q", numbers, source.integers, otherwise, failed
        )


class World:
    """A GPU that runs nothing, with streams 0 to 9, of which one is the current one."""

    def __init__(self, fake: Fake, monkeypatch: pytest.MonkeyPatch, *, is_in_c: bool, kind: str = "rms_norm") -> None:
        self.fake, self.current, self.slow, self.is_in_c = fake, 0, 0, is_in_c
        self.captures = (ctypes.c_int * 64).in_dll(fake.symbols, "captures")
        self.captures[:] = [0] * 64
        for name in ("status", "asked_status", "wait_status", "record_status", "exchanged_mode", "made_events"):
            fake[name] = 0
        ctypes.c_uint64.in_dll(fake.symbols, "context").value = 1
        ctypes.c_uint64.in_dll(fake.symbols, "wanted_slots").value = 4
        monkeypatch.setattr(peer_memory, "_driver", lambda: fake.symbols)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream(self.current))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(self.captures[self.current]))
        about = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
        monkeypatch.setattr(gpu_room, "programs_of_groups", lambda groups, most: [most] * (len(groups) - 1))
        self.arena = Arena(GPU, 0, {0: 1 << 20, 1: 1 << 21}, 1 << 20, 5.0, torch.zeros(1, dtype=torch.int64))
        follow = self.arena.order.follow

        def followed(stream: int | None, ranks: tuple[int, ...]) -> bool:
            self.slow += 1
            return follow(stream, ranks)

        monkeypatch.setattr(self.arena.order, "follow", followed)
        self.table, self.given = aligned(), (aligned(), aligned(), 5)
        plan = kernel_of(plan_of(define(kind, 8192, 2, BF16), GRID))
        self.kernel = FakeKernel(fake, NotedKernel(plan).source, is_in_c=is_in_c)
        self.region = Region(self.arena, 0, 64, self.table, RANKS)
        self.launcher: Callable[..., None] = self.region.launcher(self.kernel, plan.rank_exchange)  # type: ignore[arg-type]

    @property
    def order(self) -> LaunchOrder:
        return self.arena.order

    @property
    def count(self) -> int:
        return self.order.launches().get(RANKS, 0)

    def stream(self, handle: int) -> SimpleNamespace:
        """Equal to another of the same handle."""
        return SimpleNamespace(cuda_stream=handle, wait_stream=lambda other: None)

    def launch(self, stream: int, *given: object, is_hooked: bool = False) -> list[str]:
        """What the driver was asked for."""
        self.current = stream
        self.fake.symbols.forget()
        self.launcher(None if is_hooked else stream, *(given or self.given))
        return self.noted()

    def noted(self) -> list[str]:
        return (
            ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(self.fake.symbols, "noted"))).decode().splitlines()
        )

    def slow_ones(self) -> int:
        """Launches since the last question that Python has ordered."""
        found, self.slow = self.slow, 0
        return found

    def is_first(self, handle: int = 0) -> None:
        """One launch, for which its kernel is bound."""
        self.launch(handle)
        self.slow = 0


@pytest.fixture(scope="module")
def module_fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return Fake(tmp_path_factory.mktemp("ordered"))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


Make = Callable[..., World]


@pytest.fixture
def make(module_fake: Fake, group: None, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda is_in_c=True, kind="rms_norm": World(module_fake, monkeypatch, is_in_c=is_in_c, kind=kind)


@pytest.fixture(params=[True, False], ids=["C", "Python"])
def world(request: pytest.FixtureRequest, make: Make) -> World:
    return make(request.param)


LAUNCH = f"launch {{}} of {GRID}"


def ordered(stream: int, *, waits: bool = True) -> list[str]:
    """Of a launch behind which an event is recorded."""
    return [*[f"wait {stream}"] * waits, LAUNCH.format(stream), f"record {stream}"]


def slow(world: World, count: int) -> bool:
    """Has Python ordered so many of the launches since the last question, where C does the others?"""
    found = world.slow_ones()
    return found == count if world.is_in_c else found >= count


def test_on_the_default_stream_alone_there_is_nothing_but_the_launch(world: World) -> None:
    assert [world.launch(0) for _ in range(3)] == [[LAUNCH.format(0)]] * 3
    assert slow(world, 1)
    assert world.count == 3
    assert world.fake["made_events"] == 0
    assert world.fake.slots(4) == [world.table.data_ptr(), *(t.data_ptr() for t in world.given[:2]), 5]


def test_another_stream_waits_once_and_records_each_time(world: World) -> None:
    world.is_first()
    assert world.launch(7) == ["record 0", *ordered(7)]  # which makes the event
    assert slow(world, 1)
    assert [world.launch(k) for k in (7, 7, 8, 0, 0)] == [
        ordered(7, waits=False), ordered(7, waits=False), ordered(8), ordered(0), ordered(0, waits=False)
    ]  # fmt: skip
    assert slow(world, 0)
    assert world.count == 7
    assert world.fake["exchanged_mode"] == 0, "the thread's mode is as it was"


def test_a_first_launch_on_another_stream(world: World) -> None:
    assert world.launch(7) == ordered(7)  # for an event that no stream has recorded
    assert world.launch(7) == ordered(7, waits=False)
    assert slow(world, 1)


def test_after_a_capture_each_launch_waits(world: World) -> None:
    """For a replay that may have come between, on whatever stream."""
    world.is_first()
    world.captures[7] = 3
    captured = ["record 0", "wait 7 in each launch", LAUNCH.format(7), "node of event 1"]
    assert world.launch(7) == captured
    assert world.launch(7) == [LAUNCH.format(7), "node 40 behind"]
    assert slow(world, 2)
    assert world.count == 1, "what is captured has not run"
    world.captures[7] = 0
    assert [world.launch(k) for k in (7, 7, 0, 0)] == [ordered(7), ordered(7), ordered(0), ordered(0)]
    assert slow(world, 0)
    assert world.count == 5


def test_while_another_stream_is_captured_calls_go_on(world: World) -> None:
    """By this thread, as a graph of one branch, and by others in a mode that allows nothing else."""
    world.is_first(7)
    world.captures[8] = 3
    world.launch(8)
    assert slow(world, 1)
    assert [world.launch(k) for k in (7, 7, 0)] == [ordered(7), ordered(7), ordered(0)]
    assert slow(world, 0)
    assert world.launch(8) == [LAUNCH.format(8), "node 40 behind"]
    assert slow(world, 1)


def test_a_misaligned_tensor_goes_through_tritons_own_entry_in_the_same_order(world: World) -> None:
    world.is_first(7)
    odd = aligned(8)
    assert world.launch(8, odd, world.given[1], 6) == ["wait 8", "record 8"]
    ((table, *given),) = world.kernel.through_triton
    assert table == world.table.data_ptr()
    assert given[0] is odd
    assert (given[1], given[2]) == (world.given[1], 6)
    assert slow(world, 1)
    assert world.launch(8) == ordered(8, waits=False)
    assert world.count == 3


def test_hooked_launches_go_through_tritons_own_entry_in_the_same_order(world: World) -> None:
    world.is_first(7)
    assert world.launch(8, is_hooked=True) == ["wait 8", "record 8"]
    assert len(world.kernel.through_triton) == 1
    assert slow(world, 1)
    assert world.launch(8) == ordered(8, waits=False)


def test_behind_a_refused_launch_the_event_is_recorded(world: World) -> None:
    """What comes next follows also what was launched before."""
    world.is_first(7)
    world.fake["status"] = 720
    with pytest.raises(KernelLaunchError, match="too many blocks in cooperative launch"):
        world.launch(8)
    assert world.noted() == ["wait 8", f"refuse 8 of {GRID}", "record 8"]
    world.fake["status"] = 0
    assert world.launch(8) == ordered(8, waits=False)
    assert world.count == 3
    assert slow(world, 0)


def test_a_wait_that_the_driver_refuses_is_followed_by_no_launch(world: World) -> None:
    world.is_first(7)
    world.fake["wait_status"] = 5
    with pytest.raises(RuntimeError, match="cuStreamWaitEvent: it is refused"):
        world.launch(8)
    assert world.noted() == ["wait 8"]
    world.fake["wait_status"] = 0
    assert world.launch(8) == ordered(8), "it has not waited yet"


def test_a_record_that_the_driver_refuses_is_told(world: World) -> None:
    world.is_first(7)
    world.fake["record_status"] = 5
    with pytest.raises(RuntimeError, match="cuEventRecord: it is refused"):
        world.launch(7)
    assert world.fake["exchanged_mode"] == 0


def test_a_report_ends_launches(world: World) -> None:
    world.is_first(7)
    world.arena.report[0] = 3 << 32 | 37 << 10 | 2
    with pytest.raises(ExchangeTimeoutError, match="rank 1 did not send its part of row 37 within 5 s, in launch 3"):
        world.launch(7)
    assert world.arena.is_raised
    assert world.noted() == []
    assert world.count == 1


def test_new_process_groups_are_seen_by_the_next_launch(world: World) -> None:
    """With fewer multiprocessors left for this one; once they are gone it is as before."""
    world.is_first(7)
    others = [dist.new_group([0, 1]) for _ in range(2)]
    assert world.launch(7) == ["launch 7 of 68", "record 7"]
    assert slow(world, 1)
    assert world.launch(7) == ["launch 7 of 68", "record 7"]
    assert slow(world, 0)
    dist.destroy_process_group(others.pop())
    assert world.launch(7) == ordered(7, waits=False)
    assert slow(world, 1)
    others.append(dist.new_group([0, 1]))  # as many as there were
    assert world.launch(7) == ["launch 7 of 68", "record 7"]
    assert slow(world, 0), "its kernel is known"
    for other in others:
        dist.destroy_process_group(other)


@pytest.mark.parametrize("is_in_c", [True, False], ids=["C", "Python"])
def test_several_launches_of_one_kernel(is_in_c: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its slots are the programs' own: each with the next ones, between one wait and one record."""
    world = make(is_in_c, PARTIAL)
    world.is_first(7)
    monkeypatch.setattr(world.arena.room, "left", lambda: 36)
    ctypes.c_uint64.in_dll(world.fake.symbols, "wanted_slots").value = 6
    for count in (1, 0):
        assert world.launch(8) == [*["wait 8"] * count, *(f"launch 8 of {n}" for n in (36, 36, 18)), "record 8"]
        assert slow(world, count)
        assert world.fake.slots(6)[3:] == [5, GRID, 72]
    world.fake["status"] = 720
    with pytest.raises(KernelLaunchError):
        world.launch(8)
    assert world.noted() == ["refuse 8 of 36", "record 8"]
    assert world.count == 4


def test_a_thread_without_a_context_gets_that_of_the_device(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(world.fake.symbols, "cuDeviceGet", lambda *given: 0, raising=False)
    world.is_first(7)
    world.fake.symbols.leave()
    world.launch(7)
    assert world.noted()[-2:] == ordered(7, waits=False)
    assert slow(world, 0)


def test_where_the_driver_does_not_tell_of_captures_torch_is_asked(world: World) -> None:
    world.is_first(7)
    world.fake["asked_status"] = 700
    assert world.launch(7) == ordered(7, waits=False)
    assert slow(world, 1)


def test_arguments_that_are_none(world: World) -> None:
    world.is_first(7)
    a, b, _ = world.given
    for given, error in (((a, b), TypeError), ((a, b, 0.5), TypeError), ((0.5, b, 5), AttributeError)):
        with pytest.raises(error):
            world.launch(7, *given)
        assert not any(line.startswith("launch") for line in world.noted())
    with pytest.raises(TypeError):
        world.launcher()
    assert world.launch(7)[-2:] == ordered(7, waits=False)


def test_what_can_be_no_state_and_no_launch(make: Make) -> None:
    world = make()
    order, room, word = world.order, world.arena.room, ctypes.c_int64()
    given = (3, 16, room, {}, world.launcher)
    with pytest.raises(ValueError, match="a state of 24 bytes, and two words"):
        world.fake.driver.ordered(word, word, word, *given)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        world.fake.driver.ordered(order.state, word, b"constant", *given)  # type: ignore[arg-type]
    for wrong in ((print,), (), print):
        made = world.fake.driver.ordered(order.state, word, ctypes.c_int64(), 3, 16, room, {100: wrong}, world.launcher)  # type: ignore[dict-item]
        room.left = lambda: 100  # type: ignore[method-assign]
        with pytest.raises(TypeError, match="is no"):
            made(0, *world.given)


def test_whatever_comes_both_ways_ask_the_driver_for_the_same(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences of launches, captures, failures and process groups, by C and by Python."""
    for seed in range(60):
        found = [list(steps(make(is_in_c), random.Random(seed))) for is_in_c in (True, False)]
        assert found[0] == found[1], f"seed {seed}"


def steps(world: World, draw: random.Random) -> Iterator[object]:
    """What a random sequence of 60 steps asks the driver for."""
    warnings.simplefilter("ignore")
    for _ in range(60):
        stream, kind = draw.choice((0, 0, 7, 7, 8)), draw.random()
        world.fake["status"] = 720 if draw.random() < 0.1 else 0
        world.fake["wait_status"] = 5 if draw.random() < 0.05 else 0
        if kind < 0.1 and stream:
            world.captures[stream] = 0 if world.captures[stream] else draw.randrange(1, 100)
        left = draw.choice((132, 68, 20))
        world.arena.room.left = lambda left=left: left  # type: ignore[method-assign]
        given = (aligned(8 if kind > 0.9 else 0), *world.given[1:])
        try:
            world.launch(stream, *given, is_hooked=0.8 < kind < 0.9)
        except (RuntimeError, KernelLaunchError) as error:
            yield str(error)
        yield world.noted(), world.count, len(world.kernel.through_triton)
        yield [getattr(world.order.state, name) for name in ("event", "last", "is_captured")]


def test_torch_keeps_its_process_groups_where_they_are_looked_for(group: None) -> None:
    """In the order in which they are made, the newest one last."""
    world: Any = c10d._world
    other = dist.new_group([0, 1])
    assert next(reversed(world.pg_map)) is other
