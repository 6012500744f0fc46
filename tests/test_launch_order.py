"""Which launches that wait for other GPUs follow which, on streams and graphs that only note it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shardfuse.mesh import launch_order
from shardfuse.mesh.launch_order import LaunchOrder

RANKS = (0, 1)
EVENT = 77


@dataclass(eq=False)
class Stream:
    """``capture``: the number of the capture that it is part of, 0 for none."""

    cuda_stream: int
    device: Device
    capture: int = 0

    def wait_stream(self, other: Stream) -> None:
        self.device.noted.append(f"{self.cuda_stream} waits for {other.cuda_stream}")


class Device:
    """Five streams, of which one is the current one, and the driver's part in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = [Stream(k, self) for k in range(5)]
        self.current, self.noted, self.nodes = self.all[0], list[str](), 0
        self.order = LaunchOrder(torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(self.current.capture))
        monkeypatch.setattr(launch_order, "peer_memory", self)

    def launch(self, k: int, *, is_hooked: bool = False) -> list[str]:
        """What is done around a launch on stream ``k``."""
        self.current = self.all[k]
        self.noted.clear()
        handle = None if is_hooked else k
        is_marked = self.order.follow(handle, RANKS)
        self.noted.append("launch")
        if is_marked:
            self.order.ended(handle)
        return list(self.noted)

    def capture_of(self, handle: int) -> int:
        return self.all[handle].capture

    def made_event(self) -> int:
        return EVENT

    def record(self, event: int, stream: int) -> None:
        assert event == EVENT
        assert not self.all[stream].capture
        self.noted.append(f"record {stream}")

    def wait_for(self, event: int, stream: int, *, is_captured: bool) -> None:
        assert event == EVENT
        assert is_captured == bool(self.all[stream].capture)
        self.noted.append(f"wait {stream}")

    def record_in_capture(self, event: int, stream: int, node: int) -> int:
        assert event == EVENT
        self.noted.append(f"node {node}")
        self.nodes += not node
        return node or 10 + self.nodes


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_launches_on_the_default_stream_need_no_event(device: Device) -> None:
    assert [device.launch(0), device.launch(0, is_hooked=True)] == [["launch"]] * 2
    assert device.order.launches() == {RANKS: 2}


def test_a_launch_on_another_stream_waits_for_the_last_one(device: Device) -> None:
    assert device.launch(0) == ["launch"]
    assert device.launch(1) == ["record 0", "wait 1", "launch", "record 1"]
    assert device.launch(1) == ["launch", "record 1"]
    assert device.launch(2, is_hooked=True) == ["wait 2", "launch", "record 2"]  # a profiler has hooked in
    assert device.launch(0) == ["wait 0", "launch", "record 0"]
    assert device.order.launches() == {RANKS: 5}


def test_a_first_launch_waits_for_none(device: Device) -> None:
    assert device.launch(3) == ["wait 3", "launch", "record 3"]  # of an event that nobody has recorded


def test_a_graph_waits_once_and_records_once(device: Device) -> None:
    """Branches of a capture follow one another in it."""
    device.launch(0)
    for k in (2, 3):
        device.all[k].capture = 7
    assert device.launch(2) == ["record 0", "wait 2", "launch", "node 0"]
    assert device.launch(2) == ["launch", "node 11"]
    assert device.launch(3) == ["3 waits for 2", "launch", "node 11"]
    assert device.launch(2) == ["2 waits for 3", "launch", "node 11"]
    assert device.order.launches() == {RANKS: 1}  # what is captured has not run


def test_calls_wait_for_replays_which_are_not_seen(device: Device) -> None:
    """Also on the stream of the last call, between which and this one a graph may have been launched elsewhere."""
    device.all[2].capture = 7
    device.launch(2)
    device.all[2].capture = 0
    for k in (1, 1, 0, 0):
        assert device.launch(k) == [f"wait {k}", "launch", f"record {k}"]


def test_no_capture_takes_part_in_another(device: Device) -> None:
    """Two go on at a time; and a stream may be captured again, or be captured behind its own calls."""
    device.launch(2)
    device.all[2].capture, device.all[3].capture = 7, 8
    assert device.launch(2) == ["wait 2", "launch", "node 0"]
    assert device.launch(3) == ["wait 3", "launch", "node 0"]
    assert device.launch(2) == ["launch", "node 11"]
    device.all[2].capture = 9
    assert device.launch(2) == ["wait 2", "launch", "node 0"]
    assert device.launch(3) == ["launch", "node 12"]
    assert set(device.order.captures) == {8, 9}
