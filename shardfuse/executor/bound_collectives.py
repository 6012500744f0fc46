"""Collectives of a program, bound to their process group: what a call hands over is tensors.

What a call needs apart from its tensor is looked up once: the process group, the reduction, the shapes, and whether a
copy is needed.  The collective runs on the current stream, so that the GPU waits for it and the host does not.

Bound are collectives of equal pieces on NCCL, of the dtypes that it moves and adds up as torch does; all others run
through `communication.py`, which also says what the results are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh.groups import Team, process_group, stages_through_host
from . import nccl, packing
from .channels import Backend, BackendChannel, Channel, Issue, nccl_channel
from .rank_reduction import Reduction
from .storage import empty_on

Step = Callable[[Tensor], Tensor]
Bind = Callable[[Channel], Step]


def bound(bind: Bind, otherwise: Step, team: Team, device: torch.device, dtype: torch.dtype) -> Step:
    """`bind`'s step where NCCL moves this team's tensors as they are, else `otherwise`.

    Which of the two is found by the first call and not before: that the members make their process group is itself
    collective.  The first call goes through torch's backend, which makes the communicator.
    """
    if not may_bind(device) or not team.is_in_order or team.size == 1 or dtype not in nccl.TAKEN:
        return otherwise
    found: list[Step] = []

    def first(x: Tensor) -> Tensor:
        group = process_group(team.ranks)
        if stages_through_host(group, device):
            found.append(otherwise)
            return otherwise(x)
        backend = backend_of(group, device)
        result = bind(BackendChannel(backend))(x)
        found.append(bind(nccl_channel(group, backend, device, dtype) or BackendChannel(backend)))
        return result

    return lambda x: found[0](x) if found else first(x)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """What runs the group's collectives of this device's tensors."""
    return cast("Any", group)._get_backend(device)


def may_bind(device: torch.device) -> bool:
    """NCCL's are the collectives of GPUs; on a CPU gloo's are not used as they are, for reasons in communication.py."""
    return device.type == "cuda"


def all_reduce(
    op: Reduction, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, in_place: bool,
    is_address: bool = False,
) -> Bind:  # fmt: skip
    """The reduction of every member's tensor, in `shape`.  in_place: the argument is nobody else's.

    is_address: only kernels read the result, to which its shape is nothing.
    """
    shape, empty = tuple(shape), empty_on(device)
    strides = torch.empty(shape, device="meta").stride()

    def bind(channel: Channel) -> Step:
        issue = channel.all_reduce(op, prod(shape))

        def step(x: Tensor) -> Tensor:
            given = packing.plain(x).contiguous()
            if in_place:
                issue(given, given)
                return given if is_address or given.shape == shape else given.view(shape)
            out = empty(shape, strides, dtype)
            issue(given.view(shape), out)
            return out

        return step

    return bind


def all_gather(at: int, team: Team, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Bind:
    """The members' tensors concatenated along dim `at`, in `shape`."""
    shape, members, empty = tuple(shape), team.size, empty_on(device)
    strides = torch.empty(shape, device="meta").stride()
    count = prod(shape) // members

    def bind(channel: Channel) -> Step:
        issue = channel.all_gather(count)

        def step(x: Tensor) -> Tensor:
            given = packing.plain(x).contiguous()
            if at == 0:
                out = empty(shape, strides, dtype)
                issue(given, out)
                return out
            pieces = empty((members, *given.shape), (count, *given.stride()), dtype)
            issue(given, pieces)
            return packing.join(pieces, at).view(shape)

        return step

    return bind


def reduce_scatter(at: int, team: Team, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Bind:
    """This member's piece along dim `at` of the sum of the members' tensors, in `shape`."""
    shape, members, empty = tuple(shape), team.size, empty_on(device)
    strides = torch.empty(shape, device="meta").stride()

    def bind(channel: Channel) -> Step:
        if not nccl.reduces("sum", dtype, members):
            exchange = _all_to_all_of_rows(channel)
            return lambda x: nccl.added_up(exchange(packing.cut(x, at, members))).view(shape)
        issue = channel.reduce_scatter("sum", prod(shape))

        def step(x: Tensor) -> Tensor:
            out = empty(shape, strides, dtype)
            issue(packing.cut(x, at, members), out)
            return out

        return step

    return bind


def all_to_all(split: int, concat: int, team: Team, piece: Sequence[int], shape: Sequence[int]) -> Bind:
    """Piece i along dim `split` goes to member i; those received, of shape `piece`, are joined along dim `concat`."""
    piece, shape, members = tuple(piece), tuple(shape), team.size

    def bind(channel: Channel) -> Step:
        exchange = _all_to_all_of_rows(channel)

        def step(x: Tensor) -> Tensor:
            received = exchange(packing.cut(x, split, members))
            return packing.join(received.view(members, *piece), concat).view(shape)

        return step

    return bind


def _all_to_all_of_rows(channel: Channel) -> Step:
    """What each member has for this one, of `[members, piece]`."""
    issue: Issue = channel.all_to_all()

    def step(rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        issue(rows, received)
        return received

    return step
