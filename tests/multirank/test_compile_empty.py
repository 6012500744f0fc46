"""Inductor's code on a rank whose shard is empty: what it computes is never read there, and is called all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import Shard

from shardfuse import DeviceMesh
from shardfuse.compile import report
from shardfuse.nn import LayerNorm, RMSNorm, Softmax

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("nothing_compiled")]
COLUMNS = 7
U = 2.0**-24


def own(whole: Tensor, dim: int, pg) -> Tensor:
    """The piece of one element on the first rank; the others have none."""
    return whole.narrow(dim, 0, 1 if pg.rank == 0 else 0).clone().to(pg.device)


@pytest.mark.parametrize("backend", ["inductor", "shardfuse"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_norm_that_no_element_of_this_rank_is_read_of(backend: str, calls: int, pg) -> None:
    norm = RMSNorm(1, mesh=DeviceMesh(range(pg.size)), input=Shard(-1))
    whole = torch.arange(1, 5, dtype=torch.float64).view(4, 1)
    compiled = torch.compile(lambda x: norm(x) * 2, backend=backend, fullgraph=True)
    right = 2 * whole / (whole.square() + norm.eps).sqrt()
    with torch.no_grad():
        for k in range(calls):
            x = own(whole.float() + 0 * k, -1, pg)
            found = compiled(x)
            torch.testing.assert_close(found.cpu().double(), own(right, -1, pg).cpu(), rtol=8 * U, atol=0)


class Block(nn.Module):
    """Two norms of one tensor, of which Inductor could call either first, between two modules."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first = LayerNorm(COLUMNS, mesh=mesh, input=Shard(0), parameters="local")
        self.one, self.two = (RMSNorm(COLUMNS, mesh=mesh, input=Shard(0), parameters="local") for _ in range(2))
        self.last = Softmax(-1, mesh=mesh, input=Shard(0))

    def forward(self, x: Tensor) -> Tensor:
        size = (1, COLUMNS)
        y = self.first(x, unsharded=size) * 2
        return self.last(self.one(y, unsharded=size) + self.two(y * y, unsharded=size), unsharded=size)


def unsharded(x: Tensor, weights: list[Tensor]) -> Tensor:
    y = nn.functional.layer_norm(x, (COLUMNS,), weights[0], weights[1]) * 2
    one, two = (nn.functional.rms_norm(z, (COLUMNS,), w, 1e-6) for z, w in zip((y, y * y), weights[2:], strict=True))
    return torch.softmax(one + two, -1)


@pytest.mark.parametrize("backend", ["inductor", "shardfuse"])
def test_a_step_of_which_a_rank_has_no_row(backend: str, pg) -> None:
    torch.manual_seed(0)
    block = Block(DeviceMesh(range(pg.size))).to(pg.device)
    whole, seed = torch.randn(2, 1, COLUMNS, dtype=torch.float64)
    wide = whole.requires_grad_()
    weights = [p.detach().cpu().double().requires_grad_() for p in block.parameters()]
    expected = unsharded(wide, weights)
    gradients = torch.autograd.grad(expected, [wide, *weights], seed)
    x = own(whole.detach().float(), 0, pg).requires_grad_()
    found = torch.compile(block, backend=backend, fullgraph=True)(x)
    found.backward(own(seed.float(), 0, pg))
    pairs = [(found, own(expected.detach(), 0, pg)), (x.grad, own(gradients[0], 0, pg))]
    pairs += zip((p.grad for p in block.parameters()), gradients[1:], strict=True)
    for mine, right in pairs:
        assert mine is not None
        torch.testing.assert_close(mine.detach().cpu().double(), right.cpu(), rtol=0, atol=128 * U)


def test_a_region_with_a_collective_of_which_this_rank_reads_no_row(pg) -> None:
    if pg.size < 2:
        pytest.skip("needs ranks")
    group = torch.distributed.group.WORLD

    def step(x: Tensor) -> Tensor:
        whole = nn.functional.rms_norm(collectives.all_reduce(x * 3, "sum", group), (COLUMNS,), eps=0.0)
        return (whole @ eye).narrow(0, 0, 1 if pg.rank == 0 else 0) * 5

    eye = torch.eye(COLUMNS, device=pg.device)  # a product is part of no region: what follows leaves them alike
    x = torch.full((2, COLUMNS), 1.0 + pg.rank, device=pg.device)
    with torch.no_grad():
        found = torch.compile(step, backend="shardfuse", options={"shardfuse.take": "all"}, fullgraph=True)(x)
    assert [line for r in report().taken for line in r.collectives if line.endswith("inside")], str(report())
    assert torch.equal(found.cpu(), own(torch.full((2, COLUMNS), 5.0), 0, pg).cpu())
