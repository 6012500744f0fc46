"""Collectives on this rank's local tensors; only this file, `nccl.py` and `nccl_channels.py` name torch.distributed's.

Data moves as bytes, so that every dtype goes through every backend, and always from contiguous memory, because
gloo is silently wrong on anything else. Reductions that a backend gets wrong or does not have are exchanged
unreduced and reduced here: on the CPU all of them (gloo drops NaN in max and lacks dtypes), on NCCL those of
floats of 16 bits or fewer (summed in float32 and rounded once, where NCCL rounds at every hop) and the max and min
of floats (NaN is kept). All members reduce in the team's order, so all get the same bits, as do teams that are
replicas of each other; NCCL's own reductions give the same bits to the members of one team alone.

Every function is collective: all ranks of the team call it, with values that agree, in the same order as their
other collectives. All return new contiguous tensors that do not require grad. A team of one makes no call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse.analysis.chain import ONE_STEP_BYTES
from shardfuse.errors import CollectiveArgumentError
from shardfuse.executor import nccl, packing
from shardfuse.executor.collective_arguments import (
    check_dim,
    check_given,
    check_op,
    check_own,
    check_pair,
    check_root,
    check_sizes,
    check_split,
    moved_first,
    with_extent,
)
from shardfuse.executor.rank_reduction import Reduction, reduce_members
from shardfuse.mesh.groups import Team, process_group, stages_through_host
from shardfuse.mesh.process import within

_c10d = cast("Any", dist)  # torch leaves its collectives' arguments untyped


# --- collectives -------------------------------------------------------------------------------------------


def all_reduce(x: Tensor, op: Reduction, team: Team, *, in_place: bool = False) -> Tensor:
    """The elementwise reduction of every member's `x` (same shape and dtype), on every member, bitwise the same.

    any and all are of booleans; sums wrap around in integers as torch's do.
    in_place: the result may be `x` itself where that saves a copy.
    Raises CollectiveArgumentError for an op that the dtype does not have.
    """
    check_op("all_reduce", op, x.dtype)
    if team.size == 1 or x.numel() == 0:
        return _own(x)
    group = process_group(team.ranks)
    if _nccl_reduces(x, op, team, group):
        out = x.detach() if in_place and x.is_contiguous() else _own(x)
        _c10d.all_reduce(out, nccl.OPERATIONS[op][0], group)
        return out
    one_step = is_one_step(x.numel() * x.element_size(), team.size)
    if not one_step and op == "sum" and x.numel() % team.size == 0 and nccl.takes(x, team, group):
        return nccl.all_reduce(x.detach().contiguous(), team.size, group)
    if one_step:
        return reduce_members(team.in_order(_gather_flat(x, x.numel(), team)), op).reshape(x.shape)
    sizes = chunk_sizes(x.numel(), team.size)
    return all_gather(reduce_scatter(x.reshape(-1), 0, op, team, sizes), 0, team, sizes).reshape(x.shape)


def is_one_step(size: int, members: int) -> bool:
    """Do members of so many bytes gather all and reduce that, rather than reduce a piece each and gather the pieces?"""
    return members == 2 or (members - 2) * size <= ONE_STEP_BYTES


def all_gather(x: Tensor, dim: int, team: Team, sizes: Sequence[int] | None = None) -> Tensor:
    """The members' tensors concatenated along `dim`, in the team's order, on every member.

    sizes: every member's extent along `dim`; None where all have x's. Other extents are the same on all.
    Raises CollectiveArgumentError where `dim` or `sizes` does not fit `x`.
    """
    dim = check_dim("all_gather", "dim", dim, x.ndim)
    sizes = check_sizes("all_gather", "sizes", [x.shape[dim]] * team.size if sizes is None else sizes, team)
    check_own("all_gather", "sizes", sizes, team, x.shape[dim])
    if team.size == 1:
        return _own(x)
    whole = with_extent(x.shape, dim, sum(sizes))
    if 0 in whole:
        return x.new_empty(whole)
    shapes = [torch.Size(with_extent(x.shape, dim, size)) for size in sizes]
    widest = max(shape.numel() for shape in shapes)
    group = process_group(team.ranks)
    if len(set(sizes)) > 1 and nccl.takes(x, team, group):
        numels = [shape.numel() for shape in shapes]
        flat = nccl.all_gather_pieces(x.detach().contiguous(), numels, group)
        return packing.join_by(flat, shapes, dim)
    landed = dict(zip(team.group_order, _gather_flat(x, widest, team).unbind(0), strict=True))
    return torch.cat([landed[i][: shape.numel()].reshape(shape) for i, shape in enumerate(shapes)], dim)


def reduce_scatter(x: Tensor, dim: int, op: Reduction, team: Team, sizes: Sequence[int] | None = None) -> Tensor:
    """This member's piece along `dim` of the elementwise reduction of every member's `x`.

    sizes: every member's extent along `dim` of the result; None where all get the same.
    Raises CollectiveArgumentError where `dim` or `sizes` does not fit `x`, or the dtype does not have the op.
    """
    dim = check_dim("reduce_scatter", "dim", dim, x.ndim)
    check_op("reduce_scatter", op, x.dtype)
    sizes = check_split("reduce_scatter", "sizes", sizes, team, x.shape[dim])
    if team.size == 1 or x.numel() == 0:
        return _own(x.narrow(dim, sum(sizes[: team.index]), sizes[team.index]))
    rows = x.detach().movedim(dim, 0)
    mine = with_extent(rows.shape, 0, sizes[team.index])
    received = _exchange_flat(rows, sizes, [torch.Size(mine).numel()] * team.size, team)
    given = team.in_order(received.reshape(team.size, *mine))
    return reduce_members(given, op).movedim(0, dim).contiguous()


def all_to_all(
    x: Tensor,
    split_dim: int,
    concat_dim: int,
    team: Team,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Move a shard from `concat_dim` to `split_dim`: piece i of `x` along `split_dim` goes to member i, and what
    the members gave is concatenated along `concat_dim`.

    split_sizes: every member's extent along `split_dim` afterwards; concat_sizes: every member's extent along
    `concat_dim` before. None where all are the same.
    Raises CollectiveArgumentError where a dimension or sizes do not fit `x`, or both dimensions are one.
    """
    split_dim = check_dim("all_to_all", "split_dim", split_dim, x.ndim)
    concat_dim = check_dim("all_to_all", "concat_dim", concat_dim, x.ndim)
    if split_dim == concat_dim:
        raise CollectiveArgumentError("all_to_all", "concat_dim", f"{concat_dim}, as split_dim", "another dimension")
    split_sizes = check_split("all_to_all", "split_sizes", split_sizes, team, x.shape[split_dim])
    if concat_sizes is None:
        concat_sizes = [x.shape[concat_dim]] * team.size
    concat_sizes = check_sizes("all_to_all", "concat_sizes", concat_sizes, team)
    check_own("all_to_all", "concat_sizes", concat_sizes, team, x.shape[concat_dim])
    if team.size == 1:
        return _own(x)
    piece = with_extent(x.shape, split_dim, split_sizes[team.index])
    # Whether anything moves at all follows from facts that the members share, not by this member's piece.
    if 0 in with_extent(with_extent(x.shape, split_dim, sum(split_sizes)), concat_dim, sum(concat_sizes)):
        return x.new_empty(with_extent(piece, concat_dim, sum(concat_sizes)))
    before = x.numel() // x.shape[split_dim] if x.shape[split_dim] else 0
    shapes = [torch.Size(with_extent(piece, concat_dim, size)) for size in concat_sizes]
    given = [before * size for size in split_sizes]
    flat = packing.cut_by(x, split_dim, split_sizes)
    if team.is_in_order:
        return packing.join_by(_exchange_flat(flat, given, [s.numel() for s in shapes], team), shapes, concat_dim)
    return torch.cat(_exchange(flat, given, shapes, team), concat_dim)


def exchange(x: Tensor, give: Sequence[int], take: Sequence[Sequence[int]], team: Team) -> list[Tensor]:
    """Give `give[i]` elements of a flat `x`, in turn, to member i; returns what each member gave, of the shapes `take`.

    Raises CollectiveArgumentError where the elements are not x's.
    """
    give = check_split("exchange", "give", give, team, x.numel())
    if team.size == 1:
        return [_own(x).reshape(tuple(take[0]))]
    return _exchange(x.detach(), give, take, team)


def broadcast(
    x: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    root: int,
    ranks: Sequence[int],
) -> Tensor:
    """The root's `x`, of this shape and dtype, on every one of `ranks`; elsewhere than on the root `x` is None.

    root: a global rank among `ranks`. Raises CollectiveArgumentError where the root's `x` is not as told.
    """
    team = Team.of(ranks)
    check_root("broadcast", root, team)
    if team.rank == root:
        out = _own(check_given("broadcast", x, shape, dtype))
    else:
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if team.size > 1 and out.numel() > 0:
        _broadcast_flat(out, root, team)
    return out


def scatter(
    x: Tensor | None,
    dim: int,
    sizes: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    root: int,
    ranks: Sequence[int],
) -> Tensor:
    """This rank's piece along `dim` of the root's `x`; elsewhere than on the root `x` is None.

    shape: that of the root's `x`; sizes: every rank's extent along `dim`, in the order of `ranks`.
    Raises CollectiveArgumentError where sizes do not fit the shape or the root's `x` is not as told.
    """
    team = Team.of(ranks)
    check_root("scatter", root, team)
    dim = check_dim("scatter", "dim", dim, len(shape))
    sizes = check_split("scatter", "sizes", sizes, team, shape[dim])
    mine = with_extent(shape, dim, sizes[team.index])
    given = check_given("scatter", x, shape, dtype).detach() if team.rank == root else None
    if given is not None and team.size == 1:
        return _own(given)
    if 0 in shape:
        return torch.empty(mine, dtype=dtype, device=device)
    row_shape = with_extent(moved_first(mine, dim), 0, 0)
    rows = torch.empty(row_shape, dtype=dtype, device=device) if given is None else given.movedim(dim, 0)
    shapes = [with_extent(row_shape, 0, sizes[team.index] if rank == root else 0) for rank in team.ranks]
    received = _exchange(rows, [0] * team.size if given is None else sizes, shapes, team)
    return received[team.ranks.index(root)].movedim(0, dim).contiguous()


def gather(x: Tensor, dim: int, sizes: Sequence[int], root: int, ranks: Sequence[int]) -> Tensor | None:
    """The tensors of `ranks` concatenated along `dim`, in that order, on the root; None elsewhere.

    sizes: every rank's extent along `dim`. Raises CollectiveArgumentError where they do not fit `x`.
    """
    team = Team.of(ranks)
    check_root("gather", root, team)
    dim = check_dim("gather", "dim", dim, x.ndim)
    sizes = check_sizes("gather", "sizes", sizes, team)
    check_own("gather", "sizes", sizes, team, x.shape[dim])
    is_root = team.rank == root
    if team.size == 1:
        return _own(x)
    whole = with_extent(x.shape, dim, sum(sizes))
    if 0 in whole:
        return x.new_empty(whole) if is_root else None
    rows = x.detach().movedim(dim, 0)
    shapes = [with_extent(rows.shape, 0, size if is_root else 0) for size in sizes]
    received = _exchange(rows, [rows.shape[0] if rank == root else 0 for rank in team.ranks], shapes, team)
    return torch.cat(received).movedim(0, dim).contiguous() if is_root else None


def send(x: Tensor, dst: int) -> None:
    """Give `x` to rank `dst`, which calls `recv`.

    Collective between the two: the pair's first call makes their process group. Two ranks that both send
    before they receive wait for each other.
    """
    team = Team.of(check_pair("send", "dst", dst))
    if x.numel() > 0:
        _broadcast_flat(_contiguous(x), team.rank, team)


def recv(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, src: int) -> Tensor:
    """What rank `src` gives by `send`, of this shape and dtype."""
    team = Team.of(check_pair("recv", "src", src))
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if out.numel() > 0:
        _broadcast_flat(out, src, team)
    return out


def chunk_sizes(extent: int, parts: int) -> list[int]:
    """The extents of the pieces that `torch.chunk` cuts, with 0 for parts past the end: 5 by 4 is [2, 2, 1, 0]."""
    chunk = -(-extent // parts)
    return [min(chunk, max(extent - i * chunk, 0)) for i in range(parts)]


# --- equal pieces, arguments checked by the caller -----------------------------------------------------------


def equal_all_gather(x: Tensor, dim: int, team: Team) -> Tensor:
    """`all_gather` of pieces of one shape: on a GPU one call and at most one copy."""
    group = process_group(team.ranks)
    if not nccl.takes(x, team, group):
        return all_gather(x, dim, team)
    return packing.join(nccl.all_gather(x.detach().contiguous(), team.size, group), dim)


def equal_reduce_scatter(x: Tensor, dim: int, op: Reduction, team: Team) -> Tensor:
    """`reduce_scatter` into pieces of one shape."""
    group = process_group(team.ranks)
    if op != "sum" or not nccl.takes(x, team, group):
        return reduce_scatter(x, dim, op, team)
    return nccl.reduce_scatter(packing.cut(x, dim, team.size), group).view(_piece(x, dim, team))


def equal_all_to_all(x: Tensor, split_dim: int, concat_dim: int, team: Team) -> Tensor:
    """`all_to_all` between pieces of one shape: a copy for each of the two dims that is not the first."""
    group = process_group(team.ranks)
    if not nccl.takes(x, team, group):
        return all_to_all(x, split_dim, concat_dim, team)
    received = nccl.all_to_all(packing.cut(x, split_dim, team.size), group)
    return packing.join(received.view(team.size, *_piece(x, split_dim, team)), concat_dim)


def _piece(x: Tensor, dim: int, team: Team) -> list[int]:
    return with_extent(x.shape, dim, x.shape[dim] // team.size)


# --- movement of bytes -------------------------------------------------------------------------------------


def _gather_flat(x: Tensor, widest: int, team: Team) -> Tensor:
    """Every member's elements, `[members, widest]` in the process group's order; what a member lacks is undefined."""
    own = _contiguous(x).reshape(-1)
    if own.numel() < widest:
        padded = own.new_empty(widest)
        padded[: own.numel()] = own
        own = padded
    group = process_group(team.ranks)
    out = _landing(own, team.size * widest, group)
    with within(group):
        nccl.all_gather_single(_bytes(out), _bytes(own.to(out.device)), group)
    return out.to(x.device).reshape(team.size, widest)


def _exchange(rows: Tensor, sizes: Sequence[int], shapes: Sequence[Sequence[int]], team: Team) -> list[Tensor]:
    """Give `sizes[i]` of the rows to member i, in turn; returns what each member gave, of these shapes."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    received = _exchange_flat(rows, sizes, numels, team)
    landed: dict[int, Tensor] = {}
    start = 0
    for place in team.group_order:
        landed[place] = received[start : start + numels[place]].reshape(tuple(shapes[place]))
        start += numels[place]
    return [landed[place] for place in range(team.size)]


def _exchange_flat(rows: Tensor, sizes: Sequence[int], numels: Sequence[int], team: Team) -> Tensor:
    """As `_exchange`; the elements received, flat, by giver in the process group's order."""
    order = team.group_order
    rows = _contiguous(rows)
    if not team.is_in_order:
        starts = [sum(sizes[:place]) for place in order]
        rows = torch.cat([rows.narrow(0, start, sizes[place]) for start, place in zip(starts, order, strict=True)])
    row = torch.Size(rows.shape[1:]).numel()
    group = process_group(team.ranks)
    if nccl.takes(rows, team, group):
        out = rows.new_empty(sum(numels))
        _c10d.all_to_all_single(out, rows.view(-1), list(numels), [size * row for size in sizes], group)
        return out
    itemsize = rows.element_size()
    out = _landing(rows, sum(numels), group)
    taken, given = [numels[place] * itemsize for place in order], [sizes[place] * row * itemsize for place in order]
    with within(group):
        _c10d.all_to_all_single(_bytes(out), _bytes(rows.to(out.device)), taken, given, group)
    return out.to(rows.device)


def _landing(x: Tensor, numel: int, group: dist.ProcessGroup) -> Tensor:
    """An empty flat tensor of x's dtype where the group receives: on the CPU where it cannot on x's device."""
    return x.new_empty(numel, device="cpu" if stages_through_host(group, x.device) else x.device)


def _broadcast_flat(x: Tensor, root: int, team: Team) -> None:
    """Fill a contiguous tensor, in place, with the root's."""
    group = process_group(team.ranks)
    staged = x.cpu() if stages_through_host(group, x.device) else x
    with within(group):
        _c10d.broadcast(_bytes(staged), root, group)
    if staged is not x:
        x.copy_(staged)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat: a view.  A single element may have any stride."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _contiguous(x: Tensor) -> Tensor:
    """The values as they lie in memory, without gaps."""
    return packing.plain(x).contiguous()


def _own(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


# --- reduction ---------------------------------------------------------------------------------------------


def _nccl_reduces(x: Tensor, op: Reduction, team: Team, group: dist.ProcessGroup) -> bool:
    """True where NCCL's own reduction has the values that this file promises."""
    return x.device.type == "cuda" and not stages_through_host(group, x.device) and nccl.reduces(op, x.dtype, team.size)
