"""Norms of partial sums whose rows are cut over the ranks, as sequence parallelism has them, by one kernel."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh
from shardfuse.frontend.explain import Explanation
from shardfuse.mesh.process import ProcessContext
from shardfuse.nn import AddRMSNorm, RMSNorm

SHAPES = ((3, 1, 96), (1, 3, 640), (2, 2, 40))
"""[sequence, batch, hidden] of a rank: several turns, several blocks of a row, and one that a row does not fill."""


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)


class Rank(Protocol):
    """Of a world.  device: where its tensors live."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class Norm:
    """Of what all ranks draw alike, on this rank.

    is_of_sums: of their summands and a residual, or of that alone?  along: the dim of which a rank has a part.
    """

    def __init__(self, context: Rank, dtype: torch.dtype, hidden: int, *, is_of_sums: bool, along: int = 0) -> None:
        self.rank, self.ranks, self.device, self.dtype = context.rank, dist.get_world_size(), context.device, dtype
        self.is_of_sums, self.along = is_of_sums, along
        placed = {"output": Replicate(), "output_grad": Partial(), "parameters": "local"}
        mesh = DeviceMesh(range(self.ranks))
        if is_of_sums:
            placed |= {"input": Partial(), "residual": Shard(along)}
            self.module = AddRMSNorm(hidden, 1e-5, bias=True, mesh=mesh, **placed)
        else:
            self.module = RMSNorm(hidden, 1e-5, mesh=mesh, input=Shard(along), **placed)
        self.module.to(self.device)
        with torch.no_grad():
            for k, p in enumerate(self.module.parameters()):
                p.copy_(drawn(hidden, seed=90 + k, dtype=torch.float32))

    def given(self, sequence: int, batch: int, seed: int) -> list[torch.Tensor]:
        """The summands of all ranks, and the residual, whole."""
        shape, (hidden,) = [sequence, batch], self.module.normalized_shape
        shape[self.along] *= self.ranks
        parts = drawn(self.ranks, *shape, hidden, seed=seed, dtype=self.dtype)
        return [parts, drawn(*shape, hidden, seed=seed + 1, dtype=self.dtype)]

    def here(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank has of it."""
        parts, residual = given
        own = residual.chunk(self.ranks, self.along)[self.rank].contiguous()
        return [t.to(self.device) for t in ([parts[self.rank], own] if self.is_of_sums else [own])]

    def call(self, own: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            found = self.module(*own)
        return found if isinstance(found, tuple) else (found,)

    def run(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t.cpu() for t in self.call(self.here(given))]

    def check(self, sequence: int, batch: int, seed: int) -> None:
        given = self.given(sequence, batch, seed)
        found = self.run(given)
        wide, eager = (self.expected([t.to(dtype) for t in given]) for dtype in (torch.float64, torch.float32))
        for k, (x, y, z) in enumerate(zip(found, wide, eager, strict=True)):
            assert_near(x, y, z.to(self.dtype), n=3, what=f"output {k} of {list(given[0].shape)} on rank {self.rank}")

    def expected(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of what is given in another type; the sum of the ranks is rounded to the module's."""
        parts, residual = given
        weight, *bias = (p.detach().cpu().to(parts.dtype) for p in self.module.parameters())
        total = residual
        if self.is_of_sums:
            total = parts.sum(0).to(self.dtype).to(parts.dtype) + bias[0] + residual
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight
        return [normed, total.chunk(self.ranks, self.along)[self.rank]] if self.is_of_sums else [normed]

    def explained(self) -> Explanation:
        """Of the last sizes."""
        *_, bound = (b for b in self.module._bound.values() if b is not None)  # pyright: ignore[reportPrivateUsage]
        return bound.op.forward.explain()


def run_scattered(context: ProcessContext) -> None:
    for dtype, shapes in ((torch.bfloat16, SHAPES[:2]), (torch.float16, SHAPES[2:])):
        for sequence, batch, hidden in shapes:
            check_one_kernel(Norm(context, dtype, hidden, is_of_sums=True), sequence, batch)
    norm = Norm(context, torch.bfloat16, 96, is_of_sums=True)
    for k, (sequence, batch) in enumerate(((1, 1), (2, 2), (1, 1))):  # turns go on from call to call, of whatever size
        norm.check(sequence, batch, seed=10 + k)
    strided(norm)
    check_gradients(norm, 2, 2)
    check_one_kernel(Norm(context, torch.bfloat16, 96, is_of_sums=True, along=1), 2, 2)
    check_one_kernel(Norm(context, torch.bfloat16, 40, is_of_sums=False, along=1), 3, 1)


def check_gradients(norm: Norm, sequence: int, batch: int) -> None:
    """Of all that is given, and of weight and bias; they are of the rounded sum, which is what the forward keeps."""
    given = norm.given(sequence, batch, seed=3)
    leaves = [t.requires_grad_() for t in norm.here(given)]
    results = norm.module(*leaves)
    shapes = [t.shape for t in results]
    upstream = [drawn(norm.ranks, *shape, seed=40 + k, dtype=norm.dtype) for k, shape in enumerate(shapes)]
    # the gradient of what all ranks have is a partial sum, that of the rest is of this rank's rows
    found = torch.autograd.grad(results, [*leaves, *norm.module.parameters()], [u[norm.rank] for u in upstream])
    wide, eager = (gradients(norm, given, upstream, dtype) for dtype in (torch.float64, torch.float32))
    for k, (x, (y, terms), (z, _)) in enumerate(zip(found, wide, eager, strict=True)):
        assert_near(x.cpu(), y, z.to(x.dtype), n=4, terms=terms, what=f"gradient {k}")


def gradients(
    norm: Norm, given: list[torch.Tensor], upstream: list[torch.Tensor], dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of x, the residual, weight and bias in another type, each with the sizes of the terms of its sums."""
    weight, bias = (p.detach().cpu().to(dtype) for p in norm.module.parameters())
    parts, residual = (t.to(dtype) for t in given)
    total = parts.sum(0).to(norm.dtype).to(dtype) + bias + residual
    rstd = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)
    normed = total.to(norm.dtype).to(dtype) * rstd
    of_normed = upstream[0].to(dtype).sum(0).to(norm.dtype).to(dtype)
    of_total = torch.cat([*upstream[1].to(dtype)], norm.along)
    weighted = of_normed * weight
    of_sum = rstd * (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) + of_total
    sizes = rstd * (weighted.abs() + normed.abs() * (weighted * normed).abs().mean(-1, keepdim=True)) + of_total.abs()
    own, own_sizes = (t.chunk(norm.ranks, norm.along)[norm.rank] for t in (of_sum, sizes))
    rows = (0, 1)
    of_weight = (of_normed * normed).sum(rows), (of_normed * normed).abs().sum(rows)
    return [(of_sum, sizes), (own, own_sizes), of_weight, (of_sum.sum(rows), sizes.sum(rows))]


def check_one_kernel(norm: Norm, sequence: int, batch: int) -> None:
    norm.check(sequence, batch, seed=1)
    told = norm.explained()
    assert (told.kernels, len(told.collectives)) == (1, 0), told


def strided(norm: Norm) -> None:
    """A summand whose rows do not lie one behind the other."""
    given = norm.given(2, 2, seed=77)
    wide = norm.expected([t.double() for t in given])
    own = given[0][norm.rank].to(norm.device)
    apart = own.transpose(0, 1).contiguous().transpose(0, 1)
    residual = given[1].chunk(norm.ranks, norm.along)[norm.rank].to(norm.device)
    for _ in range(3):
        with torch.no_grad():
            found = norm.module(apart, residual)
        for k, x in enumerate(found):
            eager = norm.expected([t.float() for t in given])[k].to(norm.dtype)
            assert_near(x.cpu(), wide[k], eager, n=3, what=f"output {k}, strided")
