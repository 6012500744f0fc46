"""Norms of images that are sharded over ranks: what ``images`` measures, as ``exchange`` does norms of rows.

Of a batch norm ranks have samples of the batch, of a group norm rows of each image; statistics are those of the whole.
Gradients of weight and bias are sums over all ranks, for every implementation: of a batch norm shardfuse has them of
the sums that dx takes, the others by a collective of their own.  Ranks have as much each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import Shard
from torch.nn import functional

from shardfuse.nn import BatchNorm2d, GroupNorm

from .exchange_ranks import COLLECTIVES, NCCL, Ranks, asked, compiled, exchanging_by, with_gradients
from .exchange_verdicts import Measured, Run
from .workload import OWN, Case

EPS = 1e-5
MOMENTUM = 0.1
SYNCHRONISED = "torch.nn.SyncBatchNorm"


@dataclass(frozen=True)
class Norm:
    """Of one case.  dim: the one that ranks have parts of.  groups: of channels; 0 is a batch norm."""

    case: Case
    ranks: Ranks
    dim: int
    groups: int

    @property
    def channels(self) -> int:
        return self.case.shape[1]

    def module(self, eps: float) -> torch.nn.Module:
        """shardfuse's, in training."""
        where = {"device": self.ranks.device, "mesh": self.ranks.mesh, "input": Shard(self.dim), "parameters": "local"}
        if self.groups:
            return GroupNorm(self.groups, self.channels, eps, **where)
        return BatchNorm2d(self.channels, eps, MOMENTUM, **where)

    def unsharded(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.groups:
            return functional.group_norm(x, self.groups, weight, bias, EPS)
        return functional.batch_norm(x, None, None, weight, bias, True, 0.0, EPS)

    def sums(self, x: Tensor) -> Tensor:
        """[2, ...] in float32: what this rank has of each statistic's elements, and of their squares."""
        wide = self._by_statistic(x.float())
        axes = (0, 2, 3) if not self.groups else (2, 3, 4)
        return torch.stack([wide.sum(axes), wide.square().sum(axes)])

    def normed(self, sums: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *running: Tensor) -> Tensor:
        """sums: of all ranks.  running: mean and variance of a batch norm, which are moved."""
        count = self.ranks.mesh.size * x.numel() / sums[0].numel()
        mean, square = sums / count
        var = square - mean * mean
        if running:
            with torch.no_grad():
                running[0].lerp_(mean.detach(), MOMENTUM)
                running[1].lerp_(var.detach() * (count / (count - 1)), MOMENTUM)
        mean, rstd = (t[(..., None, None) + ((None,) if self.groups else ())] for t in (mean, torch.rsqrt(var + EPS)))
        normed = ((self._by_statistic(x.float()) - mean) * rstd).reshape(x.shape)
        return (normed * weight[:, None, None] + bias[:, None, None]).to(x.dtype)

    def _by_statistic(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1)) if self.groups else x

    def running(self) -> list[Tensor]:
        """Mean and variance, of a batch norm."""
        return [torch.zeros(self.channels, device=self.ranks.device) for _ in range(0 if self.groups else 2)]


def image_norm(case: Case, ranks: Ranks, *, dim: int, is_grouped: bool) -> Measured:
    """The forward of training, without gradients."""
    norm = Norm(case, ranks, dim, case.groups if is_grouped else 0)
    whole, mine, _ = _drawn(norm)
    running = norm.running()
    sums = torch.empty_like(norm.sums(mine[0]))
    last = compiled(norm.normed)

    @compiled
    def first(out: Tensor, x: Tensor) -> None:
        out.copy_(norm.sums(x))

    def by_nccl() -> tuple[Tensor]:
        first(sums, mine[0])
        dist.all_reduce(sums)
        return (last(sums, *mine, *running),)

    runs: dict[str, Run] = {}
    for name, module in _own(norm, mine).items():
        runs[name] = partial(_alone, module, mine[0])
    runs[NCCL] = by_nccl
    if (theirs := _synchronised(norm, mine)) is not None:
        runs[SYNCHRONISED] = partial(_alone, theirs, mine[0])
    wide, eager = (norm.unsharded(*(t.to(dtype) for t in whole)) for dtype in (torch.float64, torch.float32))
    return Measured(runs, (_piece(norm, wide),), (_piece(norm, eager).to(case.dtype),))


def image_norm_backward(case: Case, ranks: Ranks, *, dim: int, is_grouped: bool) -> Measured:
    """Forward, and gradients of x, weight and bias; the peer is one graph for Inductor, but for the latter's sums."""
    norm = Norm(case, ranks, dim, case.groups if is_grouped else 0)
    whole, mine, upstream = _drawn(norm)
    given, running = _piece(norm, upstream).contiguous(), norm.running()
    world = dist.group.WORLD
    assert world is not None, "ranks have a group"

    def in_torch(x: Tensor, weight: Tensor, bias: Tensor, *running: Tensor) -> Tensor:
        return norm.normed(collectives.all_reduce(norm.sums(x), "sum", world), x, weight, bias, *running)

    whole_step = compiled(in_torch)
    leaves = tuple(t.clone().requires_grad_() for t in mine)
    runs: dict[str, Run] = {}
    for name, module in _own(norm, mine, given).items():
        runs[name] = _step(module, leaves[0], given)
    runs[NCCL] = _summed(with_gradients(lambda: whole_step(*leaves, *running), leaves, given))
    if (theirs := _synchronised(norm, mine)) is not None:
        runs[SYNCHRONISED] = _summed(_step(theirs, leaves[0], given))
    wide, eager = (
        _gradients(norm, [t.to(dtype) for t in (*whole, upstream)]) for dtype in (torch.float64, torch.float32)
    )
    rounded = tuple(t.to(case.dtype) if t.ndim > 1 else t for t in eager)
    return Measured(runs, wide, rounded, has_gradients=True)


def _alone(module: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor]:
    return (module(x),)


def _step(module: torch.nn.Module, x: Tensor, given: Tensor) -> Run:
    return with_gradients(lambda: module(x), (x, *module.parameters()), given)


def _summed(run: Run) -> Run:
    """Its gradients of weight and bias summed over ranks, in one collective."""

    def summed() -> Sequence[Tensor]:
        *rest, weight, bias = run()
        both = torch.stack([weight, bias])
        dist.all_reduce(both)
        return *rest, *both

    return summed


def _drawn(norm: Norm) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """x, weight and bias, unsharded; this rank's; what comes back from behind the norm, unsharded."""
    case, ranks = norm.case, norm.ranks
    x, upstream = (ranks.drawn(case.shape, case.dtype, seed) for seed in (1000, 1010))
    vectors = [ranks.drawn((norm.channels,), torch.float32, seed) for seed in (1001, 1002)]
    return [x, *vectors], [_piece(norm, x).contiguous(), *vectors], upstream


def _piece(norm: Norm, x: Tensor) -> Tensor:
    return norm.ranks.mesh.shard_tensor(x, norm.dim)


def _own(norm: Norm, mine: Sequence[Tensor], given: Tensor | None = None) -> dict[str, torch.nn.Module]:
    """By kernels that exchange, and with collectives; the first call of each makes its fusions.

    Modules with equal settings share their fusions: the last one's eps is therefore another, by less than any result
    tells.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, how, eps in ((OWN, asked(), EPS), (COLLECTIVES, "nccl", EPS * (1 + 2**-40))):
        module = norm.module(eps)
        _set(module, mine[1:])
        with exchanging_by(how), torch.set_grad_enabled(given is not None):
            if given is None:
                module(mine[0])
            else:
                _step(module, mine[0].clone().requires_grad_(), given)()
        found[name] = module
    return found


def _synchronised(norm: Norm, mine: Sequence[Tensor]) -> torch.nn.Module | None:
    """torch's, which takes batches on GPUs."""
    if norm.groups or norm.ranks.device.type != "cuda":
        return None
    made = torch.nn.SyncBatchNorm(norm.channels, EPS, MOMENTUM).to(norm.ranks.device)
    _set(made, mine[1:])
    return made


def _set(module: torch.nn.Module, vectors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), vectors, strict=True):
            parameter.copy_(value)


def _gradients(norm: Norm, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of unsharded images: this rank's part of the result and of x's gradient, and the vectors' gradients."""
    *inputs, upstream = tensors
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        made, of_x, *of_vectors = with_gradients(lambda: norm.unsharded(*leaves), leaves, upstream)()
    return _piece(norm, made), _piece(norm, of_x), *of_vectors


IMAGES: dict[str, tuple[str, Callable[[Case, Ranks], Measured]]] = {
    "batch_norm": ("batch norm, samples sharded", partial(image_norm, dim=0, is_grouped=False)),
    "batch_norm_backward": (
        "batch norm, samples sharded, forward + backward", partial(image_norm_backward, dim=0, is_grouped=False)
    ),
    "group_norm": ("group norm, image rows sharded", partial(image_norm, dim=2, is_grouped=True)),
    "group_norm_backward": (
        "group norm, image rows sharded, forward + backward", partial(image_norm_backward, dim=2, is_grouped=True)
    ),
}  # fmt: skip
"""By the name that ``--only`` takes: the title of its rows, and what makes it."""
