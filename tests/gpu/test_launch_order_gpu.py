"""Launches that wait for other GPUs follow one another on a GPU's streams, in calls and within a capture."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardfuse.executor import kernel
from shardfuse.executor.binaries import Asked
from shardfuse.mesh.launch_order import LaunchOrder

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000
"""About 10 ms, for which what follows must wait."""
TURNS = 16_000
"""Reads of memory that follow one another, for about as long."""
STEP = """
import triton
import triton.language as tl


@triton.jit
def step(table_ptr, number_ptr, turns: tl.int64):
    read = tl.load(number_ptr) + 1
    k = turns * 0
    while k < turns:
        k += 1 + tl.load(table_ptr, volatile=True).to(tl.int64)
    tl.store(number_ptr, read)
"""


def two_branches(order: LaunchOrder, number: torch.Tensor, copied: torch.Tensor) -> None:
    """A slow launch on one stream that writes ``number``, and one on another stream that reads it."""
    here = torch.cuda.current_stream()
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()
    slow.wait_stream(here)
    quick.wait_stream(here)
    with torch.cuda.stream(slow):
        order.follow(slow.cuda_stream, (0, 1))
        torch.cuda._sleep(CYCLES)
        number.add_(1)
        order.ended(slow.cuda_stream)
    with torch.cuda.stream(quick):
        order.follow(quick.cuda_stream, (0, 1))
        copied.copy_(number)
        order.ended(quick.cuda_stream)
    here.wait_stream(slow)
    here.wait_stream(quick)


@pytest.mark.parametrize("is_captured", [False, True])
def test_the_second_branch_sees_what_the_first_one_did(is_captured: bool) -> None:
    device = torch.device("cuda", 0)
    number, copied = (torch.zeros(1, device=device) for _ in range(2))
    order = LaunchOrder(device)
    two_branches(order, number, copied)
    torch.cuda.synchronize()
    assert (number.item(), copied.item()) == (1, 1)
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            two_branches(order, number, copied)
        for k in range(2, 5):
            graph.replay()
            torch.cuda.synchronize()
            assert (number.item(), copied.item()) == (k, k)
    two_branches(order, number, copied)
    torch.cuda.synchronize()
    assert number.item() == copied.item()


class Stepping:
    """A launch that takes 10 ms, and adds one to a number that it has read before: a graph of two, and calls."""

    def __init__(self) -> None:
        self.order, self.number = LaunchOrder(torch.device("cuda", 0)), torch.zeros(1, device="cuda")
        self.read = torch.zeros_like(self.number)  # nothing is allocated while another thread captures

    def run(self) -> None:
        handle = torch.cuda.current_stream().cuda_stream
        is_marked = self.order.follow(handle, (0, 1))
        torch.add(self.number, 1, out=self.read)
        torch.cuda._sleep(CYCLES)
        self.number.copy_(self.read)
        if is_marked:
            self.order.ended(handle)

    def captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
            self.run()
        return graph


class SteppingInC(Stepping):
    """The same of a kernel, which C launches where no stream is captured.  by_python: launches that it has left."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        options = (("num_warps", 1), ("num_stages", 1), ("enable_fp_fusion", True))
        types, capability = (torch.float32, torch.float32), torch.cuda.get_device_capability(0)
        asked = Asked(STEP, "step", types, "ww", "q", options, capability)
        ready = kernel._ready(asked, directory, self.order.device)  # pyright: ignore[reportPrivateUsage]
        assert ready is not None
        binary, self.by_python, self.table = ready.binary, 0, torch.zeros(1, device="cuda")
        self.one = ready.driver.launcher(
            ready.function, 0, 1, binary.threads, binary.shared, False, "ww", binary.types, "", (),
            self.refuse, self.refuse,
        )  # fmt: skip
        launches, room = {1: (self.one,)}, SimpleNamespace(left=lambda: 1)
        state, count, report = self.order.state, self.order.count_of((0, 1)), ctypes.c_int64()
        table = self.table.data_ptr()
        self.launch = ready.driver.ordered(state, count, report, 0, table, room, launches, self.otherwise)

    def refuse(self, *given: object) -> None:
        raise AssertionError(given)

    def otherwise(self, stream: int, number: torch.Tensor, turns: int) -> None:
        self.by_python += 1
        is_marked = self.order.follow(stream, (0, 1))
        self.one(stream, self.table, number, turns)
        if is_marked:
            self.order.ended(stream)

    def run(self) -> None:
        self.launch(torch.cuda.current_stream().cuda_stream, self.number, TURNS)


@pytest.fixture(params=["Python", "C"])
def step(request: pytest.FixtureRequest, tmp_path: Path) -> Stepping:
    tmp_path.chmod(0o700)
    return Stepping() if request.param == "Python" else SteppingInC(tmp_path)


@pytest.mark.parametrize("is_first_captured", [False, True])
def test_replays_and_calls_on_other_streams_follow_one_another(step: Stepping, is_first_captured: bool) -> None:
    """In the host's order: of those that run at a time, all but one would be lost."""
    if not is_first_captured:
        step.run()  # and is not over when the graphs are captured
    graphs = [step.captured() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    wanted = 0 if is_first_captured else 1
    for at in (0, 2, 1, 0, 1, 2, 2, 0, 0, 1, 1, 2):
        with torch.cuda.stream(streams[at]):
            step.run() if at == 2 else graphs[at].replay()
        wanted += 1 if at == 2 else 2
    step.run()
    torch.cuda.synchronize()
    assert step.number.item() == wanted + 1


def test_a_graph_that_is_launched_twice_at_a_time_runs_one_after_the_other(step: Stepping) -> None:
    """By whichever stream; and so do copies of it."""
    graph, streams = step.captured(), [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()
    assert step.number.item() == 2 * len(streams)


def test_a_thread_that_has_not_used_the_gpu_orders_its_launches(step: Stepping) -> None:
    stream = torch.cuda.Stream()
    graph = step.captured()

    def run() -> None:
        with torch.cuda.stream(stream):
            step.run()

    graph.replay()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()
    graph.replay()
    torch.cuda.synchronize()
    assert step.number.item() == 5


def test_a_call_while_another_thread_captures_in_any_mode(step: Stepping) -> None:
    """The event that it records is no part of the capture, which goes on."""
    calls, captured = torch.cuda.Stream(), torch.cuda.Stream()
    step.captured()
    with torch.cuda.stream(calls):
        step.run()
    torch.cuda.synchronize()
    graph, other = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")

    def call() -> None:
        with torch.cuda.stream(calls):
            step.run()

    with torch.cuda.graph(graph, stream=captured, capture_error_mode="global"):
        other.add_(1)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()
        other.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert (step.number.item(), other.item()) == (2, 2)


def test_calls_are_ordered_by_c_before_and_after_captures(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    step, streams = SteppingInC(tmp_path), [torch.cuda.Stream() for _ in range(2)]
    step.run()
    for stream in streams:
        with torch.cuda.stream(stream):
            step.run()
    assert step.by_python == 1, "the one that makes the event"
    graph = step.captured()
    graph.replay()
    assert step.by_python == 3
    for stream in streams:
        with torch.cuda.stream(stream):
            step.run()
    step.run()
    assert step.by_python == 3
    torch.cuda.synchronize()
    assert (step.number.item(), step.order.launches()) == (8, {(0, 1): 6})
