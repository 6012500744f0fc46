"""Statistics that kernels exchange over symmetric memory, on a GPU for each rank, through the whole of shardfuse."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from exchange_cases import (
    KINDS,
    LOSS,
    PARTIAL,
    define,
    define_backward,
    expected,
    expected_of_backward,
    inputs,
    inputs_of_backward,
    piece,
    piece_of_output,
)
from exchange_passed import PROGRAMS, Trial
from exchange_scattered import Norm as Scattered
from quantized_check import check as check_quantized
from torch.distributed.tensor import Partial, Replicate

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, collectives
from shardfuse.nn import AddRMSNorm, quantized
from shardfuse.nn.quantizing_fusions import ScaleKind
from shardfuse.rank_errors import ExchangeTimeoutError
from shardfuse.schedulers.exchange_forms import Form

if TYPE_CHECKING:
    from conftest import ProcessGroup

    from shardfuse.mesh import symmetric

pytestmark = [pytest.mark.mpi, pytest.mark.multi_gpu]

UNEVEN = ("rms_norm", "layer_norm", "softmax", "add_rms_norm", LOSS)
FEWER = 5.0


def pieces(kind: str, given: list[torch.Tensor], group: ProcessGroup) -> list[torch.Tensor]:
    return [piece(kind, k, v, group.size, group.rank).to(group.device) for k, v in enumerate(given)]


def check(fd: FusionDefinition, kind: str, given: list[torch.Tensor], group: ProcessGroup) -> None:
    found = fd.execute(pieces(kind, given, group))
    wide, eager = (expected(kind, [v.to(t) for v in given]) for t in (torch.float64, torch.float32))
    for k, value in enumerate(found):
        parts = [piece_of_output(kind, v[k], group.size, group.rank) for v in (wide, eager)]
        assert_near(value.cpu(), parts[0], parts[1].to(value.dtype), n=2, what=f"{kind}, output {k}")


@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_and_no_collective(kind: str, arena: symmetric.Arena, pg: ProcessGroup) -> None:
    fd = define(kind, 8192, pg.size, DataType.BFloat16)
    for rows in (1, 8, 64, 300):
        check(fd, kind, inputs(kind, rows, 8192, torch.bfloat16, pg.size), pg)
        is_in_two_steps = kind == PARTIAL and pg.size > 2 and rows == 300
        assert is_in_two_steps or (fd.explain().kernels, len(fd.explain().collectives)) == (1, 0)


@pytest.mark.parametrize("kind", UNEVEN)
def test_shards_of_two_sizes(
    kind: str, arena: symmetric.Arena, pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for: their ranks are out of step, too, as one has more to read."""
    monkeypatch.setenv("SHARDFUSE_EXCHANGE", "symmetric")
    n = 8192 * pg.size // 2 - 1
    fd, own = define(kind, n, pg.size, DataType.BFloat16), random.Random(pg.rank)
    given = {rows: inputs(kind, rows, n, torch.bfloat16, pg.size) for rows in (1, 8, 64, 300)}
    for rows, v in given.items():
        check(fd, kind, v, pg)
        assert (fd.explain().kernels, len(fd.explain().collectives)) == (1, 0), rows
    here = {rows: pieces(kind, v, pg) for rows, v in given.items()}
    both = random.Random(5)
    for _ in range(1000):
        fd.execute(here[both.choice((1, 8, 64, 300))])
        if own.random() < 0.01:
            time.sleep(own.random() * 0.003)
    for v in given.values():
        check(fd, kind, v, pg)


@pytest.mark.parametrize("is_of_sums", [True, False])
def test_rows_of_each_rank_are_added_up_normed_and_gathered(
    is_of_sums: bool, arena: symmetric.Arena, pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks that are late now and then, and of graphs, which their calls follow."""
    monkeypatch.setenv("SHARDFUSE_EXCHANGE", "symmetric")
    norm, own, both = (
        Scattered(pg, torch.bfloat16, 4096, is_of_sums=is_of_sums),
        random.Random(pg.rank),
        random.Random(5),
    )
    sizes = ((1, 1), (5, 1), (16, 4), (700, 1))
    for k, (sequence, batch) in enumerate(sizes):
        norm.check(sequence, batch, seed=k)
        assert (norm.explained().kernels, len(norm.explained().collectives)) == (1, 0)
    given = {size: norm.here(norm.given(*size, seed=9)) for size in sizes}
    for _ in range(1000):
        norm.call(given[both.choice(sizes)])
        if own.random() < 0.01:
            time.sleep(own.random() * 0.003)
    called = norm.call(given[16, 4])
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [norm.call(given[16, 4]) for _ in range(3)]
    for k in range(2000):
        graph.replay()
        if k % 200 == 0:
            assert all(torch.equal(x, y) for x, y in zip(norm.call(given[16, 4]), called, strict=True))
            time.sleep(own.random() * 0.01)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for each in replayed for x, y in zip(each, called, strict=True))
    for k, (sequence, batch) in enumerate(sizes):
        norm.check(sequence, batch, seed=k)


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_of_a_sum_are_passed_on(
    name: str, arena: symmetric.Arena, pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than two ranks that are late now and then, and of graphs, which their calls follow."""
    if pg.size == 2:
        pytest.skip("two ranks are given all summands")
    monkeypatch.setenv("SHARDFUSE_EXCHANGE", "symmetric")
    trial = Trial(name, pg.rank, 4096, DataType.BFloat16, pg.device)
    own, both = random.Random(pg.rank), random.Random(5)
    sizes = [(40, 12), (3, 333), (701, 1)]
    sizes += [(2001, 1)] if trial.program.form is Form.PASSED and name != "scaled" else []
    for k, (batch, sequence) in enumerate(sizes):
        trial.check(batch, sequence, seed=k)
        assert trial.form() is trial.program.form
    given = {size: trial.given(*size, seed=9) for size in sizes}
    here = {size: trial.here(v) for size, v in given.items()}
    for _ in range(500):
        trial.run(here[both.choice(sizes)])
        if own.random() < 0.02:
            time.sleep(own.random() * 0.003)
    called = [t.clone() for t in trial.run(trial.here(given[3, 333]))]
    torch.cuda.synchronize()
    dist.barrier()
    graph, inputs_of_graph = torch.cuda.CUDAGraph(), trial.here(given[3, 333])
    with torch.cuda.graph(graph):
        replayed = trial.run(inputs_of_graph)
    for k in range(1000):
        inputs_of_graph[1].copy_(given[3, 333][1])  # which is overwritten
        graph.replay()
        if k % 200 == 0:
            again = trial.run(trial.here(given[3, 333]))
            assert all(torch.equal(x, y) for x, y in zip(again, called, strict=True))
            time.sleep(own.random() * 0.01)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(replayed, called, strict=True))
    for k, (batch, sequence) in enumerate(sizes):
        trial.check(batch, sequence, seed=k)


def test_a_backward_whose_column_sums_are_a_kernel_of_their_own(arena: symmetric.Arena, pg: ProcessGroup) -> None:
    fd = define_backward(8192, pg.size, DataType.BFloat16)
    given = inputs_of_backward(64, 8192, torch.bfloat16)
    cut = [v if v.shape[-1] == 1 else v.chunk(pg.size, -1)[pg.rank].contiguous() for v in given]
    found = fd.execute([v.to(pg.device) for v in cut])
    assert (fd.explain().kernels, len(fd.explain().collectives)) == (2, 0)
    wide, eager = (expected_of_backward([v.to(t) for v in given]) for t in (torch.float64, torch.float32))
    for k, value in enumerate(found):
        parts = [v[k].chunk(pg.size, -1)[pg.rank] for v in (wide, eager)]
        assert_near(value.cpu(), parts[0], parts[1].bfloat16(), n=2, what=f"output {k}")


def test_a_module_of_partial_sums(arena: symmetric.Arena, pg: ProcessGroup) -> None:
    """Its program is one kernel: of the summands, the residual and the norm."""
    mesh = DeviceMesh(range(pg.size))
    module = AddRMSNorm(
        4096, 1e-5, mesh=mesh, input=Partial(), output=Replicate(), parameters="local", dtype=torch.bfloat16
    ).to(pg.device)
    given = inputs(PARTIAL, 8, 4096, torch.bfloat16, pg.size)
    summands, residual, weight = (v.to(pg.device) for v in given)
    before = sum(arena.order.launches().values())
    with torch.no_grad():
        module.weight.copy_(weight)
        found = module(summands[pg.rank], residual)
    assert sum(arena.order.launches().values()) == before + 1
    wide, eager = (expected(PARTIAL, [v.to(t) for v in given])[::-1] for t in (torch.float64, torch.float32))
    for k, value in enumerate(found):
        assert_near(value.cpu(), wide[k], eager[k].bfloat16(), n=2, what=f"output {k}")


@pytest.mark.parametrize("scales", ["row", "block", "given"])
def test_a_module_of_partial_sums_that_quantises(
    scales: ScaleKind, arena: symmetric.Arena, pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program is one kernel too, with the scales and the cast."""
    monkeypatch.setenv("SHARDFUSE_EXCHANGE", "symmetric")
    mesh = DeviceMesh(range(pg.size))
    module = quantized.AddRMSNorm(
        4096, 1e-5, scales=scales, mesh=mesh, input=Partial(), parameters="local", dtype=torch.bfloat16
    ).to(pg.device)
    given = inputs(PARTIAL, 8, 4096, torch.bfloat16, pg.size)
    summands, residual, weight = (v.to(pg.device) for v in given)
    before = sum(arena.order.launches().values())
    module.load_state_dict({"weight": weight})
    scale = (torch.full((1,), 0.02, device=pg.device),) if scales == "given" else ()
    found, total = module(summands[pg.rank], residual, *scale)
    assert sum(arena.order.launches().values()) == before + 1
    summed = summands.double().sum(0).bfloat16().double() + residual.double()
    wide = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    check_quantized(found, wide, torch.float8_e4m3fn, found.scales if scale else scales)
    assert_near(total, summed, n=1, rows=None, what="new residual")


def test_calls_out_of_step_whose_sizes_change(arena: symmetric.Arena, pg: ProcessGroup) -> None:
    """Each rank is late now and then, once by more than a second, each by a clock of its own."""
    fd = define("rms_norm", 4096, pg.size, DataType.BFloat16)
    both, own = random.Random(5), random.Random(pg.rank)
    given = {rows: inputs("rms_norm", rows, 4096, torch.bfloat16) for rows in (1, 3, 8, 200)}
    here = {rows: pieces("rms_norm", v, pg) for rows, v in given.items()}
    for k in range(2000):
        fd.execute(here[both.choice((1, 3, 8, 200))])
        if own.random() < 0.01:
            time.sleep(own.random() * 0.003)
        if k == 1000 and pg.rank == 1:
            time.sleep(1.5)
    for v in given.values():
        check(fd, "rms_norm", v, pg)


def test_graphs_and_calls_in_turn(arena: symmetric.Arena, pg: ProcessGroup) -> None:
    fd = define("layer_norm", 8192, pg.size, DataType.BFloat16)
    given = inputs("layer_norm", 8, 8192, torch.bfloat16)
    here = pieces("layer_norm", given, pg)
    (eager,) = fd.execute(here)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        (replayed,) = fd.execute(here)
    own = random.Random(pg.rank)
    for k in range(5000):
        graph.replay()
        if k % 500 == 0:
            (called,) = fd.execute(here)
            assert torch.equal(called, eager)
            time.sleep(own.random() * 0.01)
    torch.cuda.synchronize()
    assert torch.equal(replayed, eager)


@pytest.mark.fresh_world  # in memory of its own, of which the programs of other tests leave too little
@pytest.mark.parametrize("shape", [(32, 64), (64, 32, 64), (2048, 8192)])
def test_collectives_of_plain_tensors(arena: symmetric.Arena, pg: ProcessGroup, shape: tuple[int, ...]) -> None:
    """By kernels, of tensors that begin between two words of 16 bytes too, which are copied to where one does."""
    parts = [torch.randn((*shape, 1), generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(pg.size)]
    parts = [x.to(pg.device).squeeze(-1) for x in parts]
    total = torch.stack(parts).double().sum(0).bfloat16()
    shifted = torch.cat([parts[0].new_zeros(1), parts[pg.rank].flatten()])[1:].view(shape)
    launches = sum(arena.order.launches().values())
    for mine in (parts[pg.rank], shifted):
        assert torch.equal(collectives.all_reduce(mine), total)
        for dim in range(len(shape)):
            assert torch.equal(collectives.all_gather(mine, dim), torch.cat(parts, dim))
            assert torch.equal(collectives.reduce_scatter(mine, dim), total.chunk(pg.size, dim)[pg.rank])
            swapped = [x.chunk(pg.size, dim)[pg.rank] for x in parts]
            assert torch.equal(collectives.all_to_all(mine, dim, 0), torch.cat(swapped))
    calls = 2 * (1 + 3 * len(shape))
    two_steps = 2 * (pg.size > 2 and parts[0].nbytes > 1 << 23)
    assert sum(arena.order.launches().values()) - launches == calls + two_steps


@pytest.mark.fresh_world
def test_a_rank_that_does_not_come_is_named(arena: symmetric.Arena, pg: ProcessGroup) -> None:
    fd = define("rms_norm", 8192, pg.size, DataType.BFloat16)
    here = pieces("rms_norm", inputs("rms_norm", 8, 8192, torch.bfloat16), pg)
    fd.execute(here)
    torch.cuda.synchronize()
    for region in arena.regions.values():
        region.table[0] = int(FEWER * 1e9)
    torch.cuda.synchronize()
    dist.barrier()
    if pg.rank == 0:
        (found,) = fd.execute(here)
        torch.cuda.synchronize()
        assert found.isnan().all()
        with pytest.raises(ExchangeTimeoutError, match="did not send its part of row") as told:
            fd.execute(here)
        assert told.value.rank != 0
    dist.barrier()
