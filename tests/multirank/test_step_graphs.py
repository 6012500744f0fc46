"""Training steps of sharded modules as CUDA graphs: replays have the values of the same step without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfuse import DeviceMesh
from shardfuse.mesh.groups import destroy_groups
from shardfuse.nn import AddRMSNorm, FusionTimer, SwiGLU, bucket_gradients

pytestmark = [pytest.mark.mpi, pytest.mark.multi_gpu]

BATCH, SEQUENCE, DIM, HIDDEN = 2, 32, 128, 256
Tensors = tuple[torch.Tensor, torch.Tensor]


class Block(torch.nn.Module):
    """Matmuls of this rank's columns and rows, with what stands between them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm = AddRMSNorm(
            DIM, bias=True, mesh=mesh, input=Partial(), residual=Shard(1), output=Replicate(), output_grad=Partial(),
            parameters="local",
        )  # fmt: skip
        self.gate = SwiGLU(HIDDEN, bias=True, mesh=mesh, input=Shard(-1), parameters="local")
        generator = torch.Generator().manual_seed(mesh.size)
        self.up, self.down = (
            torch.nn.Parameter(torch.randn(shape, generator=generator) / shape[1] ** 0.5)
            for shape in ((2 * HIDDEN // mesh.size, DIM), (DIM, HIDDEN // mesh.size))
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        normed, residual = self.norm(x, residual)
        return torch.nn.functional.linear(self.gate(torch.nn.functional.linear(normed, self.up)), self.down), residual


def given(seed: int, mesh: DeviceMesh, device: torch.device) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(BATCH, SEQUENCE, DIM, generator=generator) for _ in range(2))
    return x.to(device), mesh.shard_tensor(residual, 1).contiguous().to(device)


def step(model: torch.nn.Module, call: Callable[..., Tensors], tensors: Tensors) -> list[torch.Tensor]:
    """The results and the gradients, also those of the inputs."""
    model.zero_grad(set_to_none=True)
    x, residual = (t.detach().requires_grad_() for t in tensors)
    results = call(x, residual)
    torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    return [*results, x.grad, residual.grad, *(p.grad for p in model.parameters())]


def expected(model: torch.nn.Module, tensors: Tensors) -> list[torch.Tensor]:
    return [t.detach().clone() for t in step(model, model, tensors)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bucketed", [False, True])
def test_a_whole_step(pg, bucketed: bool) -> None:
    """``bucketed``: gradients of the norm behind one node, which runs on the stream on which it was made."""
    mesh = DeviceMesh(range(pg.size))
    model = Block(mesh).to(pg.device)
    if bucketed:
        assert bucket_gradients(model) == 2
        step(model, model, given(0, mesh, pg.device))  # on the current stream
    timer = FusionTimer().watch(model)
    tensors = given(0, mesh, pg.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, model, tensors)
    torch.cuda.current_stream().wait_stream(side)
    timer.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step(model, model, tensors)
    assert timer.seconds() == 0, "what is captured has not run"
    for seed in range(3):
        other = given(seed, mesh, pg.device)
        for t, o in zip(tensors, other, strict=True):
            t.copy_(o)
        graph.replay()
        again = [t.clone() for t in found]
        same(again, expected(model, other))


def test_graphed_callables(pg) -> None:
    mesh = DeviceMesh(range(pg.size))
    model = Block(mesh).to(pg.device)
    sample = tuple(t.requires_grad_() for t in given(0, mesh, pg.device))
    graphed = torch.cuda.make_graphed_callables(model, sample)
    plain = Block(mesh).to(pg.device)
    for seed in range(3):
        tensors = given(seed, mesh, pg.device)
        same([t.clone() for t in step(graphed, graphed, tensors)], expected(plain, tensors))


def test_compiled_with_graphs(pg) -> None:
    mesh = DeviceMesh(range(pg.size))
    model, plain = Block(mesh).to(pg.device), Block(mesh).to(pg.device)
    compiled = torch.compile(model, mode="reduce-overhead")
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        tensors = given(seed, mesh, pg.device)
        found = [t.clone() for t in step(model, compiled, tensors)]
        for a, b in zip(found, expected(plain, tensors), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.fresh_world
def test_graphs_that_are_left_do_not_keep_a_world_from_its_end(pg) -> None:
    """NCCL waits, where a communicator ends, for graphs that hold its collectives."""
    x, graph, side = torch.ones(1024, device=pg.device), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(x)
    graph.replay()
    assert x[0].item() == pg.size**2
    destroy_groups()
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="replay"):
        graph.replay()
