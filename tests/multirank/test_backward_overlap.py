"""A norm's backward beside the matmul of the weight's gradient behind it: right numbers, and only where it may be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh
from shardfuse.nn import AddRMSNorm, backward_overlap
from shardfuse.nn import linear as linear_module
from shardfuse.nn.functional import linear

pytestmark = pytest.mark.mpi

BATCH, SEQUENCE, HIDDEN, COLUMNS = 2, 8, 64, 48
SLEEP = 40_000_000
"""Cycles of a GPU, some 20 ms: longer than all that a step here does."""
Way = Callable[[Callable[..., Tensor], list[Tensor]], Tensor]


def run_plainly(step: Callable[..., Tensor], tensors: list[Tensor]) -> Tensor:
    return step(*tensors)


def run_checkpointed(step: Callable[..., Tensor], tensors: list[Tensor]) -> Tensor:
    return checkpoint(step, *tensors, use_reentrant=False)


def run_offloaded(step: Callable[..., Tensor], tensors: list[Tensor]) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return step(*tensors)


class Model:
    """Twice AddRMSNorm, whose input is partial and whose residual is sharded along the sequence, and a linear layer.

    The first layer's results are partial sums for the second norm; the second's are columns of this rank.
    """

    def __init__(self, pg) -> None:
        self.mesh, self.device = DeviceMesh(list(range(pg.size))), pg.device
        generator = torch.Generator().manual_seed(3)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().to(pg.device)

        self.summands = drawn(pg.size, BATCH, SEQUENCE, HIDDEN)
        self.residual = drawn(BATCH, SEQUENCE, HIDDEN)
        self.weights = drawn(pg.size, HIDDEN, HIDDEN) / 8, drawn(pg.size, COLUMNS, HIDDEN)
        self.given = drawn(pg.size, BATCH, SEQUENCE, COLUMNS)
        self.norm = AddRMSNorm(
            HIDDEN, mesh=self.mesh, input=Partial(), residual=Shard(1), output=Replicate(), output_grad=Partial(),
            parameters="local",
        ).to(pg.device)  # fmt: skip
        self.rank = pg.rank

    def gradients(self, way: Way, hook: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        """Of this rank's summand, residual and weights."""
        weights = [w[self.rank].float() for w in self.weights]
        leaves = [self.summands[self.rank], self.mesh.shard_tensor(self.residual, 1), *weights]
        leaves = [t.detach().clone().requires_grad_() for t in leaves]

        def step(x: Tensor, residual: Tensor, first: Tensor, second: Tensor) -> Tensor:
            normed, residual = self.norm(x, residual)
            if hook is not None:
                normed.register_hook(hook)
            y = linear(normed, first)
            y.register_hook(_slept)
            y = linear(self.norm(y, residual)[0], second)
            return (y * self.given[self.rank]).sum()

        return list(torch.autograd.grad(way(step, leaves), leaves))

    def expected(self) -> list[Tensor]:
        """The same of the unsharded tensors in float64; of torch's in bfloat16 behind it, for its own error."""
        found: list[list[Tensor]] = []
        for dtype in (torch.float64, torch.bfloat16):
            leaves = [t.detach().to(dtype).requires_grad_() for t in (self.summands, self.residual, *self.weights)]
            summands, residual, first, second = leaves
            residual = summands.sum(0) + residual
            for weight in (first, second):
                y = torch.einsum("bsk,rnk->rbsn", functional.rms_norm(residual, (HIDDEN,), eps=self.norm.eps), weight)
                residual = residual + y.sum(0) if weight is first else residual
            of = torch.autograd.grad((y * self.given.to(dtype)).sum(), leaves)
            found.append([of[0][self.rank], self.mesh.shard_tensor(of[1], 1), of[2][self.rank], of[3][self.rank]])
        return [t for pair in zip(*found, strict=True) for t in pair]


def _slept(gradient: Tensor) -> Tensor:
    """Work on the stream before the gradient, so that who does not wait for it reads what is not there yet."""
    if gradient.is_cuda:
        torch.cuda._sleep(SLEEP)
    return gradient * 1


def run(pg, monkeypatch: pytest.MonkeyPatch, way: Way, hook: Callable[[Tensor], Tensor] | None = None) -> int:
    """How many backwards (of the first norm) ran beside a matmul; the gradients are right in each of some runs."""
    model, count = Model(pg), 0
    monkeypatch.setattr(linear_module, "LONG_MATMUL", 0)
    beside = backward_overlap.beside

    def slow(event: torch.cuda.Event, device: torch.device, made: Callable[[], list[Tensor]]) -> list[Tensor]:
        nonlocal count
        count += 1

        def late() -> list[Tensor]:
            torch.cuda._sleep(SLEEP)
            return made()

        return beside(event, device, late)

    monkeypatch.setattr(backward_overlap, "beside", slow)
    expected = model.expected()
    for _ in range(3):
        found = model.gradients(way, hook)
        for k, name in enumerate(("summand", "residual", "first weight", "second weight")):
            wide, eager = expected[2 * k : 2 * k + 2]
            assert_near(found[k].bfloat16(), wide, eager, n=2, what=name)
    return count


def test_beside_the_matmul(pg, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(pg, monkeypatch, run_plainly) == (3 if pg.device.type == "cuda" else 0)


@pytest.mark.parametrize("way", [run_checkpointed, run_offloaded])
def test_tensors_that_are_made_again_are_waited_for(way: Way, pg, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(pg, monkeypatch, way) == 0


@pytest.mark.parametrize("hook", [lambda g: g * 1, lambda g: g.mul_(1)], ids=["replaced", "changed"])
def test_gradients_of_others_are_waited_for(
    hook: Callable[[Tensor], Tensor], pg, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(pg, monkeypatch, run_plainly, hook) == 0
