"""Sums over the ranks of a process group that add 16-bit numbers in float32 and send 16 bits of each.

``torch.distributed``'s own round a bfloat16 or float16 sum at every hop, or take twice the bytes for float32.  Here
each rank is given the pieces that it adds up, as they are, adds them in float32, rounds once, and hands the piece on:
the bytes of an all-reduce of 16 bits, and the same bits on every rank.  Fusions do the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .errors import CollectiveArgumentError
from .executor import communication
from .executor.rank_reduction import Reduction
from .mesh.groups import Team, default_group

__all__ = ["all_reduce", "reduce_scatter"]


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: Reduction = "sum") -> torch.Tensor:
    """The reduction over ``group`` (left out, all ranks) of every rank's ``x``, on each of them, bitwise the same.

    x: of one shape and dtype on all ranks.  Floats of 16 bits are added in float32 and rounded once; max and min keep
    NaN.  op: "sum", "prod", "max", "min"; "any" and "all" of booleans.
    Returns a new contiguous tensor, outside of autograd.  Every rank of the group calls it, in one order with its other
    collectives.  Raises CollectiveArgumentError.
    """
    return communication.all_reduce(x.detach(), op, _team("all_reduce", group))


def reduce_scatter(
    x: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None, *, op: Reduction = "sum"
) -> torch.Tensor:
    """This rank's piece along ``dim`` of the reduction over ``group`` of every rank's ``x``.

    Pieces are cut as ``torch.chunk`` cuts: where ranks do not divide the axis, the last ones have less, or nothing.
    Otherwise as ``all_reduce``.
    """
    team = _team("reduce_scatter", group)
    if not -x.ndim <= dim < x.ndim:
        raise CollectiveArgumentError("reduce_scatter", "dim", str(dim), f"a dimension of a tensor of {x.ndim}")
    sizes = communication.chunk_sizes(x.shape[dim], team.size)
    return communication.reduce_scatter(x.detach(), dim, op, team, sizes)


def _team(kind: str, group: dist.ProcessGroup | None) -> Team:
    ranks = dist.get_process_group_ranks(default_group() if group is None else group)
    if dist.get_rank() not in ranks:
        raise CollectiveArgumentError(kind, "group", f"one of the ranks {ranks}", "a group that this rank is in")
    return Team.of(ranks)
