"""Collectives of a program, bound to their process group: what a call hands over is tensors.

What a call needs apart from its tensors is looked up once: the process group, the reduction, the shapes, and which
pieces go where.  The collective runs on the current stream, so that the GPU waits for it and the host does not.

    run(queue, given, taken)

A program has that as a line of its own, with ``taken`` allocated by itself; on NCCL ``run`` is then a C function
(``nccl.c``).  Pieces along an inner dim are sent from where they lie and arrive where they belong, as one group of
collectives, up to ``MAX_PIECES`` of them; more are put in order by a copy.

Bound are collectives of equal pieces on NCCL, of the dtypes that it moves and adds up as torch does; all others run
through `collective_calls.py`, which also says what the results are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..codegen.collective_moves import all_reduced, exchanged, gathered, scattered
from ..mesh.groups import Team, process_group, stages_through_host
from . import nccl, packing
from .autocast import no_autocast
from .launch import queue_on
from .nccl_channels import Backend, BackendChannel, Channel, Issue, Pieces, nccl_channel
from .rank_reduction import Reduction, reduce_members
from .storage import empty_on
from .symmetric_collectives import symmetric_channel

MAX_PIECES = 16
"""Collectives in one group that take less than a copy: one more takes the host about 1 us, a copy about 15."""

Step = Callable[[Tensor], Tensor]
Bind = Callable[[Channel], Issue]
Run = Callable[..., None]
Tell = Callable[[Run], None]


@dataclass(frozen=True)
class Collective:
    """One collective of a team.  bind: to what reaches NCCL.  otherwise: by `collective_calls.py`, a new tensor.

    given: the shape of its argument, which may come in another one.  shape: of what it makes, contiguous.
    is_in_place: may that be its argument, which nothing else reads?  is_bare: does nothing run behind it, so that it
    may go in a group?
    """

    bind: Bind
    otherwise: Step
    team: Team
    device: torch.device
    given: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_in_place: bool = False
    is_bare: bool = True


class Unbound:
    """``run(queue, given, taken, ...)`` of collectives that are one call; bound by the first call, and not before.

    That the members make their process group is itself collective, and it says whether NCCL moves their tensors as they
    are.  The first call goes through torch's backend, which makes the communicator.
    """

    def __init__(self, collectives: Sequence[Collective]) -> None:
        self._collectives = tuple(collectives)
        self._told: list[Tell] = []
        self.by_kernels = False
        """May kernels of shardfuse's own do it?  The same on all ranks, set before the first call."""
        self._found: Run | None = None

    def tell(self, tell: Tell) -> None:
        """Have ``tell`` be called with what runs from the second call on."""
        self._told.append(tell)

    def __call__(self, queue: int, *tensors: Tensor) -> None:
        if self._found is not None:
            self._found(queue, *tensors)
            return
        one = self._collectives[0]
        group = process_group(one.team.ranks)
        if stages_through_host(group, one.device):
            self._bound(self._otherwise)
            self._otherwise(queue, *tensors)
            return
        backend = backend_of(group, one.device)
        channel = BackendChannel(backend)
        self._on(channel)(queue, *tensors)
        self._bound(self._on(nccl_channel(group, backend, one.dtype) or channel))

    def _on(self, channel: Channel) -> Issue:
        if self.by_kernels and len(self._collectives) == 1:
            (one,) = self._collectives
            return one.bind(symmetric_channel(one.team, one.device, one.dtype, channel))
        issues = [c.bind(channel) for c in self._collectives]
        return issues[0] if len(issues) == 1 else channel.group(issues)

    def _bound(self, run: Run) -> None:
        self._found = run
        for tell in self._told:
            tell(run)

    def _otherwise(self, queue: int, *tensors: Tensor) -> None:
        with no_autocast(self._collectives[0].device.type):
            for c, given, taken in zip(self._collectives, tensors[::2], tensors[1::2], strict=True):
                taken.copy_(c.otherwise(given.view(c.given)).view(taken.shape))


class CollectiveCall:
    """Collectives that are one call, as a function of their arguments, which may have any strides.

    ``run`` is it as a line of a program.  sources: for each collective, which of the arguments it is given.
    """

    def __init__(self, collectives: Sequence[Collective], sources: Sequence[int] = (0,)) -> None:
        self.collectives, self.sources = tuple(collectives), tuple(sources)
        self.run = Unbound(collectives)
        device = collectives[0].device
        self._queue, self._empty = queue_on(device), empty_on(device)
        self._strides = [torch.empty(c.shape, device="meta").stride() for c in collectives]

    def __call__(self, *tensors: Tensor) -> Any:
        handed, results = list[Tensor](), list[Tensor]()
        for c, source, strides in zip(self.collectives, self.sources, self._strides, strict=True):
            given = packing.plain(tensors[source]).contiguous()
            taken = given if c.is_in_place else self._empty(c.shape, strides, c.dtype)
            handed += (given, taken)
            results.append(taken if taken.shape == c.shape else taken.view(c.shape))
        self.run(self._queue(), *handed)
        return results[0] if len(results) == 1 else tuple(results)


def bound(
    bind: Bind, otherwise: Step, team: Team, device: torch.device, given: Sequence[int], shape: Sequence[int],
    dtype: torch.dtype, *, is_in_place: bool = False, is_bare: bool = True,
) -> Step:  # fmt: skip
    """A `CollectiveCall` where NCCL may move this team's tensors as they are, else ``otherwise``."""
    if not may_bind(device) or not team.is_in_order or team.size == 1 or dtype not in nccl.TAKEN or 0 in shape:
        return otherwise
    return CollectiveCall(
        [Collective(bind, otherwise, team, device, tuple(given), tuple(shape), dtype, is_in_place, is_bare)]
    )


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """What runs the group's collectives of this device's tensors."""
    return cast("Any", group)._get_backend(device)


def may_bind(device: torch.device) -> bool:
    """NCCL's are the collectives of GPUs; gloo's are not used as they are, for reasons in ``collective_calls.py``."""
    return device.type == "cuda"


def all_reduce(op: Reduction, shape: Sequence[int]) -> Bind:
    """The reduction of every member's tensor, of ``shape``."""
    count = prod(shape)

    def bind(channel: Channel) -> Issue:
        kernel = channel.by_kernel("all_reduce", all_reduced(count)) if op == "sum" else None
        return kernel or channel.all_reduce(op, count)

    return bind


def all_reduce_by_gathering(op: Reduction, shape: Sequence[int], members: int) -> Bind:
    """The same where NCCL's own reduction has other values than torch's: every member adds up what all have."""
    count = prod(shape)

    def bind(channel: Channel) -> Issue:
        kernel = channel.by_kernel("all_reduce", all_reduced(count)) if op == "sum" else None
        if kernel is not None:
            return kernel
        gather = channel.all_gather(Pieces(count))

        def run(queue: int, given: Tensor, taken: Tensor) -> None:
            rows = taken.new_empty((members, count))
            gather(queue, given, rows)
            taken.view(-1).copy_(reduce_members(rows, op))

        return run

    return bind


def all_gather(at: int, team: Team, shape: Sequence[int]) -> Bind:
    """The members' tensors concatenated along dim `at`, in `shape`."""
    members, before = team.size, max(prod(shape[:at]), 1)  # of no elements nothing is bound
    piece = prod(shape) // members // before
    pieces = Pieces(piece, before, piece, piece * members)
    given_shape = (*shape[:at], shape[at] // members, *shape[at + 1 :])

    def bind(channel: Channel) -> Issue:
        kernel = channel.by_kernel("all_gather", gathered(before, piece, members))
        if kernel is not None or before <= MAX_PIECES:
            return kernel or channel.all_gather(pieces)
        issue = channel.all_gather(Pieces(before * piece))

        def run(queue: int, given: Tensor, taken: Tensor) -> None:
            rows = taken.new_empty((members, *given_shape))
            issue(queue, given, rows)
            packing.join_into(taken, rows, at)

        return run

    return bind


def reduce_scatter(at: int, team: Team, shape: Sequence[int], dtype: torch.dtype) -> Bind:
    """This member's piece along dim `at` of the sum of the members' tensors, in `shape`."""
    members, before = team.size, max(prod(shape[:at]), 1)  # of no elements nothing is bound
    piece = prod(shape) // before
    whole = (*shape[:at], shape[at] * members, *shape[at + 1 :])
    pieces = Pieces(piece, before, piece * members, piece)

    def bind(channel: Channel) -> Issue:
        kernel = channel.by_kernel("reduce_scatter", scattered(before, piece, members))
        if kernel is not None:
            return kernel
        if not nccl.reduces("sum", dtype, members):
            exchange = _all_to_all_of_rows(channel)

            def add_up(queue: int, given: Tensor, taken: Tensor) -> None:
                rows = exchange(queue, packing.cut(given.view(whole), at, members))
                nccl.add_up(rows, taken.view(-1))

            return add_up
        if before <= MAX_PIECES:
            return channel.reduce_scatter("sum", pieces)
        issue = channel.reduce_scatter("sum", Pieces(before * piece))

        def run(queue: int, given: Tensor, taken: Tensor) -> None:
            issue(queue, packing.cut(given.view(whole), at, members), taken)

        return run

    return bind


def all_to_all(split: int, concat: int, team: Team, piece: Sequence[int]) -> Bind:
    """Piece i along dim `split` goes to member i; those received, of shape `piece`, are joined along dim `concat`."""
    piece, members = tuple(piece), team.size
    whole = (*piece[:split], piece[split] * members, *piece[split + 1 :])

    is_joined = prod(piece[:concat]) <= 1

    def bind(channel: Channel) -> Issue:
        kernel = channel.by_kernel("all_to_all", exchanged(piece, split, concat, members))
        if kernel is not None:
            return kernel
        issue, exchange = channel.all_to_all(), _all_to_all_of_rows(channel)

        def run(queue: int, given: Tensor, taken: Tensor) -> None:
            rows = packing.cut(given.view(whole), split, members)
            if is_joined:
                issue(queue, rows, taken.view(rows.shape))
            else:
                packing.join_into(taken, exchange(queue, rows).view(members, *piece), concat)

        return run

    return bind


def _all_to_all_of_rows(channel: Channel) -> Callable[[int, Tensor], Tensor]:
    """What each member has for this one, of `[members, piece]`."""
    issue: Issue = channel.all_to_all()

    def step(queue: int, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        issue(queue, rows, received)
        return received

    return step
