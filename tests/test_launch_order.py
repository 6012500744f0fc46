"""Which launches that wait for other GPUs wait for which streams, on streams that only note it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from shardfuse.mesh import launch_order
from shardfuse.mesh.launch_order import LaunchOrder


@dataclass(eq=False)
class Stream:
    """``capture``: the number of the capture that it is part of, 0 for none."""

    cuda_stream: int
    capture: int = 0
    waited: list[int] = field(default_factory=list[int])

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.cuda_stream)


class Streams:
    """Five of a device, of which one is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = [Stream(k) for k in range(5)]
        self.current = self.all[0]
        self.order = LaunchOrder(torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(self.current.capture))
        monkeypatch.setattr(launch_order, "capture_of", lambda handle: self.all[handle].capture)

    def launch(self, k: int, *, is_hooked: bool = False) -> list[int]:
        """The streams that a launch on stream ``k`` waits for."""
        self.current = self.all[k]
        self.current.waited.clear()
        self.order.follow(None if is_hooked else k, (0, 1))
        return self.current.waited


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_a_launch_on_another_stream_waits_for_the_last_one(streams: Streams) -> None:
    assert [list(streams.launch(k)) for k in (1, 1, 2, 2, 1)] == [[], [], [1], [], [2]]
    assert streams.order.launches == {(0, 1): 5}


def test_launches_through_triton_are_among_them(streams: Streams) -> None:
    """There the program has no handle: a profiler has hooked in."""
    assert [list(streams.launch(k, is_hooked=True)) for k in (1, 1, 2)] == [[], [], [1]]
    assert list(streams.launch(1)) == [2]


def test_branches_of_a_capture_follow_one_another(streams: Streams) -> None:
    streams.launch(1)
    for k in (2, 3):
        streams.all[k].capture = 7
    assert [list(streams.launch(k)) for k in (2, 2, 3, 2)] == [[], [], [2], [3]]
    assert streams.order.launches == {(0, 1): 1}  # what is captured has not run


def test_no_capture_waits_for_another_or_for_calls(streams: Streams) -> None:
    """Nor a call for what is captured, of which it would become a part."""
    streams.launch(1)
    streams.all[2].capture = 7
    assert list(streams.launch(2)) == []
    streams.all[2].capture, streams.all[3].capture = 0, 8
    assert list(streams.launch(3)) == []
    streams.all[1].capture = 9
    assert list(streams.launch(4)) == []
