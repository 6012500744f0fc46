"""What each rank does where ranks exchange inside of kernels, as processes: `python exchange_ranks.py CASE`.

Without a case it serves ranks on the CPU, which are forked from it (`forked_ranks.py`).

Prints `fault SECONDS` (since the epoch) where a rank does what it should not; and after which seconds it has come how
far, and the stacks of its threads where it takes longer than it should.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
if __name__ == "__main__" and len(sys.argv) < 2:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from exchange_alone import CASES
from exchange_cases import PARTIAL, define, expected, inputs, piece, piece_of_output
from exchange_streams import run_beside_graphs, run_beside_groups
from forked_ranks import serve
from quick_interpreter import quick_parts
from triton.experimental import gluon  # noqa: F401 what the interpreter imports at the first launch, once for all ranks

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, initialize
from shardfuse.codegen import claims
from shardfuse.errors import KernelCompileError, PeerLostError
from shardfuse.executor import symmetric_slots
from shardfuse.executor.cache import LRUCache
from shardfuse.executor.kernel import Kernel
from shardfuse.mesh import symmetric
from shardfuse.mesh.process import ProcessContext, finalize

STOPPED = "4"
"""Seconds, where the variable of this name says nothing: less than those after which a silent rank counts as gone."""
REPLAYS, EACH = 10_000, 10
CALLS = 1000
ROUNDS = 500
SHARED = 50
"""As so many times fewer of these where ranks take turns on one GPU: each launch takes two of its time slices."""
ROWS, COLUMNS = (1, 3, 8, 17, 100, 700), 8192
if "TRITON_INTERPRET" in os.environ:  # programs on a CPU, one after the other
    ROWS, COLUMNS, CALLS = (1, 3, 8), 640, 200
    claims.LEFT_FREE = 2  # programs that find no row, beside each that may have one: 32 were most of the time
SLOW = float(os.environ.get("SLOW", "45"))
"""Seconds after which the stacks are printed."""
_STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - _STARTED:6.2f} s: {text}", flush=True)


class Job:
    """One kind of program, for any number of rows."""

    def __init__(self, kind: str, context: ProcessContext) -> None:
        self.kind, self.context, self.ranks = kind, context, context.world_size
        self.fd = define(kind, COLUMNS, self.ranks, DataType.BFloat16)
        self.given = {rows: inputs(kind, rows, COLUMNS, torch.bfloat16, self.ranks) for rows in ROWS}
        self.here = {
            rows: [piece(kind, k, v, self.ranks, context.rank).to(context.device) for k, v in enumerate(given)]
            for rows, given in self.given.items()
        }
        self.parts = {rows: self._parts(rows) for rows in ROWS}

    def _parts(self, rows: int) -> list[list[torch.Tensor]]:
        """What torch makes of all ranks' inputs, in float64 and in float32: of each output, this rank's piece."""
        whole = (expected(self.kind, [v.to(t) for v in self.given[rows]]) for t in (torch.float64, torch.float32))
        return [[piece_of_output(self.kind, v, self.ranks, self.context.rank) for v in values] for values in whole]

    def run(self, rows: int) -> list[torch.Tensor]:
        return self.fd.execute(self.here[rows])

    def check(self, rows: int, found: list[torch.Tensor]) -> None:
        for k, (value, wide, eager) in enumerate(zip(found, *self.parts[rows], strict=True)):
            assert_near(value.cpu(), wide, eager.bfloat16(), n=2, what=f"{self.kind}, output {k}")


def go_on(context: ProcessContext, jobs: list[Job]) -> None:
    """A rank that is stopped for seconds, sizes that change in every call, and graphs out of step beside NCCL."""
    fewer = SHARED if context.backend == "gloo" else 1
    if context.rank == 1:
        waker = f"sleep {os.environ.get('STOPPED', STOPPED)}; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", waker])
        os.kill(os.getpid(), signal.SIGSTOP)
    found = [job.run(8) for job in jobs]
    for job, tensors in zip(jobs, found, strict=True):
        job.check(8, tensors)
    say("was stopped, or has waited for one that was")
    both, own = random.Random(5), random.Random(context.rank)
    for _ in range(CALLS // fewer * 2):
        both.choice(jobs).run(both.choice(ROWS))
        if own.random() < 0.01:
            time.sleep(own.random() * 0.003)
    for job in jobs:
        for rows in ROWS:
            job.check(rows, job.run(rows))
    say("sizes have changed in every call")
    if context.device.type == "cpu":
        return
    side = torch.cuda.Stream()
    for job, rows in ((jobs[0], 8), (jobs[1], 3), (jobs[1], 17)):
        replay_many(job, rows, side, own, (REPLAYS if rows == 8 else REPLAYS // 10) // fewer)
        say(f"graphs of {job.kind} with {rows} rows are replayed")


def replay_many(job: Job, rows: int, side: torch.cuda.Stream, own: random.Random, replays: int) -> None:
    """A graph of so many calls, again and again, while NCCL, where it can, reduces on another stream."""
    number = torch.ones(1 << 20, device=job.context.device)
    eager = job.run(rows)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        for _ in range(EACH):
            replayed = job.run(rows)
    for k in range(replays):
        graph.replay()
        if k % (replays // 10) == 0:
            if job.context.backend == "nccl":
                with torch.cuda.stream(side):
                    dist.all_reduce(number, dist.ReduceOp.MAX)
            time.sleep(own.random() * 0.01)
    torch.cuda.synchronize()
    for one, other in zip(replayed, eager, strict=True):
        assert torch.equal(one, other)


def count_on(context: ProcessContext, job: Job) -> None:
    """After more than 2**31 launches there are words of any age: of more rows than have been of late, too."""
    found = symmetric.arena()
    assert isinstance(found, symmetric.Arena), found
    for launches in (1 << 30, (1 << 31) - 1, (1 << 31) + 5):
        dist.barrier()
        for region in found.regions.values():
            if region.table[-1] >= 1 << 32:  # of words: the number of its last launch, above what is counted of it
                region.table[-1] = ((launches << 32) + (1 << 63)) % (1 << 64) - (1 << 63)
        synchronize(context)
        dist.barrier()
        for _ in range(2):
            job.check(ROWS[0], job.run(ROWS[0]))
    if context.rank == 1:
        time.sleep(1.0)
    for rows in ROWS[1:]:
        job.check(rows, job.run(rows))


def fall_back(context: ProcessContext) -> None:
    """Where the caller has not asked for kernels, and one does not compile on a rank, all ranks have collectives.

    Rows are of as many columns on all ranks, as those are that kernels exchange by default.
    """
    os.environ["SHARDFUSE_EXCHANGE"] = "auto"
    compiled, mesh = Kernel.compile, DeviceMesh(range(context.world_size))
    even = COLUMNS - COLUMNS % context.world_size

    def refuse(kernel: Kernel, device: torch.device) -> None:
        if kernel.source.name.startswith("exchange"):
            raise KernelCompileError(kernel.source.name, "no registers are left", "")
        compiled(kernel, device)

    Kernel.compile = refuse if context.rank == 1 else compiled
    for _ in range(2):  # another definition of the same text finds what ranks have agreed on
        run_on(mesh, ParallelType.mesh_x, 6, context, columns=even, why="does not compile on")
    Kernel.compile = compiled
    run_on(mesh, ParallelType.mesh_x, 5, context, columns=even)
    os.environ["SHARDFUSE_EXCHANGE"] = "symmetric"


def fit_on_too_few(context: ProcessContext) -> None:
    """A grid that a rank does not run at once is no smaller there, as its peers' programs would wait for the rest.

    All ranks have collectives, before anything is launched; where kernels were asked for, an error.
    """
    resident, mesh, order = Kernel.resident, DeviceMesh(range(context.world_size)), symmetric.arena().order
    even, launches = COLUMNS - COLUMNS % context.world_size, sum(order.launches().values())
    Kernel.resident = (lambda kernel: 0) if context.rank == 1 else resident
    os.environ["SHARDFUSE_EXCHANGE"] = "auto"
    run_on(mesh, ParallelType.mesh_x, 1, context, columns=even, why="does not compile on")
    os.environ["SHARDFUSE_EXCHANGE"] = "symmetric"
    refused = KernelCompileError if context.rank == 1 else PeerLostError
    with pytest.raises(refused, match="programs wait for each other, 0 run at once"):
        run_on(mesh, ParallelType.mesh_x, 1, context, columns=even)
    assert sum(order.launches().values()) == launches
    Kernel.resident = resident
    run_on(mesh, ParallelType.mesh_x, 1, context, columns=even)


def run_short_of_memory(context: ProcessContext) -> None:
    """Where there was no room, ranks keep to collectives once there is: a rank that binds a program anew is alone."""
    found, mesh = symmetric.arena(), DeviceMesh(range(context.world_size)[::-1])
    words, found.words = found.words, found.used

    def bind_anew(fd: FusionDefinition) -> None:
        found.words = words
        if context.rank == 0:
            fd.fec.programs = LRUCache(1)

    run_on(mesh, ParallelType.mesh_x, 7, context, why="of symmetric memory 0 bytes are left", before_last=bind_anew)


def do_fault(case: str, jobs: list[Job]) -> Callable[[], object]:
    """What rank 1 does while rank 0 waits in a kernel."""
    time.sleep(1.0)
    print(f"fault {time.time()}", flush=True)
    match case:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return lambda: jobs[0].run(8)
        case "raise":
            raise ValueError("a bug")
        case "leave":
            finalize()
            sys.exit()
        case "elsewhere":
            return lambda: jobs[0].fd.execute([x.to("cuda:0") for x in jobs[0].here[8]])
        case _:
            return lambda: jobs[1].run(8)
    raise AssertionError(case)


def meshes(context: ProcessContext) -> None:
    """Programs of some ranks, of which each has others, then of lines of all ranks; each checks what it has.

    Ranks have handed out more or less before: those of a line have their slots at one place all the same.
    """
    symmetric_slots._LEAST = 16  # words, so that these few rows take more or less
    whole = DeviceMesh([[0, 1], [2, 3]])
    lines = {ParallelType.mesh_x: ((0, 1), (2, 3)), ParallelType.mesh_y: ((0, 2), (1, 3))}
    for teams in lines.values():
        (team,) = [t for t in teams if context.rank in t]
        for k in range(1 + min(team)):
            run_on(DeviceMesh(list(team)), ParallelType.mesh_x, 4 + k, context)
    for dim in lines:
        run_on(whole, dim, 4, context)
    say(f"has {symmetric.arena().used} words")


def hosts() -> None:
    """A world of two hosts, as far as ranks know: those of a host exchange, and the others have collectives."""
    name = symmetric._host()
    symmetric._host = lambda: f"{name} {int(os.environ['RANK']) // 2}"
    context = initialize(timeout=60)
    assert set(symmetric.arena().addresses) == ({0, 1} if context.rank < 2 else {2, 3})
    whole = DeviceMesh([[0, 1], [2, 3]])
    run_on(whole, ParallelType.mesh_x, 4, context)
    run_on(DeviceMesh([2, 3] if context.rank > 1 else [1, 0]), ParallelType.mesh_x, 3, context)
    team = [0, 2] if context.rank % 2 == 0 else [1, 3]
    for mesh, dim in ((whole, ParallelType.mesh_y), (DeviceMesh(team), ParallelType.mesh_x)):
        run_on(mesh, dim, 4, context, why="do not reach each other's memory")
    say("done")
    finalize()


def run_on(
    mesh: DeviceMesh,
    dim: ParallelType,
    rows: int,
    context: ProcessContext,
    *,
    columns: int = COLUMNS,
    why: str = "",
    before_last: Callable[[FusionDefinition], None] = lambda fd: None,
) -> None:
    """An RMSNorm of rows that are cut along ``dim`` of ``mesh``, as often as words could be of another program.

    why: it has collectives.  before_last: is done before the last call.
    """
    team = mesh.team(context.rank, dim)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, columns], contiguity=True, dtype=DataType.Float)
        total = fd.ops.sum(fd.ops.mul(x, x), [1], keepdim=True)
        fd.add_output(fd.ops.mul(x, fd.ops.rsqrt(total)))
        x.set_device_mesh(mesh)
        x.outer_split(1, len(team), uneven=columns % len(team) != 0)
        x.axis(1).parallelize(dim)
    for turn in range(3):
        made = torch.Generator().manual_seed(1000 * turn + 100 * rows + min(team))
        whole = torch.randn((rows, columns), generator=made)
        own = whole.chunk(len(team), 1)[team.index(context.rank)].contiguous().to(context.device)
        if turn == 2:
            before_last(fd)
        (found,) = fd.execute([own])
        wide = whole.double() * whole.double().square().sum(1, keepdim=True).rsqrt()
        parts = [t.chunk(len(team), 1)[team.index(context.rank)] for t in (wide, wide.float())]
        assert_near(found.cpu(), *parts, n=4, what=f"{mesh}, {dim}, {rows} rows")
    assert bool(fd.explain().collectives) == bool(why), fd.explain()
    assert why in str(fd.explain())


def synchronize(context: ProcessContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize()


def main(case: str) -> None:
    faulthandler.dump_traceback_later(SLOW, repeat=True)
    say("has started")
    context = initialize(timeout=60)
    say(f"has a world of {context.world_size} by {context.backend}")
    assert isinstance(symmetric.arena(), symmetric.Arena), symmetric.arena()
    assert context.exchange == "kernels"
    if case == "meshes":
        meshes(context)
        finalize()
        hosts()
        return
    if case in CASES:
        CASES[case](context)
        say("done")
        finalize()
        return
    if case in ("graphs", "groups"):
        if case == "graphs":
            run_beside_graphs(context, REPLAYS // (SHARED if context.backend == "gloo" else 1), say)
        else:
            run_beside_groups(context, ROUNDS, say)
        say("done")
        finalize()
        return
    jobs = [Job(kind, context) for kind in ("rms_norm", PARTIAL)]
    say("has inputs")
    for job in jobs:
        for rows in ROWS:
            job.check(rows, job.run(rows))
            # a large message of more than two ranks goes in two steps, by NCCL
            assert not job.fd.explain().collectives or (context.world_size > 2 and rows == ROWS[-1])
        say(f"has run {job.kind}")
    synchronize(context)
    dist.barrier()
    if case == "few":
        count_on(context, jobs[0])
        fall_back(context)
        fit_on_too_few(context)
        run_short_of_memory(context)
    elif case == "go_on":
        go_on(context, jobs)
    else:
        run = do_fault(case, jobs) if context.rank == 1 else lambda: jobs[0].run(8)
        run()
        synchronize(context)
        say("has gone on, and is to be ended")
        time.sleep(30)  # until this rank is ended
    say("done")
    finalize()
    say("has left")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        for owner, name, value in quick_parts():
            setattr(owner, name, value)
    given = sys.argv[1:] or serve()
    if given:
        main(given[0])
