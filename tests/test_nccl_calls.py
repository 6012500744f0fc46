"""What a bound collective hands to NCCL, seen by a library that runs nothing."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest
import torch
from test_driver import COMPILER, Fake

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

NOT_READY = 600


class FakeNccl(Fake):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.file = str(directory / "libfake.so")
        self.driver.connect_nccl(self.file, self.file)

    def number(self, name: str) -> int:
        return ctypes.c_uint64.in_dll(self.symbols, name).value


@pytest.fixture
def fake(tmp_path: Path) -> FakeNccl:
    return FakeNccl(tmp_path)


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


def test_an_error_is_raised_with_its_words(fake: FakeNccl) -> None:
    run = fake.driver.collective(0, 97, 1, 7, 0)
    fake["nccl_status"] = 3
    with pytest.raises(RuntimeError, match="unhandled error: the peer is gone"):
        run(0, torch.zeros(1), torch.zeros(1))
    with pytest.raises(TypeError, match="takes 3 arguments, not 2"):
        run(0, torch.zeros(1))
    with pytest.raises(ValueError, match="no collective 3 of 1 elements"):
        fake.driver.collective(3, 97, 1, 7, 0)


def test_the_oldest_that_has_not_ended_is_timed(fake: FakeNccl) -> None:
    run = fake.driver.collective(0, 96, 1, 7, 0)
    x = torch.zeros(1)
    run(0, x, x)
    first = fake["recorded"]
    assert fake.driver.waiting() == 0  # it has ended
    fake["event_status"] = NOT_READY
    run(0, x, x)  # the event is of the one before, which by now has not ended
    assert fake["recorded"] == first
    time.sleep(0.02)
    run(0, x, x)
    assert fake["recorded"] == first
    assert fake.driver.waiting() >= 0.02
    assert fake["exchanged_mode"] == 0  # as it was: a capture on another thread is not disturbed
    fake["event_status"] = 0
    assert fake.driver.waiting() == 0
    run(0, x, x)
    assert fake["recorded"] == first + 1


def test_a_graph_that_is_captured_has_no_event(fake: FakeNccl) -> None:
    run = fake.driver.collective(0, 95, 1, 7, 0)
    fake["capturing"] = 1
    run(0, torch.zeros(1), torch.zeros(1))
    assert fake["recorded"] == 0
    assert fake.driver.waiting() == 0


def test_a_library_that_is_not_loaded_is_not_loaded_again(fake: FakeNccl) -> None:
    with pytest.raises(OSError, match=r"libmissing\.so is not loaded"):
        fake.driver.connect_nccl("libmissing.so", fake.file)
