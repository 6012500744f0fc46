# pyright: reportPrivateUsage=false
"""Collectives of a program, bound to the backend of their process group.

What a call needs apart from its tensor is looked up once: the process group, its backend, the reduction with its
options, the shapes, and whether a copy is needed.  A call then hands pointers to the backend, past the Python
functions of torch.distributed, which take longer than the backend itself.  The backend runs the collective on the
current stream, so that the GPU waits for it and the host does not.

Bound are collectives of equal pieces on NCCL, of the dtypes that it moves and adds up as torch does; all others run
through `communication.py`, which also says what the results are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shardfuse.executor.rank_reduction import Reduction
from shardfuse.mesh.groups import Team, process_group, stages_through_host

from . import nccl, packing
from .storage import empty_on

Step = Callable[[Tensor], Tensor]
Backend = Any  # torch leaves its backends untyped
Bind = Callable[[Backend], Step]


def bound(bind: Bind, otherwise: Step, team: Team, device: torch.device, dtype: torch.dtype) -> Step:
    """`bind`'s step where NCCL moves this team's tensors as they are, else `otherwise`.

    Which of the two, and the backend, is found by the first call and not before: that the members make their process
    group is itself collective.
    """
    if not may_bind(device) or not team.is_in_order or team.size == 1 or dtype not in nccl.TAKEN:
        return otherwise
    found: list[Step] = []

    def step(x: Tensor) -> Tensor:
        if not found:
            group = process_group(team.ranks)
            found.append(otherwise if stages_through_host(group, device) else bind(backend_of(group, device)))
        return found[0](x)

    return step


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """What runs the group's collectives of this device's tensors."""
    return cast("Any", group)._get_backend(device)


def may_bind(device: torch.device) -> bool:
    """NCCL's are the collectives of GPUs; on a CPU gloo's are not used as they are, for reasons in communication.py."""
    return device.type == "cuda"


def reduces(op: Reduction, dtype: torch.dtype, members: int) -> bool:
    """Has NCCL's own all-reduce the values that shardfuse promises: sums rounded once, NaN kept by max and min?"""
    if dtype in nccl.NARROW:  # two addends are rounded once by whoever adds them
        return op == "sum" and members == 2
    return dtype in nccl.SUMS and (op in ("sum", "prod") or (op in _OPS and not dtype.is_floating_point))


def all_reduce(op: Reduction, shape: Sequence[int], *, in_place: bool) -> Bind:
    """The reduction of every member's tensor, in `shape`.  in_place: the argument is nobody else's."""
    shape = tuple(shape)

    def bind(backend: Backend) -> Step:
        run, options = backend.allreduce, c10d.AllreduceOptions()
        options.reduceOp = cast("Any", _OPS[op])
        options.asyncOp = False

        def step(x: Tensor) -> Tensor:
            out = packing.plain(x).contiguous()
            if not in_place and out.data_ptr() == x.data_ptr():
                out = out.clone()
            _ended(run([out], options))
            return out if out.shape == shape else out.view(shape)

        return step

    return bind


def all_gather(at: int, team: Team, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Bind:
    """The members' tensors concatenated along dim `at`, in `shape`."""
    shape, members, empty = tuple(shape), team.size, empty_on(device)
    strides = torch.empty(shape, device="meta").stride()

    def bind(backend: Backend) -> Step:
        run, options = backend._allgather_base, c10d.AllgatherOptions()
        options.asyncOp = False

        def step(x: Tensor) -> Tensor:
            own = packing.plain(x).contiguous()
            if at == 0:
                out = empty(shape, strides, dtype)
                _ended(run(out, own, options))
                return out
            pieces = own.new_empty(members * own.numel())
            _ended(run(pieces, own.view(-1), options))
            return packing.join(pieces.view(members, *own.shape), at).view(shape)

        return step

    return bind


def reduce_scatter(at: int, team: Team, shape: Sequence[int], dtype: torch.dtype) -> Bind:
    """This member's piece along dim `at` of the sum of the members' tensors, in `shape`."""
    shape, members = tuple(shape), team.size

    def bind(backend: Backend) -> Step:
        if not reduces("sum", dtype, members):
            exchange = _all_to_all_of_rows(backend)
            return lambda x: nccl.added_up(exchange(packing.cut(x, at, members))).view(shape)
        run, options = backend._reduce_scatter_base, c10d.ReduceScatterOptions()
        options.reduceOp = cast("Any", _OPS["sum"])
        options.asyncOp = False

        def step(x: Tensor) -> Tensor:
            rows = packing.cut(x, at, members)
            out = rows.new_empty(rows.shape[1:])
            _ended(run(out, rows.view(-1), options))
            return out.view(shape)

        return step

    return bind


def all_to_all(split: int, concat: int, team: Team, piece: Sequence[int], shape: Sequence[int]) -> Bind:
    """Piece i along dim `split` goes to member i; those received, of shape `piece`, are joined along dim `concat`."""
    piece, shape, members = tuple(piece), tuple(shape), team.size

    def bind(backend: Backend) -> Step:
        exchange = _all_to_all_of_rows(backend)

        def step(x: Tensor) -> Tensor:
            received = exchange(packing.cut(x, split, members))
            return packing.join(received.view(members, *piece), concat).view(shape)

        return step

    return bind


def _all_to_all_of_rows(backend: Backend) -> Step:
    """What each member has for this one, of `[members, piece]`."""
    run, options = backend.alltoall_base, c10d.AllToAllOptions()
    options.asyncOp = False
    even: list[int] = []

    def step(rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        _ended(run(received, rows, even, even, options))
        return received

    return step


def _ended(work: Any) -> None:
    """A backend that does not order the current stream behind its collective by itself gives something to wait for."""
    if work is not None:
        work.wait()


_OPS: dict[Reduction, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
