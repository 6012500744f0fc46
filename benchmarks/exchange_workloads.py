"""What ``exchange`` measures: norms and a softmax over a sharded axis, and partial sums with a norm behind them.

Each workload is a function of a case, the unsharded rows and columns, and of the ranks: it draws the same inputs on
all, and gives what each implementation runs of them.  Peers get what they gain most by: statistics in one collective,
sums in place, kernels that Inductor compiles for the sizes of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import Shard
from torch.nn import functional

from shardfuse import DeviceMesh, FusionDefinition
from shardfuse.nn import RMSNorm

from .exchange_fusions import (
    EPS,
    FLOAT8,
    add_rms_norm_fusion,
    layer_norm_fusion,
    rms_norm_fusion,
    sequence_fusion,
    softmax_fusion,
)
from .exchange_ranks import COLLECTIVES, NCCL, ONE_SHOT, TWO_SHOT, Ranks, asked, compiled, exchanging_by, with_gradients
from .exchange_verdicts import Measured, Run
from .workload import OWN, Case

SCALE = 0.01
"""Of what is quantised: of normal rows and weights 4 results in 1000 are cut off at float8's largest number, 448."""


def rms_norm(case: Case, ranks: Ranks) -> Measured:
    whole = rows_and_vectors(case, ranks, 1)
    mine = ranks.parts(whole)

    def local(x: Tensor, weight: Tensor) -> Tensor:
        return x.float().square().sum(-1)[None]

    def apply(sums: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _scaled(x, torch.rsqrt(sums[0, :, None] / case.columns + EPS), weight)

    runs = _own(rms_norm_fusion, case, ranks, mine) | _by_sums(local, apply, 1, case, ranks, mine)
    return Measured(runs, ranks.parts([_rms_norm(*_wide(whole))]), ranks.parts([_rms_norm(*whole)]))


def layer_norm(case: Case, ranks: Ranks) -> Measured:
    """Of rows whose mean is 1."""
    x, *vectors = rows_and_vectors(case, ranks, 2)
    whole = (x + 1, *vectors)
    mine = ranks.parts(whole)

    def local(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide = x.float()
        return torch.stack([wide.sum(-1), wide.square().sum(-1)])

    def apply(sums: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, square = sums[0, :, None] / case.columns, sums[1, :, None] / case.columns
        normed = (x.float() - mean) * torch.rsqrt(square - mean * mean + EPS)
        return (normed * weight.float() + bias.float()).to(x.dtype)

    def in_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, weight.shape, weight, bias, EPS)

    runs = _own(layer_norm_fusion, case, ranks, mine) | _by_sums(local, apply, 2, case, ranks, mine)
    return Measured(runs, ranks.parts([in_torch(*_wide(whole))]), ranks.parts([in_torch(*whole)]))


def softmax(case: Case, ranks: Ranks) -> Measured:
    whole = ranks.drawn(case.shape, case.dtype, 1000)
    mine = ranks.part(whole)
    gathered = torch.empty(ranks.mesh.size * 2, case.shape[0], device=ranks.device)

    def local(x: Tensor) -> Tensor:
        top = x.float().amax(-1)
        return torch.stack([top, (x.float() - top[:, None]).exp().sum(-1)])

    def apply(of_ranks: Tensor, x: Tensor) -> Tensor:
        tops, sums = of_ranks[0::2], of_ranks[1::2]
        top = tops.amax(0)
        total = (sums * (tops - top).exp()).sum(0)
        return ((x.float() - top[:, None]).exp() / total[:, None]).to(x.dtype)

    first, last = compiled(local), compiled(apply)

    def by_nccl() -> tuple[Tensor]:
        dist.all_gather_into_tensor(gathered, first(mine))
        return (last(gathered, mine),)

    wide, eager = (ranks.parts([torch.softmax(x, -1)]) for x in (whole.double(), whole))
    return Measured({**_own(softmax_fusion, case, ranks, [mine]), NCCL: by_nccl}, wide, eager, relative=True)


def rms_norm_backward(case: Case, ranks: Ranks) -> Measured:
    """The module, and gradients of its input and weight; the peer is one graph for Inductor, forward and backward."""
    whole = rows_and_vectors(case, ranks, 1)
    upstream = ranks.drawn(case.shape, case.dtype, 1010)
    mine, given = ranks.parts(whole), ranks.part(upstream)
    world = dist.group.WORLD
    assert world is not None, "ranks have a group"

    def in_torch(x: Tensor, weight: Tensor) -> Tensor:
        total = collectives.all_reduce(x.float().square().sum(-1, keepdim=True), "sum", world)
        return _scaled(x, torch.rsqrt(total / case.columns + EPS), weight)

    whole_step = compiled(in_torch)
    x, weight = (t.clone().requires_grad_() for t in mine)
    runs: dict[str, Run] = {}
    # Modules with equal settings share their fusions, which are made for one way of exchanging: the last one's eps is
    # therefore another, by less than any result tells.
    for name, how, eps in ((OWN, asked(), EPS), (COLLECTIVES, "nccl", EPS * (1 + 2**-40))):
        runs[name] = _of_module(case, ranks, mine, given, how, eps)
    runs[NCCL] = with_gradients(lambda: whole_step(x, weight), (x, weight), given)
    wide, eager = (ranks.parts(_gradients(*of)) for of in (_wide((*whole, upstream)), (*whole, upstream)))
    return Measured(runs, wide, eager, has_gradients=True)


def add_rms_norm(case: Case, ranks: Ranks, *, quantizes: bool = False) -> Measured:
    """quantizes: the norm is divided by a static scale and cast to float8, as the last thing."""
    summands = [ranks.drawn(case.shape, case.dtype, seed) for seed in range(ranks.mesh.size)]
    residual, weight = rows_and_vectors(case, ranks, 1)
    rest = (residual, weight, *([torch.full([1], SCALE, device=ranks.device)] if quantizes else []))
    mine = summands[dist.get_rank()]
    sent = mine.clone()
    last = compiled(_add_norm)

    def by_nccl() -> Sequence[Tensor]:
        dist.all_reduce(sent)
        return last(sent, *rest)

    fusion = partial(add_rms_norm_fusion, quantizes=quantizes)
    runs = _own(fusion, case, ranks, [mine[None], *rest])
    runs[NCCL] = by_nccl
    restore: dict[str, Callable[[], object]] = {NCCL: lambda: sent.copy_(mine)}
    if (buffer := ranks.buffer) is not None:
        shared = buffer.tensor(case.shape, case.dtype)
        runs[ONE_SHOT] = lambda: last(buffer.one_shot(shared), *rest)
        runs[TWO_SHOT] = lambda: last(buffer.two_shot(shared), *rest)
        restore |= dict.fromkeys((ONE_SHOT, TWO_SHOT), lambda: shared.copy_(mine))
    wide, eager = (_add_norm(sum(s[1:], s[0]), *r) for s, r in ((_wide(summands), _wide(rest)), (summands, rest)))
    return Measured(runs, wide, eager, restore, is_replicated=True)


def sequence(case: Case, ranks: Ranks) -> Measured:
    """The rows of a case are those of each rank: a tensor has as many times more.  The norm, which all ranks have."""
    n, rank = ranks.mesh.size, dist.get_rank()
    many = replace(case, shape=(case.shape[0] * n, case.columns))
    summands = [ranks.drawn(many.shape, case.dtype, seed) for seed in range(n)]
    residual, weight = rows_and_vectors(many, ranks, 1)
    mine, rows = summands[rank], residual.chunk(n)[rank]
    own, whole = torch.empty_like(rows), torch.empty_like(residual)
    last = compiled(_add_norm)

    def by_nccl() -> Sequence[Tensor]:
        dist.reduce_scatter_tensor(own, mine)
        dist.all_gather_into_tensor(whole, last(own, rows, weight)[0])
        return (whole,)

    runs: dict[str, Run] = {}
    for name, run in _own(sequence_fusion, many, ranks, [mine[None], rows, weight]).items():
        runs[name] = partial(_first, run)
    runs[NCCL] = by_nccl
    sums = (sum(s[1:], s[0]) for s in (_wide(summands), summands))
    rest = (_wide((residual, weight)), (residual, weight))
    wide, eager = ((_add_norm(s, *r)[0],) for s, r in zip(sums, rest, strict=True))
    return Measured(runs, wide, eager, is_replicated=True)


def _first(run: Run) -> Sequence[Tensor]:
    return run()[:1]


WORKLOADS: dict[str, tuple[str, Callable[[Case, Ranks], Measured]]] = {
    "rms_norm": ("hidden-sharded RMSNorm", rms_norm),
    "rms_norm_backward": ("hidden-sharded RMSNorm, forward + backward", rms_norm_backward),
    "layer_norm": ("hidden-sharded LayerNorm", layer_norm),
    "softmax": ("softmax over a sharded axis", softmax),
    "add_rms_norm": ("all-reduce + add + RMSNorm", add_rms_norm),
    "sequence": ("reduce-scatter + add + RMSNorm + all-gather, rows of each rank", sequence),
    "add_rms_norm_float8": ("all-reduce + add + RMSNorm + float8", partial(add_rms_norm, quantizes=True)),
}
"""By the name that ``--only`` takes: the title of its rows, and what makes it."""


# what shardfuse runs


def _own(
    define: Callable[[Case, DeviceMesh], FusionDefinition], case: Case, ranks: Ranks, inputs: Sequence[Tensor]
) -> dict[str, Run]:
    """The fusion as the environment asks for it, and the same with collectives between its kernels."""
    runs: dict[str, Run] = {}
    for name, how in ((OWN, asked()), (COLLECTIVES, "nccl")):
        with exchanging_by(how):
            runs[name] = partial(define(case, ranks.mesh).execute, list(inputs))
    return runs


def _of_module(case: Case, ranks: Ranks, mine: Sequence[Tensor], given: Tensor, how: str, eps: float) -> Run:
    """Forward and backward of shardfuse's module, whose fusions the first call makes."""
    x = mine[0].clone().requires_grad_()
    module = RMSNorm(
        case.columns, eps, device=ranks.device, dtype=case.dtype, mesh=ranks.mesh, input=Shard(-1), parameters="local"
    )
    assert module.weight is not None, "it has one"
    with torch.no_grad():
        module.weight.copy_(mine[1])
    run = with_gradients(lambda: module(x), (x, module.weight), given)
    with exchanging_by(how), torch.enable_grad():
        run()
    return run


# what torch runs


def _by_sums(
    local: Callable[..., Tensor],
    apply: Callable[..., Tensor],
    count: int,
    case: Case,
    ranks: Ranks,
    mine: Sequence[Tensor],
) -> dict[str, Run]:
    """Statistics [count, rows] in float32 of a rank's columns, their sum over the ranks, and what is made of it."""
    last, shape = compiled(apply), [count, case.shape[0]]
    sums = torch.empty(shape, device=ranks.device)

    @compiled
    def first(out: Tensor, *tensors: Tensor) -> None:
        """Into memory that is there, which may be symmetric."""
        out.copy_(local(*tensors))

    def by_nccl() -> tuple[Tensor]:
        first(sums, *mine)
        dist.all_reduce(sums)
        return (last(sums, *mine),)

    buffer = ranks.buffer
    if buffer is None:
        return {NCCL: by_nccl}
    shared = buffer.tensor(shape, torch.float32)

    def by_one_shot() -> tuple[Tensor]:
        first(shared, *mine)
        return (last(buffer.one_shot(shared), *mine),)

    return {NCCL: by_nccl, ONE_SHOT: by_one_shot}


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, *scale: Tensor) -> tuple[Tensor, Tensor]:
    """x: the sum of all summands.  float64 stays float64 where the rest is rounded to float8."""
    total = x + residual
    normed = _rms_norm(total, weight)
    if scale:
        largest = torch.finfo(FLOAT8).max
        accurate = normed if normed.dtype is torch.float64 else normed.float()
        normed = (accurate / scale[0]).clamp(-largest, largest)
        normed = normed if accurate.dtype is torch.float64 else normed.to(FLOAT8)
    return normed, total


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def _scaled(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * rstd * weight.float()).to(x.dtype)


def _gradients(x: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    """RMSNorm of unsharded rows, and the gradients of x and the weight."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        return tuple(with_gradients(lambda: _rms_norm(*leaves), leaves, upstream)())


def rows_and_vectors(case: Case, ranks: Ranks, vectors: int) -> tuple[Tensor, ...]:
    """Unsharded, the same on every rank."""
    shapes = (case.shape, *[case.shape[-1:]] * vectors)
    return tuple(ranks.drawn(shape, case.dtype, 1000 + k) for k, shape in enumerate(shapes))


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() for t in tensors]
