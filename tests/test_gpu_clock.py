"""Spans of time on a GPU, seen by a driver that runs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_driver import COMPILER, Fake

from shardfuse.executor.gpu_clock import DriverClock

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    directory: Path = tmp_path_factory.mktemp("clock")
    found = Fake(directory)
    found.driver.connect_clock(found.file)
    return found


def test_a_span_is_between_two_events(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    clock = DriverClock(fake.driver, torch.device("cuda", 1))
    before = fake["recorded"]
    span = clock.begin()
    assert span is not None
    assert fake["recorded"] == before + 1
    clock.end(span)
    assert fake["recorded"] == before + 2
    assert clock.milliseconds(span) == 1.5


def test_events_are_used_again(fake: Fake) -> None:
    spans = [fake.driver.begin_span(2, 0) for _ in range(3)]
    made = fake["made_events"]
    spans.clear()
    again = [fake.driver.begin_span(2, 0) for _ in range(3)]
    assert fake["made_events"] == made
    assert None not in again


def test_what_is_captured_is_not_timed(fake: Fake) -> None:
    fake["capturing"] = 1
    before = fake["recorded"]
    assert fake.driver.begin_span(0, 0) is None
    assert fake["recorded"] == before
    fake["capturing"] = 0


def test_an_event_that_cannot_be_recorded(fake: Fake) -> None:
    fake["record_status"] = 999
    with pytest.raises(RuntimeError, match="CUDA driver error 999"):
        fake.driver.begin_span(0, 0)
    fake["record_status"] = 0


def test_a_thread_without_a_context_is_given_one(fake: Fake) -> None:
    """As autograd's, whose first work on the GPU may be a span."""
    fake["context"] = 0
    span = fake.driver.begin_span(3, 0)
    assert fake["context"]
    fake["context"] = 0
    fake.driver.end_span(span, 0)
    assert fake["context"]
    fake["context"] = 0
    fake.driver.length_of_span(span)
    assert fake["context"]
