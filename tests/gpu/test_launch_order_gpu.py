"""Launches that wait for other GPUs follow one another on a GPU's streams, in calls and within a capture."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardfuse.mesh.launch_order import LaunchOrder

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000
"""About 10 ms, for which what follows must wait."""


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

    def run(self) -> None:
        handle = torch.cuda.current_stream().cuda_stream
        is_marked = self.order.follow(handle, (0, 1))
        read = self.number + 1
        torch.cuda._sleep(CYCLES)
        self.number.copy_(read)
        if is_marked:
            self.order.ended(handle)

    def captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
            self.run()
        return graph


@pytest.mark.parametrize("is_first_captured", [False, True])
def test_replays_and_calls_on_other_streams_follow_one_another(is_first_captured: bool) -> None:
    """In the host's order: of those that run at a time, all but one would be lost."""
    step = Stepping()
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


def test_a_graph_that_is_launched_twice_at_a_time_runs_one_after_the_other() -> None:
    """By whichever stream; and so do copies of it."""
    step = Stepping()
    graph, streams = step.captured(), [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()
    assert step.number.item() == 2 * len(streams)


def test_a_thread_that_has_not_used_the_gpu_orders_its_launches() -> None:
    step, stream = Stepping(), torch.cuda.Stream()
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
