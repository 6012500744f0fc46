"""Norms of images, and losses, of which no program holds what is reduced: ranks exchange as they read it again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh, nn

if TYPE_CHECKING:
    from conftest import ProcessGroup

    from shardfuse.mesh import symmetric

pytestmark = [pytest.mark.mpi, pytest.mark.multi_gpu]

Tensors = list[torch.Tensor]
EPS = 1e-5
WIDTHS = (torch.float64, torch.float32)
NORMS = {
    "batch norm": (lambda **where: nn.BatchNorm2d(6, EPS, input=Shard(0), **where), (32, 6, 56, 56), 0, 0),
    "group norm": (lambda **where: nn.GroupNorm(2, 8, EPS, input=Shard(2), **where), (2, 8, 128, 256), 2, 2),
    "uneven group norm": (lambda **where: nn.GroupNorm(2, 8, EPS, input=Shard(2), **where), (2, 8, 97, 256), 2, 2),
    "batch norm of five": (lambda **where: nn.BatchNorm2d(6, EPS, input=Shard(0), **where), (5, 6, 56, 56), 0, 0),
    "group norm of five": (lambda **where: nn.GroupNorm(2, 8, EPS, input=Shard(2), **where), (2, 8, 5, 256), 2, 2),
}
"""By name: the module, the sizes of the whole, the dim that ranks share, groups. Of two ranks each has over 64 KB, but
for the last two, of which the last of four ranks has nothing.
"""


def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int) -> torch.Tensor:
    if groups:
        return functional.group_norm(x, groups, weight, bias, EPS)
    return functional.batch_norm(x, None, None, weight, bias, True, 0.0, EPS)


def gradients(call: Callable[..., torch.Tensor], leaves: Tensors, upstream: torch.Tensor) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in leaves]
    made = call(*leaves)
    return [made.detach(), *torch.autograd.grad(made, leaves, upstream)]


class Trial:
    """One of ``NORMS`` on ranks: what it gives, and what float64 does."""

    def __init__(self, name: str, pg: ProcessGroup) -> None:
        make, self.shape, self.dim, self.groups = NORMS[name]
        self.mesh = DeviceMesh(range(pg.size))
        self.module = make(mesh=self.mesh, parameters="local", device=pg.device)
        made = torch.Generator().manual_seed(7)
        images = [torch.randn(self.shape, generator=made).bfloat16() for _ in range(2)]
        vectors = [torch.randn(self.shape[1], generator=made) for _ in range(2)]
        self.given = [images[0], *vectors, images[1]]
        with torch.no_grad():
            for parameter, value in zip(self.module.parameters(), vectors, strict=True):
                parameter.copy_(value)
        self.x, self.upstream = (self.piece(t).contiguous().to(pg.device) for t in images)

    def piece(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's, of an image; vectors are whole."""
        if t.ndim == 1:
            return t
        return self.mesh.shard_tensor(t, self.dim)

    def step(self) -> Tensors:
        parameters = list(self.module.parameters())
        x = self.x.detach().requires_grad_()
        made = self.module(x, unsharded=self.shape)
        return [made.detach(), *torch.autograd.grad(made, [x, *parameters], self.upstream)]

    def check(self) -> None:
        """Of an element near 0 terms as large as any in its row were added up; of a vector's gradient as many as a
        channel has elements."""
        count = prod(self.shape) // self.shape[1]
        for k, (found, wide, eager) in enumerate(zip(self.step(), *map(self._expected, WIDTHS), strict=True)):
            of_row = wide.ndim > 1
            terms = wide.abs().amax(-1, keepdim=True) if of_row else torch.full_like(wide, count)
            wide, eager, terms = (self.piece(t) for t in (wide, eager.to(found.dtype), terms))
            assert_near(found.cpu(), wide, eager, terms=terms, signed=False, what=f"result or gradient {k}")

    def _expected(self, dtype: torch.dtype) -> Tensors:
        x, weight, bias, upstream = (t.to(dtype) for t in self.given)
        return gradients(lambda *t: normed(*t, self.groups), [x, weight, bias], upstream)


@pytest.mark.parametrize("name", NORMS)
def test_out_of_step_and_in_graphs(
    name: str, arena: symmetric.Arena, pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are late now and then, and calls follow replays of a graph."""
    monkeypatch.setenv("SHARDFUSE_EXCHANGE", "symmetric")
    trial = Trial(name, pg)
    trial.check()
    before = sum(arena.order.launches().values())
    with torch.no_grad():
        trial.module(trial.x, unsharded=trial.shape)
    assert sum(arena.order.launches().values()) == before + 1, "one kernel, which exchanges"
    first, own = trial.step(), random.Random(pg.rank)
    for _ in range(300):
        found = trial.step()
        if own.random() < 0.03:
            time.sleep(own.random() * 0.003)
    assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = trial.step()
    for k in range(500):
        graph.replay()
        if k % 100 == 0:
            assert all(torch.equal(x, y) for x, y in zip(trial.step(), first, strict=True))
            time.sleep(own.random() * 0.01)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(replayed, first, strict=True))
    trial.check()


@pytest.mark.parametrize(("rows", "classes"), [(70, 40000), (70, 40001), (5, 128256), (5, 99999)])
def test_a_loss_of_many_classes(
    rows: int, classes: int, arena: symmetric.Arena, pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDFUSE_EXCHANGE", "symmetric")
    mesh = DeviceMesh(range(pg.size))
    loss = nn.CrossEntropyLoss(mesh=mesh, logits=Shard(-1), reduction="none")
    made = torch.Generator().manual_seed(3)
    logits, target = (
        torch.randn(rows, classes, generator=made).bfloat16() * 3,
        torch.randint(classes, (rows,), generator=made),
    )
    mine = mesh.shard_tensor(logits, 1).contiguous().to(pg.device).requires_grad_()
    before = sum(arena.order.launches().values())
    found = loss(mine, target.to(pg.device), unsharded=logits.shape)
    assert sum(arena.order.launches().values()) == before + 1, "one kernel, which exchanges"
    (of_logits,) = torch.autograd.grad(found.sum(), mine)
    wide = logits.double().requires_grad_()
    expected = functional.cross_entropy(wide, target, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), wide)
    assert_near(found.detach().cpu(), expected.detach(), n=4, rows=None, what="losses")
    assert_near(of_logits.cpu(), mesh.shard_tensor(gradient, 1), n=4, rows=None, what="gradient")
