"""CUDA graphs of several calls, as benchmarks on ranks time them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .reshard import per_call

EACH = 10
"""Calls in a graph: the launch of the graph itself, some 8 us, is then less than 1 us of each."""


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The replay of a CUDA graph of ``EACH`` calls of ``run``, which has run before on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events in a thread of its own meanwhile, and autograd has one for the backward.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(EACH):
            run()
    return graph.replay


def per_captured_call(
    runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """As ``per_call``, of one of the calls in a CUDA graph; nothing where there is no GPU."""
    if device.type != "cuda":
        return {}
    graphs = {name: captured(run) for name, run in runs.items()}
    timed = per_call(graphs, device, rounds)
    return {name: (us / EACH, low / EACH, high / EACH) for name, (us, low, high) in timed.items()}
