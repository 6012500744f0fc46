"""NCCL on tensors as they are: contiguous, pieces of one shape, the process group's order that of the team.

Sums of 16-bit floats are rounded once: pieces are exchanged unreduced and added up in float32, where NCCL would round
at every hop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse.analysis.chain import CHUNK_BYTES
from shardfuse.mesh.groups import Team, stages_through_host

# torch leaves its collectives' arguments untyped, and 2.13 renames one with a warning about the name that 2.11 has.
_c10d = cast("Any", dist)
all_gather_single: Callable[..., Any] = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor
_reduce_scatter_single: Callable[[Tensor, Tensor, dist.ReduceOp.RedOpType, dist.ProcessGroup], object] = (
    getattr(_c10d, "reduce_scatter_single", None) or _c10d.reduce_scatter_tensor
)

SUMS = (torch.float32, torch.float64, torch.int32, torch.int64)
"""What NCCL adds up as torch does."""

UNALIGNED_BYTES = 32 * 2**20
"""Up to here the copies around a gather of padded pieces take longer than narrow words on their way."""

MOST_CHUNKS = 4
_ALIGNED = 64
"""Elements of which a chunk is a multiple, so that it begins at a multiple of 16 bytes."""

NARROW = (torch.float16, torch.bfloat16)
_TAKEN = (*SUMS, *NARROW, torch.uint8, torch.int8)


def takes(x: Tensor, team: Team, group: dist.ProcessGroup) -> bool:
    """Does NCCL take `x` as it is, with the team's order its own?"""
    return x.is_cuda and team.is_in_order and x.dtype in _TAKEN and not stages_through_host(group, x.device)


def all_gather(x: Tensor, members: int, group: dist.ProcessGroup) -> Tensor:
    """`[members, *x.shape]`."""
    out = x.new_empty(members * x.numel())
    all_gather_single(out, x.view(-1), group)
    return out.view(members, *x.shape)


def lands_fast(x: Tensor, numels: Sequence[int]) -> bool:
    """Are pieces of so many elements, one behind the other, as fast to receive as pieces that are padded first?

    NCCL moves what begins at no multiple of 16 bytes in narrow words.
    """
    is_aligned = all(n * x.element_size() % 16 == 0 for n in numels[:-1])
    return is_aligned or sum(numels) * x.element_size() <= UNALIGNED_BYTES


def all_gather_pieces(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Pieces of different sizes, one behind the other, flat: each goes where it belongs, none is padded."""
    out = x.new_empty(sum(sizes))
    _c10d.all_to_all(list(out.split_with_sizes(sizes)), [x.view(-1)] * len(sizes), group)
    return out


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What each member has for this one, of `[members, piece]`."""
    received = torch.empty_like(rows)
    _c10d.all_to_all_single(received, rows, group=group)
    return received


def reduce_scatter(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every member's row for this one, of `[members, piece]`."""
    members, piece = rows.shape
    if rows.dtype in SUMS or members == 2:  # two addends are rounded once in any order
        out = rows.new_empty(piece)
        _reduce_scatter_single(out, rows.view(-1), dist.ReduceOp.SUM, group)
        return out
    cuts = chunks_of(rows, piece)
    if len(cuts) == 1:
        return added_up(all_to_all(rows, group))
    out = rows.new_empty(piece)
    landed = [rows.new_empty(members, stop - start) for start, stop in cuts]
    given = [list(rows[:, start:stop].unbind(0)) for start, stop in cuts]
    works = [_c10d.all_to_all(list(got.unbind(0)), own, group, True) for got, own in zip(landed, given, strict=True)]
    for work, got, (start, stop) in zip(works, landed, cuts, strict=True):
        work.wait()
        add_up(got, out[start:stop])
    return out


def all_reduce(x: Tensor, members: int, group: dist.ProcessGroup) -> Tensor:
    """The sum of every member's `x`, of which the members divide the elements."""
    flat = x.view(-1)
    cuts = [(start * members, stop * members) for start, stop in chunks_of(x, flat.numel() // members)]
    given = [flat[start:stop].view(members, -1) for start, stop in cuts]
    landed = [torch.empty_like(rows) for rows in given]
    works = [_c10d.all_to_all_single(*pair, group=group, async_op=True) for pair in zip(landed, given, strict=True)]
    out = torch.empty_like(x)
    gathers: list[Any] = []
    for work, got, (start, stop) in zip(works, landed, cuts, strict=True):
        work.wait()
        piece = got.new_empty(got.shape[1])
        add_up(got, piece)
        gathers.append(all_gather_single(out.view(-1)[start:stop], piece, group, True))
    for work in gathers:
        work.wait()
    return out


def chunks_of(x: Tensor, piece: int) -> list[tuple[int, int]]:
    """Into what a member's piece of `x` is cut, so that one chunk is added up while the next is on its way."""
    count = min(max(x.numel() * x.element_size() // CHUNK_BYTES, 1), MOST_CHUNKS)
    step = -(-piece // (count * _ALIGNED)) * _ALIGNED
    return [(start, min(start + step, piece)) for start in range(0, piece, step)]


def add_up(rows: Tensor, out: Tensor) -> None:
    """`added_up` into `out`."""
    torch.sum(rows, 0, dtype=rows.dtype, out=out)


def added_up(rows: Tensor) -> Tensor:
    """The sum over the first dim; of 16-bit floats accumulated in float32 and rounded once, as torch does on a GPU."""
    return rows.sum(0, dtype=rows.dtype)
