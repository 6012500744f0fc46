"""Tensor-parallel functions with functional collectives in them, and the same unsharded on all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

F = torch.nn.functional
DIM = 64
Tensors = tuple[torch.Tensor, ...]


class AllReduce(torch.autograd.Function):
    """The sum over ranks, each of which has a loss of its own."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: str, reduce: str = "sum") -> torch.Tensor:
        ctx.group = group
        return collectives.all_reduce(x, reduce, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return collectives.all_reduce(gradient.contiguous(), "sum", ctx.group), None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return collectives.reduce_scatter_tensor(x, "sum", 0, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return collectives.all_gather_tensor(gradient.contiguous(), 0, ctx.group), None


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return collectives.all_gather_tensor(x, 0, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return collectives.reduce_scatter_tensor(gradient.contiguous(), "sum", 0, ctx.group), None


def name_of_world() -> str:
    return dist.group.WORLD.group_name


# what a rank does; and what all of them do, on tensors with a leading axis of the ranks


def reduced_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    total = AllReduce.apply(x, name_of_world()) + residual
    return F.rms_norm(total, (DIM,), weight, 1e-6), total


def reduced_norm_unsharded(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    total = x.sum(0) + residual
    return F.rms_norm(total, (DIM,), None, 1e-6) * weight[:, None], total


def scattered_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """Of sequence parallelism: the norm of this rank's rows, gathered."""
    total = ReduceScatter.apply(x, name_of_world()) + residual
    return AllGather.apply(F.layer_norm(total.float(), (DIM,), weight.float()).to(x.dtype), name_of_world()), total


def scattered_norm_unsharded(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    ranks = len(x)
    total = x.sum(0).unflatten(0, (ranks, -1)) + residual
    normed = (F.layer_norm(total, (DIM,)) * weight[:, None]).flatten(0, 1)
    return normed.expand(ranks, *normed.shape), total


@dataclass(frozen=True)
class Case:
    """``shapes``: of a rank's tensors.  ``regions``: of its forward and backward, each with ``collectives``."""

    run: Callable[..., Tensors]
    unsharded: Callable[..., Tensors]
    shapes: tuple[tuple[int, ...], ...]
    collectives: tuple[str, ...]

    def inputs(self, ranks: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """Of all ranks, with a leading axis."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(ranks, *s, generator=generator).to(dtype) for s in self.shapes]


def cases(ranks: int, rows: int = 8) -> dict[str, Case]:
    whole, part = (rows, DIM), (rows // ranks, DIM)
    return {
        "all_reduce": Case(reduced_norm, reduced_norm_unsharded, (whole, whole, (DIM,)), ("all_reduce",)),
        "reduce_scatter": Case(
            scattered_norm,
            scattered_norm_unsharded,
            (whole, part, (DIM,)),
            ("reduce_scatter_tensor", "all_gather_into_tensor"),
        ),
    }


def results(
    run: Callable[..., Tensors], inputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs, and the gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = run(*leaves)
    gradients = torch.autograd.grad(outputs, leaves, [s.to(o.dtype) for s, o in zip(seeds, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *gradients]


def seeds_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(o.shape, generator=generator) for o in outputs]
