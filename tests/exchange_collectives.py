"""Collectives by kernels, of every kind, size and form, beside what torch makes of all ranks' tensors in float64."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from weakref import ref

import pytest
import torch
from resharding_cases import pairs, run
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh, collectives, initialize
from shardfuse.codegen.collective_kernels import Kind
from shardfuse.codegen.collective_moves import Moves, all_reduced, exchanged, gathered, scattered
from shardfuse.errors import PeerLostError
from shardfuse.executor import bound_collectives, collective_calls, symmetric_collectives
from shardfuse.executor.launch import queue_on
from shardfuse.executor.nccl_channels import Issue
from shardfuse.executor.symmetric_collectives import symmetric_channel
from shardfuse.mesh import symmetric
from shardfuse.mesh.groups import Team
from shardfuse.mesh.process import ProcessContext, finalize
from shardfuse.nn import AddRMSNorm
from shardfuse.rank_errors import CapturedCollectiveError, ExchangeTimeoutError, ThreadsError

ROUNDS = 2
SUMMED = (torch.bfloat16, torch.float16, torch.float32)
TYPES = (*SUMMED, torch.uint8, torch.int64)
SHAPES = ((16,), (20_000,), (3, 8_208), (40, 1_040), (5, 3, 7, 32), (2, 64, 4, 128))
FEW = ((16,), (9_216,), (2, 12_288), (3, 2_112), (3, 2, 5, 16))
"""Under Triton's interpreter, where a turn takes milliseconds; the third one is whole chunks."""
LARGE = ((1 << 20,), ((1 << 23) + 48,), (17, 70_000), (2, 2048, 16, 128), (1 << 24,))
"""The same on GPUs of their own."""


@dataclass(frozen=True)
class _Case:
    """One collective.  shape: of what a rank has for each other one, or gives to all.

    at, to: the dim along which pieces of ranks are side by side; of an all-to-all, in what is given, and in the result.
    """

    kind: Kind
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int
    to: int
    ranks: int

    @property
    def moves(self) -> Moves:
        before, piece = prod(self.shape[: self.at]), prod(self.shape[self.at :])
        match self.kind:
            case "all_gather":
                return gathered(before, piece, self.ranks)
            case "all_to_all":
                return exchanged(self.shape, self.at, self.to, self.ranks)
            case "reduce_scatter":
                return scattered(before, piece, self.ranks)
            case "all_reduce":
                return all_reduced(before * piece)

    def given(self, rank: int, turn: int, device: torch.device) -> Tensor:
        """What a rank gives in that turn; all ranks can make it."""
        shape = list(self.shape)
        if self.kind in ("reduce_scatter", "all_to_all"):
            shape[self.at] *= self.ranks
        generator = torch.Generator(device).manual_seed(97 * turn + rank)
        wide = torch.randn(shape, generator=generator, device=device)
        return (wide * 50).to(self.dtype) if not self.dtype.is_floating_point else wide.to(self.dtype)

    def wanted(self, rank: int, given: list[Tensor]) -> Tensor:
        match self.kind:
            case "all_gather":
                return torch.cat(given, self.at)
            case "all_to_all":
                return torch.cat([t.chunk(self.ranks, self.at)[rank] for t in given], self.to)
        total = torch.stack([t.double() for t in given]).sum(0)
        return total.chunk(self.ranks, self.at)[rank] if self.kind == "reduce_scatter" else total

    def check(self, found: Tensor, rank: int, given: list[Tensor]) -> None:
        wide = self.wanted(rank, given)
        if self.kind in ("all_gather", "all_to_all"):
            assert torch.equal(found.view(wide.shape), wide), f"{self} on rank {rank}"
            return
        eager = wide.to(self.dtype)
        assert_near(found.view(wide.shape).cpu(), wide.cpu(), eager.cpu(), n=0.51 if self.dtype != torch.float32 else 2)


def cases_of(shapes: Sequence[tuple[int, ...]], types: Sequence[torch.dtype], ranks: int) -> Iterator[_Case]:
    """Every kind, along every dim of the shapes; sums of the floating types."""
    for shape, dtype in product(shapes, types):
        dims = range(len(shape))
        yield from (_Case("all_gather", dtype, shape, at, 0, ranks) for at in dims)
        yield from (_Case("all_to_all", dtype, shape, at, to, ranks) for at, to in product(dims, dims) if at != to)
        if dtype in SUMMED:
            yield from (_Case("reduce_scatter", dtype, shape, at, 0, ranks) for at in dims)
            yield _Case("all_reduce", dtype, shape, 0, 0, ranks)


class Refused:
    """In place of NCCL, which none of these asks."""

    def __getattr__(self, name: str) -> object:
        pytest.fail(f"{name} is asked for")


def run_collectives(context: ProcessContext) -> None:
    """All of them, each in several calls with other numbers, by ranks that are late now and then."""
    is_on_gpu = context.device.type == "cuda"
    if not is_on_gpu:  # several turns of a program, and programs that claim their numbers, of little
        symmetric_collectives.shared_programs = lambda multiprocessors: 3
        symmetric_collectives.free_multiprocessors = lambda multiprocessors: 2
        collective_calls.ONE_STEP_BYTES = 1 << 12  # larger sums of three ranks in two steps
    own, team, n = random.Random(context.rank), Team.of(range(context.world_size)), context.world_size
    shapes, types = (SHAPES, TYPES) if is_on_gpu else (FEW, TYPES[::3])
    cases = [*cases_of(shapes, types, n), *(cases_of(LARGE, TYPES[:1], n) if is_on_gpu else ())]
    queue = queue_on(context.device)
    for case in cases:
        issue = issue_of(case, team, context)
        for turn in range(ROUNDS):
            given = [case.given(rank, turn, context.device) for rank in range(n)]
            mine = given[context.rank]
            taken = torch.full(
                (prod(case.wanted(context.rank, given).shape),), 77, dtype=case.dtype, device=context.device
            )
            if own.random() < 0.2:
                time.sleep(own.random() * 0.01)
            in_place = case.kind == "all_reduce" and turn == 1
            kept = mine.clone()
            issue(queue(), kept, kept if in_place else taken)
            case.check(kept if in_place else taken, context.rank, given)
    assert isinstance(symmetric.arena(), symmetric.Arena)


def run_on_views(context: ProcessContext) -> None:
    """Tensors that begin anywhere: those of one rank within a word of 4 bytes, in front of or behind one of 16."""
    team, n, queue = Team.of(range(context.world_size)), context.world_size, queue_on(context.device)
    kinds = (("all_gather", 0, 0), ("all_to_all", 1, 0), ("reduce_scatter", 1, 0), ("all_reduce", 0, 0))
    for (kind, at, to), dtype in product(kinds, (torch.uint8, torch.bfloat16, torch.float32)):
        if kind in ("reduce_scatter", "all_reduce") and dtype not in SUMMED:
            continue
        case = _Case(kind, dtype, (3, 64), at, to, n)
        issue = issue_of(case, team, context)
        for here, there in ((1, 0), (0, 3), (5, 5)):
            given = [case.given(rank, here, context.device) for rank in range(n)]
            mine, wanted = given[context.rank], case.wanted(context.rank, given)
            room = torch.zeros(mine.numel() + here, dtype=dtype, device=context.device)
            landing = torch.zeros(wanted.numel() + there, dtype=dtype, device=context.device)
            first = (context.rank + 1) % n * here  # one rank's begin where they should
            view, taken = room[first : first + mine.numel()], landing[there:]
            view.copy_(mine.view(-1))
            issue(queue(), view, taken)
            case.check(taken, context.rank, given)
            assert not landing[:there].any(), "what is in front of it"


def issue_of(case: _Case, team: Team, context: ProcessContext) -> Issue:
    channel = symmetric_channel(team, context.device, case.dtype, Refused())
    issue = channel.by_kernel(case.kind, case.moves)
    assert issue is not None, f"{case} has no kernel"
    return issue


def run_programs_of_collectives(context: ProcessContext) -> None:
    """Every change of sharding of a small tensor, and sums of 16-bit rows in a module between parallel layers.

    On a CPU programs have gloo's collectives otherwise: they are bound as on a GPU.
    """
    if context.device.type != "cuda":
        bound_collectives.may_bind = lambda device: True
        bound_collectives.stages_through_host = lambda group, device: False
        bound_collectives.nccl_channel = lambda *of: None
    found, n = symmetric.arena(), context.world_size
    assert isinstance(found, symmetric.Arena), found
    for case in pairs((n,), (4 * n, 8 * n, 4 * n)):
        run(case, context.rank, context.device)
    changes = sum(found.order.launches().values())
    assert changes >= 13, "from and to all dims, and sums: others go by views with a dim for each digit"
    mesh = DeviceMesh(range(n))
    where = {"input": Partial(), "residual": Shard(0), "output": Replicate(), "parameters": "local"}
    norm = AddRMSNorm(64, mesh=mesh, dtype=torch.bfloat16, **where).to(context.device)
    drawn = torch.Generator().manual_seed(1)
    summands, whole = (torch.randn(shape, generator=drawn).bfloat16() for shape in ((n, 4 * n, 64), (4 * n, 64)))
    residual = mesh.shard_tensor(whole, 0).contiguous().to(context.device)
    for _ in range(2):
        with torch.no_grad():
            normed, total = norm(summands[context.rank].to(context.device), residual)
        added = summands.double().sum(0) + whole.double()
        wide = torch.nn.functional.rms_norm(added, (64,), eps=norm.eps)
        assert_near(normed.cpu(), wide, wide.bfloat16(), n=2, what="the norm")
        assert_near(total.cpu(), mesh.shard_tensor(added, 0), mesh.shard_tensor(added, 0).bfloat16(), n=2)
    assert sum(found.order.launches().values()) == changes + 2, "one kernel adds up, norms and gathers in each call"


def run_plain_collectives(context: ProcessContext) -> None:
    """``shardfuse.collectives`` of tensors with gaps that require gradients, by kernels and without."""
    found, n, rank = symmetric.arena(), context.world_size, context.rank
    assert isinstance(found, symmetric.Arena), found
    for wide, launches in ((16, 9), (5, 0)):  # of 32 bytes, and of 10
        shape, before = (2 * n, 3 * n, wide), sum(found.order.launches().values())
        drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(n)]
        given = [x.to(context.device) for x in drawn]
        mine = given[rank].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        total = torch.stack(given).double().sum(0).bfloat16()
        results = [(collectives.all_reduce(mine), total)]
        for dim in (0, 1):
            results.append((collectives.all_gather(mine, dim), torch.cat(given, dim)))
            results.append((collectives.reduce_scatter(mine, dim), total.chunk(n, dim)[rank]))
            for split in (0, 1):
                pieces = [x.chunk(n, split)[rank] for x in given]
                results.append((collectives.all_to_all(mine, split, dim), torch.cat(pieces, dim)))
        for result, wanted in results:
            assert torch.equal(result, wanted)
            assert result.is_contiguous()
            assert not result.requires_grad
        # pieces of a whole tensor are whole words in any case
        assert sum(found.order.launches().values()) - before >= launches


def call_collectives_from_threads(context: ProcessContext) -> None:
    """Launches have one order on all ranks: a second thread is refused, and the first goes on."""
    x, refused = torch.ones(64, device=context.device), list[BaseException]()

    def run() -> None:
        try:
            collectives.all_reduce(x)
        except ThreadsError as error:
            refused.append(error)

    for _ in range(2):
        assert torch.equal(collectives.all_reduce(x), x * context.world_size)
        thread = threading.Thread(target=run, name=f"second of rank {context.rank}")
        thread.start()
        thread.join()
    assert torch.equal(collectives.all_reduce(x), x * context.world_size)
    assert len(refused) == 2


def keep_nothing_of_a_world(context: ProcessContext) -> None:
    """What is kept bound ends with the world, and what a few calls have not had for long goes first."""
    found = symmetric.arena()
    assert isinstance(found, symmetric.Arena), found
    symmetric_collectives._CALLS = 2
    for count in (16, 32, 48, 16):
        x = torch.ones(count, device=context.device)
        assert torch.equal(collectives.all_reduce(x), x * context.world_size)
        assert 1 <= len(found.issues) <= 2
    kept = ref(found)
    del found
    finalize()
    gc.collect()
    assert kept() is None
    initialize(timeout=60)


def begin_short_of_memory(context: ProcessContext) -> None:
    """A rank that has no memory for the table fails on all, and all go on with the next call."""
    make, x = symmetric_collectives.made_to_last, torch.ones(64, device=context.device)

    def refuse(make: object, device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    if context.rank == 1:
        symmetric_collectives.made_to_last = refuse
    with pytest.raises(torch.OutOfMemoryError if context.rank == 1 else PeerLostError, match="no memory"):
        collectives.all_reduce(x)
    symmetric_collectives.made_to_last = make
    for _ in range(4):
        assert torch.equal(collectives.all_reduce(x), x * context.world_size)
        time.sleep(0.5)  # until calls are compared


def skip_a_collective(context: ProcessContext) -> None:
    """A rank runs out of memory in one, and goes on with the next, which the others would add to that one."""
    resolved = symmetric_collectives.plain

    def refuse(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    for turn in range(1 << 30):
        symmetric_collectives.plain = refuse if (context.rank, turn) == (1, 2) else resolved
        try:
            collectives.all_reduce(torch.ones(64, device=context.device))
        except torch.OutOfMemoryError:
            assert context.rank == 1
        time.sleep(0.05)


def begin_in_a_capture(context: ProcessContext) -> None:
    """All ranks refuse the first collective there, with nothing agreed on: the next call is as the first."""
    x = torch.ones(64, device=context.device)
    if context.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(CapturedCollectiveError), torch.cuda.graph(graph):
            collectives.all_reduce(x)
    else:
        check = symmetric_collectives._check_is_not_captured

        def refuse(device: torch.device, team: Team) -> None:
            raise CapturedCollectiveError(team.ranks)

        symmetric_collectives._check_is_not_captured = refuse
        with pytest.raises(CapturedCollectiveError, match="run it once before the capture"):
            collectives.all_reduce(x)
        symmetric_collectives._check_is_not_captured = check
    for _ in range(2):
        assert torch.equal(collectives.all_reduce(x), x * context.world_size)


def collectives_elsewhere(context: ProcessContext) -> None:
    """On another GPU than the one that shares memory there is no kernel, whatever was agreed on for that."""
    team, case = Team.of(range(context.world_size)), _Case("all_gather", torch.float32, (64,), 0, 0, context.world_size)
    reach = symmetric_collectives.is_in_reach
    for is_here in (True, False, True, False):
        symmetric_collectives.is_in_reach = lambda device, is_here=is_here: is_here
        channel = symmetric_channel(team, context.device, case.dtype, Refused())
        assert (channel.by_kernel(case.kind, case.moves) is not None) == is_here
    symmetric_collectives.is_in_reach = reach


def wait_in_vain(context: ProcessContext, kind: Kind = "all_reduce") -> None:
    """A rank that does not come within the limit is named by the next call, and what it has not sent is no number."""
    found = symmetric.arena()
    assert isinstance(found, symmetric.Arena), found
    found.timeout = 2.0 if context.rank == 0 else 60.0
    team = Team.of(range(context.world_size))
    case = _Case(kind, torch.float32, (64,), 0, 0, team.size)
    issue, queue = issue_of(case, team, context), queue_on(context.device)
    given = [case.given(rank, 0, context.device) for rank in range(team.size)]
    taken = torch.zeros_like(case.wanted(context.rank, given), dtype=case.dtype)
    issue(queue(), given[context.rank], taken)
    case.check(taken, context.rank, given)
    if context.rank == 0:
        issue(queue(), given[0], taken)
        without = taken if kind == "all_reduce" else taken.chunk(team.size)[1]
        assert without.isnan().all()
        with pytest.raises(ExchangeTimeoutError, match="rank 1 did not send its part"):
            issue(queue(), given[0], taken)
    else:
        time.sleep(4.0)


def wait_for_a_killed_rank(context: ProcessContext) -> None:
    team = Team.of(range(context.world_size))
    case = _Case("all_gather", torch.float32, (64,), 0, 0, team.size)
    issue = issue_of(case, team, context)
    if context.rank == 1:
        time.sleep(1.0)
        print(f"fault {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    given = case.given(context.rank, 0, context.device)
    issue(queue_on(context.device)(), given, torch.empty(64 * team.size, device=context.device))
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    time.sleep(60)  # until this rank is ended


def sizes_without_a_kernel(context: ProcessContext) -> None:
    """What is not cut into words of 16 bytes, and what is not added up in float32, is left to NCCL."""
    team = Team.of(range(context.world_size))
    for dtype, count in ((torch.bfloat16, 12), (torch.float32, 5), (torch.uint8, 8)):
        channel = symmetric_channel(team, context.device, dtype, Refused())
        assert channel.by_kernel("all_gather", gathered(1, count, team.size)) is None
        assert channel.by_kernel("all_gather", gathered(2, count, team.size)) is None
    for dtype in (torch.int64, torch.float64):
        channel = symmetric_channel(team, context.device, dtype, Refused())
        assert channel.by_kernel("reduce_scatter", scattered(1, 16, team.size)) is None
