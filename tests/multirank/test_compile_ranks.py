"""``torch.compile(backend="shardfuse")`` of tensor-parallel functions: collectives inside of regions, on real ranks."""

from __future__ import annotations

import pytest
import torch
from compile_graphs import assert_near, graph_backend
from rank_graphs import cases, results, seeds_of
from torch._inductor import config

from shardfuse.compile import report

pytestmark = pytest.mark.mpi
ALL = {"shardfuse.take": "all"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    report(clear=True)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
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
    assert len(inside) == 2 * len(case.collectives), str(report())
    for k, (a, b, c) in enumerate(zip(found, right, eager, strict=True)):
        assert_near(a.cpu(), b[pg.rank], c.cpu(), n=4, signed=False, terms=b.abs().amax(), what=f"result {k}")
