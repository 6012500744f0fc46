"""Tensor-parallel functions with functional collectives in them, and the same unsharded on all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

ops = torch.ops._c10d_functional  # in no version deprecated, as the Python functions are in some
F = torch.nn.functional
DIM = 64
Tensors = tuple[torch.Tensor, ...]


def all_reduce(x: torch.Tensor, group: str, reduce: str = "sum") -> torch.Tensor:
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), reduce, group))


def reduce_scatter(x: torch.Tensor, group: str) -> torch.Tensor:
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", dist.get_world_size(), group))


def all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), dist.get_world_size(), group))


class AllReduce(torch.autograd.Function):
    """The sum over ranks, each of which has a loss of its own."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: str, reduce: str = "sum") -> torch.Tensor:
        ctx.group = group
        return all_reduce(x, group, reduce)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_reduce(gradient, ctx.group), None, None


class SumAlike(torch.autograd.Function):
    """The sum over ranks of what they go on with alike: its gradient is alike too."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: str) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Alike(torch.autograd.Function):
    """What ranks have alike, for products of their own: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradient, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather(gradient, ctx.group), None


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter(gradient, ctx.group), None


def name_of_world() -> str:
    return dist.group.WORLD.group_name


# what a rank does; and what all of them do, on tensors with a leading axis of the ranks


def reduced_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    total = AllReduce.apply(x, name_of_world()) + residual
    return F.rms_norm(total, (DIM,), weight, 1e-6), total


def reduced_norm_unsharded(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    total = x.sum(0) + residual
    return F.rms_norm(total, (DIM,), None, 1e-6) * weight[:, None], total


def between_products(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """Of tensor parallelism: between a row-parallel product and a column-parallel one."""
    total = SumAlike.apply(x, name_of_world()) + residual
    return (Alike.apply(F.rms_norm(total, (DIM,), weight, 1e-6), name_of_world()),)


def between_products_unsharded(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    normed = F.rms_norm(x.sum(0) + residual[0], (DIM,), weight[0], 1e-6)
    return (normed.expand(len(x), *normed.shape),)


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
    """``shapes``: of a rank's tensors.  ``collectives``: of its forward.  ``alike``: inputs that ranks have alike."""

    run: Callable[..., Tensors]
    unsharded: Callable[..., Tensors]
    shapes: tuple[tuple[int, ...], ...]
    collectives: tuple[str, ...]
    alike: tuple[int, ...] = ()

    def inputs(self, ranks: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """Of all ranks, with a leading axis."""
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(ranks, *s, generator=generator).to(dtype) for s in self.shapes]
        return [x[:1].expand_as(x).contiguous() if k in self.alike else x for k, x in enumerate(made)]


def cases(ranks: int, rows: int = 8) -> dict[str, Case]:
    whole, part = (rows, DIM), (rows // ranks, DIM)
    return {
        "all_reduce": Case(reduced_norm, reduced_norm_unsharded, (whole, whole, (DIM,)), ("all_reduce",)),
        "products": Case(
            between_products, between_products_unsharded, (whole, whole, (DIM,)), ("all_reduce",), alike=(1, 2)
        ),
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
