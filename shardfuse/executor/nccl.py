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

from shardfuse.mesh.groups import Team, stages_through_host

from . import packing
from .rank_reduction import Reduction

# torch leaves its collectives' arguments untyped, and 2.13 renames one with a warning about the name that 2.11 has.
_c10d = cast("Any", dist)
all_gather_single: Callable[[Tensor, Tensor, dist.ProcessGroup], object] = (
    getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor
)
_reduce_scatter_single: Callable[[Tensor, Tensor, dist.ReduceOp.RedOpType, dist.ProcessGroup], object] = (
    getattr(_c10d, "reduce_scatter_single", None) or _c10d.reduce_scatter_tensor
)

OPERATIONS: dict[Reduction, tuple[dist.ReduceOp.RedOpType, int]] = {
    "sum": (dist.ReduceOp.SUM, 0),
    "prod": (dist.ReduceOp.PRODUCT, 1),
    "max": (dist.ReduceOp.MAX, 2),
    "min": (dist.ReduceOp.MIN, 3),
}
"""torch's operation, and NCCL's number of it."""

SUMS = (torch.float32, torch.float64, torch.int32, torch.int64)
"""What NCCL adds up as torch does."""

NARROW = (torch.float16, torch.bfloat16)
TAKEN = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
"""What NCCL moves, and its numbers of these dtypes."""

_WORD = 16
"""Bytes that NCCL moves at once of what begins at a multiple of them; of other places it moves narrow words."""

UNALIGNED_BYTES = 40 * 2**20
"""Up to here narrow words are on their way for less time than another call takes."""


def takes(x: Tensor, team: Team, group: dist.ProcessGroup) -> bool:
    """Does NCCL take `x` as it is, with the team's order its own?"""
    return x.is_cuda and team.is_in_order and x.dtype in TAKEN and not stages_through_host(group, x.device)


def reduces(op: Reduction, dtype: torch.dtype, members: int) -> bool:
    """Has NCCL's own all-reduce the values that shardfuse promises: sums rounded once, NaN kept by max and min?"""
    if dtype in NARROW:  # two addends are rounded once by whoever adds them
        return op == "sum" and members == 2
    integral = not dtype.is_floating_point
    return dtype in SUMS and (op in ("sum", "prod") or (op in ("max", "min") and integral))


def all_gather(x: Tensor, members: int, group: dist.ProcessGroup) -> Tensor:
    """`[members, *x.shape]`."""
    out = x.new_empty(members * x.numel())
    all_gather_single(out, x.view(-1), group)
    return out.view(members, *x.shape)


def all_gather_pieces(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Pieces of different sizes, one behind the other, flat: each goes where it belongs, none is padded."""
    out, flat = x.new_empty(sum(sizes)), x.view(-1)
    word = _WORD // x.element_size()
    is_aligned = all(size % word == 0 for size in sizes[:-1])
    if is_aligned or out.numel() * x.element_size() <= UNALIGNED_BYTES or min(sizes) < 2 * word:
        _c10d.all_to_all(list(out.split_with_sizes(sizes)), [flat] * len(sizes), group)
    else:
        _gather_words(flat, sizes, word, out, group)
    return out


def _gather_words(flat: Tensor, sizes: Sequence[int], word: int, out: Tensor, group: dist.ProcessGroup) -> None:
    """Of each piece the whole words of ``out``; the ends of all pieces, less than a word each, are gathered apart."""
    pieces = out.split_with_sizes(sizes)
    heads = [-start % word for start in (piece.storage_offset() for piece in pieces)]
    tails = [(size - head) % word for size, head in zip(sizes, heads, strict=True)]
    middles = [p[head : len(p) - tail] for p, head, tail in zip(pieces, heads, tails, strict=True)]
    rank = dist.get_rank(group)
    own = flat[heads[rank] : flat.numel() - tails[rank]]
    if heads[rank]:
        own = own.clone()  # begins at a word
    _c10d.all_to_all(middles, [own] * len(sizes), group)
    ends = all_gather(torch.cat([flat[:word], flat[flat.numel() - word :]]), len(sizes), group)
    targets, sources = list[Tensor](), list[Tensor]()
    for piece, end, head, tail in zip(pieces, ends.unbind(0), heads, tails, strict=True):
        targets += [piece[:head]] * (head > 0) + [piece[len(piece) - tail :]] * (tail > 0)
        sources += [end[:head]] * (head > 0) + [end[2 * word - tail :]] * (tail > 0)
    packing.copy_all(targets, sources)


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What each member has for this one, of `[members, piece]`."""
    received = torch.empty_like(rows)
    _c10d.all_to_all_single(received, rows, group=group)
    return received


def reduce_scatter(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every member's row for this one, of `[members, piece]`."""
    members = rows.shape[0]
    if reduces("sum", rows.dtype, members):
        out = rows.new_empty(rows.numel() // members)
        _reduce_scatter_single(out, rows.view(-1), dist.ReduceOp.SUM, group)
        return out.view(rows.shape[1:])
    return add_up(all_to_all(rows, group))


def all_reduce(x: Tensor, members: int, group: dist.ProcessGroup) -> Tensor:
    """The sum of every member's `x`, of which the members divide the elements."""
    piece = reduce_scatter(x.reshape(members, -1), group)
    return all_gather(piece, members, group).reshape(x.shape)


def add_up(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over the first dim; of 16-bit floats accumulated in float32 and rounded once, as torch does on a GPU.

    out: where it is to be, else a new tensor.
    """
    return torch.sum(rows, 0, dtype=rows.dtype, out=out)
