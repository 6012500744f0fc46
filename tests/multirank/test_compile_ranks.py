"""``torch.compile(backend="shardfuse")`` of tensor-parallel functions: collectives inside of regions, on real ranks."""

from __future__ import annotations

import pytest
import torch
from compile_graphs import assert_near, graph_backend
from rank_graphs import cases, results, seeds_of
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardfuse.compile import ledger, rank_region_op, region_op, report
from shardfuse.errors import ProgramMismatchError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("nothing_compiled")]
ALL = {"shardfuse.take": "all"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("all_reduce", torch.bfloat16),
        ("products", torch.float32),
        ("products", torch.bfloat16),
        ("reduce_scatter", torch.float32),
    ],
)
def test_collectives_are_part_of_regions(name: str, dtype: torch.dtype, pg) -> None:
    if pg.size < 2:
        pytest.skip("needs ranks")
    case = cases(pg.size)[name]
    whole = case.inputs(pg.size, dtype)
    wide = [x.double() for x in whole]
    seeds = seeds_of(case.unsharded(*wide))
    right = results(case.unsharded, wide, seeds)
    mine, own = [x[pg.rank].to(pg.device) for x in whole], [s[pg.rank].to(pg.device) for s in seeds]
    found = results(torch.compile(case.run, backend=graph_backend, fullgraph=True), mine, own)
    eager = results(case.run, mine, own)
    inside = [line for r in report().taken for line in r.collectives if line.endswith("inside")]
    assert {r.graph for r in report().taken} == {"forward", "backward"}, str(report())
    last = 1 if name == "all_reduce" else 0  # of the backward, which nothing reads that a region could hold
    assert len(inside) == 2 * len(case.collectives) - last, str(report())
    first = len(seeds)
    for k, (a, b, c) in enumerate(zip(found, right, eager, strict=True)):
        own = b[0 if k - first in case.alike else pg.rank]
        assert_near(a.cpu(), own, c.cpu(), n=4, signed=False, terms=b.abs().amax(), what=f"result {k}")


def test_one_graph_serves_any_number_of_rows(pg) -> None:
    if pg.size < 2:
        pytest.skip("needs ranks")
    compiled = torch.compile(cases(pg.size)["all_reduce"].run, backend=graph_backend, fullgraph=True, dynamic=True)
    for rows in (8, 20):
        case = cases(pg.size, rows)["all_reduce"]
        whole = case.inputs(pg.size, torch.float32)
        mine = [x[pg.rank].to(pg.device) for x in whole]
        with torch.no_grad():
            found, eager = compiled(*mine), case.run(*mine)
        for a, b, c in zip(found, case.unsharded(*(x.double() for x in whole)), eager, strict=True):
            assert_near(a.cpu(), b[pg.rank], c.cpu(), signed=False, terms=b.abs().amax(), what=f"{rows} rows")
    (region,) = report().taken
    assert "shape=[-1, " in region.program


class Block(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.norm2 = torch.nn.RMSNorm(dim), torch.nn.RMSNorm(dim)
        self.up, self.down = (torch.nn.Linear(*sizes, bias=False) for sizes in ((dim, 2 * dim), (2 * dim, dim)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm2(x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def block(dtype: torch.dtype) -> Block:
    torch.manual_seed(3)
    return Block(32).to(dtype)


def step(model: torch.nn.Module, x: torch.Tensor, seed: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of the input and of all parameters, whole."""
    leaf = x.detach().clone().requires_grad_()
    y = model(leaf)
    given = [leaf, *model.parameters()]
    gradients = torch.autograd.grad(y, given, seed.to(y.dtype))
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in (y.detach(), *gradients)]


def test_parallelize_module(pg) -> None:
    if pg.size != 2:
        pytest.skip("needs 2 ranks")
    x, seed = (torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(k)) for k in (5, 6))
    right = step(block(torch.float64), x.double(), seed.double())
    eager = step(block(torch.float32), x, seed)
    mesh = init_device_mesh(pg.device.type, (2,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(block(torch.float32).to(pg.device), mesh, plan)
    found = step(torch.compile(model, backend=graph_backend, fullgraph=True), x.to(pg.device), seed.to(pg.device))
    for k, (a, b, c) in enumerate(zip(found, right, eager, strict=True)):
        assert_near(a.cpu(), b, c, n=8, signed=False, terms=b.abs().amax(), what=f"result {k}")
    inside = [r for r in report().taken if "all_reduce_sum" in r.program]
    assert {r.graph for r in inside} == {"forward", "backward"}, str(report())


def test_a_graph_from_the_cache_finds_its_group_by_name(pg, tmp_path, monkeypatch) -> None:
    """All of the graph is one region, so that no code but a call of it is made."""
    if pg.size < 2:
        pytest.skip("needs ranks")
    case = cases(pg.size)["all_reduce"]
    whole = case.inputs(pg.size, torch.float32)
    right, mine = case.unsharded(*(x.double() for x in whole)), [x[pg.rank].to(pg.device) for x in whole]
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", True)
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", True)
    with fresh_cache(dir=str(tmp_path)), torch.no_grad():
        eager = case.run(*mine)
        for graph in ("forward", "cached"):
            torch._dynamo.reset()
            report(clear=True)
            monkeypatch.setattr(region_op, "_programs", {})
            monkeypatch.setattr(rank_region_op, "_made", {})
            monkeypatch.setattr(ledger, "_noted", set())  # as in another process
            found = torch.compile(case.run, backend="shardfuse", fullgraph=True, options=ALL)(*mine)
            for a, b, c in zip(found, right, eager, strict=True):
                assert_near(a.cpu(), b[pg.rank], c.cpu(), signed=False, terms=b.abs().amax(), what=graph)
            (region,) = report().taken
            assert region.graph == graph
            assert "all_reduce_sum" in region.program


def test_a_rank_that_computes_something_else_is_told(pg) -> None:
    """What one rank has besides makes another program of it: no rank waits for ever, and all say how they differ."""
    if pg.size < 2:
        pytest.skip("needs ranks")
    case = cases(pg.size)["all_reduce"]

    def run(*given: torch.Tensor) -> torch.Tensor:
        normed, total = case.run(*given)
        return normed if pg.rank else normed + total.amax(-1, keepdim=True)

    mine = [x[pg.rank].to(pg.device) for x in case.inputs(pg.size, torch.float32)]
    with torch.no_grad(), pytest.raises(ProgramMismatchError, match="max"):
        torch.compile(run, backend=graph_backend, fullgraph=True)(*mine)
