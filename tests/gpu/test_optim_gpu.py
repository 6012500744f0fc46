"""Optimiser steps on a GPU: kernels and launches are few, graphs replay them, nothing waits for the GPU."""

from __future__ import annotations

import math

import pytest
import torch
from optim_cases import CASES, Case, compare, gradients, parameters

from benchmarks.timing import count_kernels
from shardfuse import optim

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_of_torch_in_float64(case: Case) -> None:
    compare(case, GPU)


def test_a_step_is_two_kernels_and_clipping_is_one_more() -> None:
    tensors = parameters([(64, 64)] * 1000 + [(5,), (), (70_001,)], torch.float32, GPU)
    gradients(tensors, 0)
    for max_norm, expected in ((None, 2), (1.0, 3)):
        optimizer = optim.AdamW(tensors, max_norm=max_norm)
        optimizer.step()
        assert count_kernels(optimizer.step) == expected
        gradients(tensors, 1)
        assert count_kernels(optimizer.step) == expected + 1, "and a copy of addresses where gradients moved"
    optim.clip_grad_norm_(tensors, 1.0)
    assert count_kernels(lambda: optim.clip_grad_norm_(tensors, 1.0)) == 3


def test_nothing_waits_for_the_gpu() -> None:
    tensors = parameters([(64, 64)] * 100, torch.bfloat16, GPU)
    optimizer = optim.AdamW(tensors, max_norm=1.0, master_weights=True)
    gradients(tensors, 0)
    optimizer.step()  # kernels are made, and tables of what stays the same
    optim.clip_grad_norm_(tensors, 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for k in range(3):
            for p in tensors:
                p.grad = torch.full_like(p, 0.5 * k)
            optim.clip_grad_norm_(tensors, 1.0)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_graph_replays_steps(max_norm: float | None) -> None:
    """With a backward inside, whose gradients have addresses of the graph's own; lr is read at each replay."""
    own, plain = ([torch.nn.Parameter(p) for p in parameters([(64, 32), (64,)], torch.float32, GPU)] for _ in range(2))
    lr = torch.tensor(1e-2, device=GPU)
    optimizer = optim.AdamW(own, lr=lr, max_norm=max_norm)
    reference = torch.optim.AdamW(plain, lr=1e-2)
    x = torch.randn(16, 32, device=GPU, generator=torch.Generator(GPU).manual_seed(3))

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.linear(x, *own).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        train()
    lr.fill_(5e-3)
    for _ in range(4):
        graph.replay()
    for k in range(7):
        reference.param_groups[0]["lr"] = 1e-2 if k < 3 else 5e-3
        reference.zero_grad()
        torch.nn.functional.linear(x, *plain).square().mean().backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain, max_norm)
        reference.step()
    assert optimizer.state[own[0]]["step"].item() == 7
    for a, b in zip(own, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_norms_are_bitwise_the_same_in_each_run() -> None:
    tensors = parameters([(1 << 20,), (333_333,), (17, 19)], torch.float32, GPU)
    gradients(tensors, 0)
    found = {optim.get_total_norm([p.grad for p in tensors], order).item() for order in [2.0] * 20}
    assert len(found) == 1


def test_misaligned_and_permuted_tensors() -> None:
    base = torch.randn(3_000_001, device=GPU, generator=torch.Generator(GPU).manual_seed(0))
    tensors = [
        torch.nn.Parameter(base[1:1_000_000]),
        torch.nn.Parameter(base[1_000_003:2_000_003].view(1000, 1000).t()),
    ]
    tensors[0].grad = torch.randn(1_000_000, device=GPU)[1:]
    tensors[1].grad = torch.randn(1000, 1000, device=GPU)
    edges = base[[0, 1_000_000, 1_000_001, 1_000_002, 2_000_003, -1]].clone()
    expected = [p.detach().double().clone().requires_grad_() for p in tensors]
    for p, q in zip(tensors, expected, strict=True):
        q.grad = p.grad.double()
    optim.AdamW(tensors, max_norm=math.inf).step()
    torch.optim.AdamW(expected).step()
    for p, q in zip(tensors, expected, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-6, atol=1e-7)
    assert torch.equal(base[[0, 1_000_000, 1_000_001, 1_000_002, 2_000_003, -1]], edges)
