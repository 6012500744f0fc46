"""What a bound collective hands to NCCL, seen by a library that runs nothing."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_driver import COMPILER, Fake
from torch.distributed import HashStore

from shardfuse.executor import bound_collectives, nccl_channels
from shardfuse.mesh import process

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

NOT_READY = 600


class FakeNccl(Fake):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.file = str(directory / "libfake.so")
        self.driver.connect_nccl(self.file, self.file)

    def number(self, name: str) -> int:
        return ctypes.c_uint64.in_dll(self.symbols, name).value

    def addresses(self, count: int) -> list[tuple[int, int]]:
        """From where to where the last calls went."""
        table, calls = (ctypes.c_uint64 * 32).in_dll(self.symbols, "nccl_addresses"), self["nccl_calls"]
        places = [k % 16 for k in range(calls - count, calls)]
        return [(table[2 * k], table[2 * k + 1]) for k in places]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> FakeNccl:
    return FakeNccl(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def fake(compiled: FakeNccl) -> FakeNccl:
    """The same library for all tests, in which nothing fails and all that was issued has ended."""
    for name in (
        "nccl_status",
        "event_status",
        "record_status",
        "in_progress",
        "capturing",
        "recorded",
        "group_starts",
        "group_ends",
        "group_status",
    ):
        compiled[name] = 0
    return compiled


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_what_is_handed_over(fake: FakeNccl, kind: int) -> None:
    run = fake.driver.collective(kind, 99, 24, 7, 3)
    given, taken = torch.zeros(24), torch.zeros(24)
    before = fake.driver.issued(99)
    run(5, given, taken)
    assert fake["nccl_kind"] == kind
    assert (fake.number("nccl_given"), fake.number("nccl_taken")) == (given.data_ptr(), taken.data_ptr())
    assert (fake.number("nccl_count"), fake["nccl_type"]) == (24, 7)
    assert fake["nccl_operation"] == (0 if kind == 1 else 3)
    assert (fake.number("nccl_communicator"), fake.number("nccl_stream")) == (99, 5)
    assert fake.driver.issued(99) == before + 1
    assert fake.driver.issued(98) == 0


def test_pieces_of_an_inner_dim_are_one_group(fake: FakeNccl) -> None:
    """[3, 4 of 8, 5]: each piece from where it is to where it belongs, and one event behind all of them."""
    run = fake.driver.collective(1, 94, 20, 7, 0, 3, 20 * 4, 40 * 4)
    given, taken = torch.zeros(3, 4, 5), torch.zeros(3, 8, 5)
    before = fake.driver.issued(94)
    run(5, given, taken)
    here, there = given.data_ptr(), taken.data_ptr()
    assert fake.addresses(3) == [(here + 80 * k, there + 160 * k) for k in range(3)]
    assert (fake["group_starts"], fake["group_ends"]) == (1, 1)
    assert fake["recorded"] == 1
    assert fake.driver.issued(94) == before + 1, "torch counts a group as one too"
    run(5, here, there)  # a kernel's tensor may be no more than an address
    assert fake.addresses(3) == [(here + 80 * k, there + 160 * k) for k in range(3)]


def test_pieces_as_they_are_bound(fake: FakeNccl) -> None:
    """[3, 8, 5] over two members, each with four of the eight."""
    channel = nccl_channels.NcclChannel(fake.driver, 87, torch.float32, None)
    team, part, whole = cast(Any, SimpleNamespace(size=2)), torch.zeros(3, 4, 5), torch.zeros(3, 8, 5)
    gather = bound_collectives.all_gather(1, team, whole.shape)(channel)
    scatter = bound_collectives.reduce_scatter(1, team, part.shape, torch.float32)(channel)
    at_part, at_whole = ([t.data_ptr() + k * t[0].nbytes for k in range(3)] for t in (part, whole))
    gather(5, part, whole)
    assert (fake["nccl_kind"], fake.number("nccl_count")) == (1, 20)
    assert fake.addresses(3) == list(zip(at_part, at_whole, strict=True))
    scatter(5, whole, part)
    assert (fake["nccl_kind"], fake.number("nccl_count")) == (2, 20)
    assert fake.addresses(3) == list(zip(at_whole, at_part, strict=True))


def test_collectives_of_one_group(fake: FakeNccl) -> None:
    first, second = fake.driver.collective(0, 93, 4, 7, 0), fake.driver.collective(0, 93, 6, 7, 0)
    run = fake.driver.group((first, second))
    tensors = [torch.zeros(n) for n in (4, 4, 6, 6)]
    run(5, *tensors)
    pointers = [t.data_ptr() for t in tensors]
    assert fake.addresses(2) == [(pointers[0], pointers[1]), (pointers[2], pointers[3])]
    assert (fake["group_starts"], fake["group_ends"], fake["recorded"]) == (1, 1, 1)
    with pytest.raises(TypeError, match="takes 5 arguments, not 3"):
        run(5, *tensors[:2])
    for others in ((first, fake.driver.collective(0, 89, 6, 7, 0)), (first, len)):
        with pytest.raises(TypeError, match="is no collective of this communicator"):
            fake.driver.group(others)
    with pytest.raises(TypeError, match="a tuple of collectives"):
        fake.driver.group(())


def test_a_group_that_fails_is_ended(fake: FakeNccl) -> None:
    run = fake.driver.collective(1, 88, 20, 7, 0, 3, 80, 160)
    x = torch.zeros(3, 8, 5)
    fake["nccl_status"] = 3
    with pytest.raises(RuntimeError, match="the peer is gone"):
        run(0, x, x)
    assert (fake["group_starts"], fake["group_ends"]) == (1, 1)
    fake["nccl_status"], fake["group_status"] = 0, 3
    with pytest.raises(RuntimeError, match="the peer is gone"):
        run(0, x, x)


def test_an_error_is_raised_with_its_words(fake: FakeNccl) -> None:
    run = fake.driver.collective(0, 97, 1, 7, 0)
    fake["nccl_status"] = 3
    with pytest.raises(RuntimeError, match="unhandled error: the peer is gone"):
        run(0, torch.zeros(1), torch.zeros(1))
    with pytest.raises(TypeError, match="takes 3 arguments, not 2"):
        run(0, torch.zeros(1))
    with pytest.raises(ValueError, match="no collective 3 of 1 elements"):
        fake.driver.collective(3, 97, 1, 7, 0)


class Clock:
    """What the driver module has waited for, in seconds that pass when the test says so."""

    def __init__(self, fake: FakeNccl) -> None:
        self.fake = fake
        fake["event_status"] = NOT_READY
        fake["ended"] = fake["nccl_calls"]
        self.run = fake.driver.collective(0, 96, 1, 7, 0)

    def issue(self) -> float:
        """The time just before."""
        x, before = torch.zeros(1), time.monotonic()
        self.run(0, x, x)
        return before

    def end(self, count: int) -> None:
        self.fake["ended"] += count

    def waits_since(self, before: float, after: float) -> bool:
        """Has the collective that is told of been issued between these two times?"""
        first = time.monotonic()
        waited = self.fake.driver.waiting()
        return first - after <= waited <= time.monotonic() - before


def test_the_oldest_that_has_not_ended_is_timed(fake: FakeNccl) -> None:
    clock = Clock(fake)
    assert fake.driver.waiting() == 0
    first = clock.issue()
    second = clock.issue()
    third = clock.issue()
    assert clock.waits_since(first, second)
    assert fake["exchanged_mode"] == 0  # as it was: a capture on another thread is not disturbed
    clock.end(3)
    assert fake.driver.waiting() == 0
    fourth = clock.issue()
    assert clock.waits_since(fourth, time.monotonic())
    assert third <= fourth


@pytest.mark.parametrize("issued", [2, 3, 5])
def test_one_that_was_issued_while_another_ran_is_timed(fake: FakeNccl, issued: int) -> None:
    """The first ends, the host waits for what it issued meanwhile, and issues nothing more."""
    clock = Clock(fake)
    times = [clock.issue() for _ in range(issued)]
    after = time.monotonic()
    clock.end(1)
    assert clock.waits_since(times[1], after)
    clock.end(issued - 2)
    assert clock.waits_since(times[1], after), "it is behind the newest"
    clock.end(1)
    assert fake.driver.waiting() == 0


def test_one_that_never_ends_is_timed_whatever_is_issued_behind_it(fake: FakeNccl) -> None:
    clock = Clock(fake)
    clock.issue()
    before = clock.issue()
    clock.end(1)
    clock.issue()  # the older of the two events is behind the second now, and stays there
    for _ in range(50):
        clock.issue()
    after = time.monotonic()
    assert fake.driver.waiting() > 0
    clock.end(1)
    assert clock.waits_since(before, after), "the rest of them"


def test_an_event_that_cannot_be_recorded_tells_nothing(fake: FakeNccl) -> None:
    clock = Clock(fake)
    fake["record_status"] = 1
    clock.issue()
    assert fake.driver.waiting() == 0
    fake["record_status"] = 0


def test_a_new_communicator_at_the_address_of_an_old_one(fake: FakeNccl) -> None:
    clock = Clock(fake)
    clock.issue()
    assert fake.driver.issued(96) > 0
    assert fake.driver.waiting() > 0
    fake.driver.begin_counting(96)
    assert fake.driver.issued(96) == 0
    assert fake.driver.waiting() == 0
    clock.issue()
    assert fake.driver.issued(96) == 1


def test_a_group_begins_to_count_once(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective of a group is bound by itself; the next group may have a communicator at the same address."""
    monkeypatch.setattr(nccl_channels, "_found", [fake.driver])
    monkeypatch.setattr(nccl_channels, "is_watched", lambda: True)
    x = torch.zeros(1)
    for _ in range(2):
        group = cast(Any, HashStore())  # anything that is counted for
        for k in range(2):
            channel = nccl_channels.nccl_channel(group, Communicating(90), torch.float32)
            assert channel is not None
            assert fake.driver.issued(90) == k
            fake.driver.collective(0, 90, 1, 7, 0)(0, x, x)


class Communicating:
    """A backend of torch's that has a communicator."""

    def __init__(self, communicator: int, blocking: int | None = None) -> None:
        self._comm_ptr = lambda: communicator
        if blocking is not None:
            self.options = SimpleNamespace(config=SimpleNamespace(blocking=blocking))


@pytest.mark.parametrize(
    ("is_watched", "blocking", "takes"),
    [(True, None, True), (True, 1, True), (True, -(2**31), True), (True, 0, False), (False, None, False)],
)
def test_what_is_called_by_torch(
    fake: FakeNccl, is_watched: bool, blocking: int | None, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody but torch watches, and where a call may return before NCCL has taken it."""
    monkeypatch.setattr(nccl_channels, "_found", [fake.driver])
    monkeypatch.setattr(process, "own_watchdog", lambda: object() if is_watched else None)
    monkeypatch.setattr(nccl_channels, "own_watchdog", process.own_watchdog)
    backend = Communicating(91, blocking)
    found = nccl_channels.nccl_channel(cast(Any, HashStore()), backend, torch.float32)
    assert (found is not None) == takes


def test_a_call_that_is_in_progress_is_waited_for(fake: FakeNccl) -> None:
    run = fake.driver.collective(0, 92, 1, 7, 0)
    fake["in_progress"] = 3
    run(0, torch.zeros(1), torch.zeros(1))
    assert fake["in_progress"] == 0
    fake["in_progress"], fake["nccl_status"] = 3, 3
    with pytest.raises(RuntimeError, match="the peer is gone"):
        run(0, torch.zeros(1), torch.zeros(1))


def test_a_graph_that_is_captured_has_no_event(fake: FakeNccl) -> None:
    run = fake.driver.collective(0, 95, 1, 7, 0)
    fake["capturing"] = 1
    run(0, torch.zeros(1), torch.zeros(1))
    assert fake["recorded"] == 0
    assert fake.driver.waiting() == 0


def test_a_library_that_is_not_loaded_is_not_loaded_again(fake: FakeNccl) -> None:
    with pytest.raises(OSError, match=r"libmissing\.so is not loaded"):
        fake.driver.connect_nccl("libmissing.so", fake.file)
