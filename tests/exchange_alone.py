"""What befalls one of several ranks alone where kernels exchange, and random programs; each a case of a world."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from exchange_cases import PARTIAL, define, expected, inputs, piece, piece_of_output
from exchange_collectives import (
    begin_in_a_capture,
    begin_short_of_memory,
    call_collectives_from_threads,
    collectives_elsewhere,
    keep_nothing_of_a_world,
    run_collectives,
    run_on_views,
    run_plain_collectives,
    run_programs_of_collectives,
    sizes_without_a_kernel,
    skip_a_collective,
    wait_for_a_killed_rank,
    wait_in_vain,
)
from exchange_passed import run_passed
from exchange_programs import random_program
from exchange_scattered import run_scattered
from fusion_check import check
from quantized_check import check as check_quantized
from torch.distributed.tensor import Partial, Shard

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition
from shardfuse.errors import PeerLostError
from shardfuse.executor import symmetric_slots, tuning
from shardfuse.executor.cache import LRUCache
from shardfuse.in_kernel import exchanging
from shardfuse.mesh import symmetric
from shardfuse.mesh.process import ProcessContext, finalize, initialize
from shardfuse.nn import CrossEntropyLoss, LogProb, quantized
from shardfuse.rank_errors import ExchangeTimeoutError, ThreadsError
from shardfuse.schedulers.candidates import candidates
from shardfuse.start_errors import ExchangeMemoriesDisagreeError

PROGRAMS = 10
"""Random ones, of which most have a kernel that exchanges."""


class Norm:
    """A norm of rows of 96, for any number of them."""

    def __init__(self, context: ProcessContext) -> None:
        self.rank, self.ranks = context.rank, context.world_size
        self.fd: FusionDefinition = define("rms_norm", 96, self.ranks, DataType.BFloat16)

    def run(self, rows: int) -> torch.Tensor:
        given = inputs("rms_norm", rows, 96, torch.bfloat16)
        (found,) = self.fd.execute([piece("rms_norm", k, v, self.ranks, self.rank) for k, v in enumerate(given)])
        return found

    def check(self, rows: int) -> None:
        found, given = self.run(rows), inputs("rms_norm", rows, 96, torch.bfloat16)
        whole = [expected("rms_norm", [v.to(t) for v in given])[0] for t in (torch.float64, torch.float32)]
        wide, eager = (piece_of_output("rms_norm", v, self.ranks, self.rank) for v in whole)
        assert_near(found, wide, eager.bfloat16(), n=2, what=f"{rows} rows on rank {self.rank}")
        assert not self.fd.explain().collectives


def run_short_of_memory_alone(context: ProcessContext) -> None:
    """A rank that has no memory for a table fails on all, and all find room in the next call."""
    norm, make = Norm(context), symmetric_slots.made_to_last

    def refuse(make: object, device: torch.device) -> None:
        raise torch.OutOfMemoryError("no memory")

    if context.rank == 1:
        symmetric_slots.made_to_last = refuse
    with pytest.raises(torch.OutOfMemoryError if context.rank == 1 else PeerLostError, match="no memory"):
        norm.run(3)
    symmetric_slots.made_to_last = make
    for rows in (3, 5, 3):
        norm.check(rows)


def skip_a_batch(context: ProcessContext) -> None:
    """A rank runs out of memory between what ranks agree on and the launch, and goes on with its next batch.

    The others add that to the batch that it has left out.  All ranks are ended, with a line that says so.
    """
    norm, room = Norm(context), symmetric.arena().room
    norm.check(3)
    left = room.left

    def refuse() -> int:
        raise torch.OutOfMemoryError("no memory")

    for turn in range(1 << 30):
        room.left = refuse if (context.rank, turn) == (1, 2) else left
        try:
            norm.run(3)
        except torch.OutOfMemoryError:
            assert context.rank == 1
        time.sleep(0.05)


def begin_anew(context: ProcessContext) -> None:
    """A world after one in which a rank has waited in vain: words of that are none of the new one's."""
    for _ in range(2):
        found = symmetric.arena()
        assert isinstance(found, symmetric.Arena), found
        found.timeout = 2.0 if context.rank == 0 else 60.0
        norm = Norm(context)
        norm.check(3)
        if context.rank == 0:
            assert norm.run(3).isnan().all()
            with pytest.raises(ExchangeTimeoutError, match="rank 1 did not send its part of row 0 within 2 s"):
                norm.run(3)
        else:
            time.sleep(4.0)
            norm.check(3)  # what rank 0 has sent is there
        finalize()
        context = initialize(timeout=60)
    norm = Norm(context)
    for rows in (3, 1, 5):
        norm.check(rows)


def call_from_threads(context: ProcessContext) -> None:
    """Ranks could come to their launches in other orders: a second thread is refused, and the first goes on."""
    norm, refused = Norm(context), list[BaseException]()
    norm.check(3)

    def run() -> None:
        try:
            norm.run(3)
        except ThreadsError as error:
            refused.append(error)

    for _ in range(2):
        thread = threading.Thread(target=run, name=f"second of rank {context.rank}")
        thread.start()
        thread.join()
        norm.check(3)
    assert len(refused) == 2


def run_programs(context: ProcessContext) -> None:
    """Each twice, as words of the first run are there in the second; ranks beside its mesh call it as well."""
    exchanged = 0
    for seed in range(PROGRAMS):
        case = random_program(seed, context.world_size)
        for _ in range(2):
            try:
                check(case.fd, case.inputs, sizes=case.sizes)
            except Exception as error:
                error.add_note(f"rank {context.rank}, {case}")
                raise
        exchanged += bool(exchanging(case.fd.fec.last_plan))
    assert exchanged > PROGRAMS // 2, exchanged


def run_quantised_norms(context: ProcessContext) -> None:
    """``nn.quantized.AddRMSNorm`` of the ranks' summands: its sum, its norm and its scales by one kernel."""
    mesh = DeviceMesh(range(context.world_size))
    for scales in ("row", "block", "given"):
        x, residual, w = inputs(PARTIAL, 3, 640, torch.bfloat16, context.world_size)
        made = quantized.AddRMSNorm(
            640, 1e-5, scales=scales, mesh=mesh, input=Partial(), parameters="local", dtype=torch.bfloat16
        )  # fmt: skip
        made.load_state_dict({"weight": w})
        given = (torch.tensor([0.02]),) if scales == "given" else ()
        for _ in range(2):
            values, total = made(x[context.rank], residual, *given)
            summed = x.double().sum(0).bfloat16().double() + residual.double()  # as all ranks round it
            wide = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-5) * w.double()
            check_quantized(values, wide, torch.float8_e4m3fn, values.scales if given else scales)
            assert_near(total, summed, n=1, rows=None, what="new residual")
        (bound,) = made._bound.values()
        told = bound.op.forward.explain()
        assert told.kernels == 1, str(told)
        assert not told.collectives, str(told)


def run_losses(context: ProcessContext) -> None:
    """Over a sharded vocabulary: a mean of rows is added up behind the kernel that exchanges, by one of its own."""
    mesh, rank, ranks, n = DeviceMesh(range(context.world_size)), context.rank, context.world_size, 96
    made = torch.Generator().manual_seed(0)
    x, target = torch.randn(5, n, generator=made), torch.randint(n, (5,), generator=made)
    target[3] = -100
    for module in (
        CrossEntropyLoss(mesh=mesh, logits=Shard(-1)),
        CrossEntropyLoss(mesh=mesh, logits=Shard(-1), reduction="none", z_loss=0.1),
        LogProb(mesh=mesh, logits=Shard(-1), entropy=True),
    ):
        own = x.chunk(ranks, -1)[rank].clone().requires_grad_()
        found = module(own, target)
        found = (found,) if isinstance(found, torch.Tensor) else found
        upstream = [torch.linspace(1, 2, v.numel()).view(v.shape) for v in found]
        torch.autograd.backward(found, upstream)
        parts = list[list[torch.Tensor]]()
        for dtype in (torch.float64, torch.float32):
            wide = x.detach().to(dtype).clone().requires_grad_()
            wanted = _loss_of(module, wide, target)
            torch.autograd.backward(wanted, [g.to(dtype) for g in upstream])
            parts.append([*wanted, wide.grad.chunk(ranks, -1)[rank]])
        for value, exact, eager in zip((*found, own.grad), *parts, strict=True):
            assert_near(value.detach(), exact.detach(), eager.detach(), n=4, what=f"{module} on rank {rank}")
        (bound,) = module._bound.values()
        told = bound.op.forward.explain()
        assert not told.collectives, str(told)
        assert told.kernels == 2, "on a CPU stray targets are counted, which is a sum of rows too"


def _loss_of(module: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """What torch makes of unsharded logits; rows that are ignored have 0."""
    logs, taken = x.log_softmax(-1), target >= 0
    if isinstance(module, LogProb):
        chosen = logs.gather(1, target.clamp(min=0)[:, None])[:, 0]
        return [torch.where(taken, v, 0.0) for v in (chosen, -(logs.exp() * logs).sum(-1))]
    if module.reduction == "mean":
        return [torch.nn.functional.cross_entropy(x, target)]
    rows = torch.nn.functional.cross_entropy(x, target, reduction="none")
    return [torch.where(taken, rows + 0.1 * x.logsumexp(-1).square(), 0.0)]


def share_as_much_as_is_asked_for(context: ProcessContext) -> None:
    """Of 1 MB, which the environment says here, a program that needs that much beside another one's has none; of 2 MB,
    which the next world is asked for, it has; unlike sizes are an error on all ranks."""
    ranks, given = context.world_size, inputs(PARTIAL, 64, 640, torch.bfloat16, context.world_size)
    here = [piece(PARTIAL, k, v, ranks, context.rank) for k, v in enumerate(given)]
    for megabytes in (1, 2):
        found = symmetric.arena()
        assert isinstance(found, symmetric.Arena), found
        assert (context.exchange_memory, found.words * 8) == (megabytes, megabytes << 20)
        Norm(context).check(3)
        fd = define(PARTIAL, 640, ranks, DataType.BFloat16)
        values = fd.execute(here)
        wide, eager = (expected(PARTIAL, [v.to(t) for v in given]) for t in (torch.float64, torch.float32))
        for k, value in enumerate(values):
            assert_near(value, wide[k], eager[k].bfloat16(), n=2, what=f"output {k}")
        told = str(fd.explain())
        assert bool(fd.explain().collectives) == (megabytes == 1), told
        assert ("983040 bytes are left: SHARDFUSE_EXCHANGE_MEMORY gives more" in told) == (megabytes == 1), told
        finalize()
        if megabytes == 1:
            context = initialize(timeout=60, exchange_memory=2)
    with pytest.raises(ExchangeMemoriesDisagreeError, match=r"were given \[2, 3\] MB of exchange memory"):
        initialize(timeout=60, exchange_memory=2 + context.rank)
    initialize(timeout=60)


def tune_beside_an_exchange(context: ProcessContext) -> None:
    """Another kernel of the program is tuned, by one rank; no rank launches by itself the one that exchanges.

    Where ranks have agreed on collectives, what was tuned is theirs, also when the plan is made once more.
    """
    ranks, found, asked = context.world_size, symmetric.arena(), list[int]()
    assert isinstance(found, symmetric.Arena), found
    tuning.candidates = lambda *of: candidates(*of)[:2]
    tuning.read_choice = lambda *of: None  # none that a run before this one has left

    def clock(runs: Sequence[Callable[[], object]]) -> list[float]:
        asked.append(len(runs))
        for run in runs:
            run()
        return [100.0 * 0.9**k for k in range(len(runs))]  # the later, the faster

    for kind, is_apart in (("rms_norm", False), (PARTIAL, True)):
        fd = define(kind, 640, ranks, DataType.BFloat16)
        with fd:
            other = fd.define_tensor([-1, 700], contiguity=True)
            fd.add_output(fd.ops.exp(other))
            other.set_device_mesh(DeviceMesh(range(ranks)))
        found.words = found.used if is_apart else found.words
        given = inputs(kind, 8, 640, torch.bfloat16, ranks)
        here = [piece(kind, k, v, ranks, context.rank) for k, v in enumerate(given)]
        here.append(torch.linspace(-1, 1, 2100).view(3, 700))
        launches = sum(found.order.launches().values())
        asked.clear()
        warned = pytest.warns(UserWarning, match=r"tune\(\) leaves exchange_T\d+ as proposed: ranks exchange inside")
        with nullcontext() if is_apart else warned:
            tuned = fd.tune(here, timer=clock)
        assert sum(found.order.launches().values()) == launches
        assert bool(asked) == (context.rank == 0)
        assert len(tuned) == (2 if is_apart else 1)
        assert all(t.chosen != t.proposed and not t.kernel.startswith("exchange") for t in tuned)
        for _ in range(2):
            assert bool(exchanging(fd.fec.plan_for(here, None))) != is_apart
            results = fd.execute(here)
            plan = fd.fec.last_plan
            schedules = [k.schedule for s in plan.segments for k in s.kernels if k.exchange is None]
            assert schedules == [t.chosen for t in tuned]
            wide, eager = (expected(kind, [v.to(t) for v in given]) for t in (torch.float64, torch.float32))
            for k, value in enumerate(results[:-1]):
                parts = [piece_of_output(kind, v[k], ranks, context.rank) for v in (wide, eager)]
                assert_near(value, parts[0], parts[1].bfloat16(), n=2, what=f"{kind}, output {k}")
            assert_near(results[-1], here[-1].double().exp(), here[-1].exp(), n=2, what="exp")
            fd.fec.plans, fd.fec.programs = LRUCache(4), LRUCache(4)  # as if others had pushed them out


CASES: dict[str, Callable[[ProcessContext], None]] = {
    "short_alone": run_short_of_memory_alone,
    "skip": skip_a_batch,
    "anew": begin_anew,
    "threads": call_from_threads,
    "programs": run_programs,
    "quantised": run_quantised_norms,
    "losses": run_losses,
    "memory": share_as_much_as_is_asked_for,
    "tuned": tune_beside_an_exchange,
    "collectives": run_collectives,
    "collectives_of_views": run_on_views,
    "plain_collectives": run_plain_collectives,
    "threads_of_collectives": call_collectives_from_threads,
    "short_collective": begin_short_of_memory,
    "skipped_collective": skip_a_collective,
    "capture": begin_in_a_capture,
    "nothing_kept": keep_nothing_of_a_world,
    "collectives_elsewhere": collectives_elsewhere,
    "programs_of_collectives": run_programs_of_collectives,
    "no_collectives": sizes_without_a_kernel,
    "late_collective": wait_in_vain,
    "late_gather": partial(wait_in_vain, kind="all_gather"),
    "killed_collective": wait_for_a_killed_rank,
    "scattered": run_scattered,
    "passed": run_passed,
}
