"""Launches that wait for other GPUs follow one another on a GPU's streams, in calls and within a capture."""

from __future__ import annotations

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
    with torch.cuda.stream(quick):
        order.follow(quick.cuda_stream, (0, 1))
        copied.copy_(number)
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
