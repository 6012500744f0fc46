"""Kernels in which ranks wait for one another on many streams of a GPU: of calls, of graphs, and beside NCCL's.

What a launch takes of another's words is seen: inputs alternate between two sets, whose statistics and sums differ, and
every result is compared with the one that the same inputs had when nothing else ran.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from exchange_cases import PARTIAL, define, inputs, piece

from shardfuse import DataType
from shardfuse.mesh.process import ProcessContext

COLUMNS = 8192
SETS = 2
LARGE = 1 << 23
"""Elements of float32 that NCCL reduces: 32 MB, for which it launches as many programs as it ever does."""


class Checked:
    """A program of so many rows, with two sets of inputs and the results of each, which other tests compare."""

    def __init__(self, kind: str, rows: int, context: ProcessContext) -> None:
        given = inputs(kind, rows, COLUMNS, torch.bfloat16, context.world_size)
        here = [piece(kind, k, v, context.world_size, context.rank).to(context.device) for k, v in enumerate(given)]
        self.fd = define(kind, COLUMNS, context.world_size, DataType.BFloat16)
        self.here = [here, [t.float().square().to(t.dtype) for t in here]]
        self.own = [torch.empty_like(t) for t in here]
        self.wanted = [[t.clone() for t in self.fd.execute(here)] for here in self.here]
        assert not any(torch.equal(*pair) for pair in zip(*self.wanted, strict=True))
        assert not self.fd.explain().collectives

    def put(self, k: int) -> None:
        """Set ``k`` is what a graph reads from now on."""
        for own, given in zip(self.own, self.here[k], strict=True):
            own.copy_(given)

    def run(self, k: int) -> torch.Tensor:
        return self.wrong(self.fd.execute(self.here[k]), k)

    def wrong(self, found: Sequence[torch.Tensor], k: int) -> torch.Tensor:
        """How many elements are not those of set ``k``; NaN is none of them."""
        return torch.stack([(a != b).sum() for a, b in zip(found, self.wanted[k], strict=True)]).sum()


class Replayed:
    """A graph of several programs, one after the other, on a stream of its own."""

    def __init__(self, programs: Sequence[Checked]) -> None:
        self.programs, self.stream, self.graph = programs, torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.found = [program.fd.execute(program.own) for program in programs]
        torch.cuda.synchronize()

    def run(self, k: int, wrong: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            for program in self.programs:
                program.put(k)
            self.graph.replay()
            for program, found in zip(self.programs, self.found, strict=True):
                wrong += program.wrong(found, k)


def run_beside_graphs(context: ProcessContext, replays: int, say: Callable[[str], None]) -> None:
    """Replays of two graphs, and calls on a third stream and on the default one: in one order on all ranks, which are
    late now and then."""

    def made(kind: str, rows: int) -> Checked:
        return Checked(kind, rows, context)

    norm = "rms_norm"
    graphs = [Replayed([made(norm, 8), made(PARTIAL, 3)]), Replayed([made(PARTIAL, 17), made(norm, 100)])]
    calls = [made(kind, rows) for kind in (norm, PARTIAL) for rows in (1, 8, 100, 400)]
    say("has captured")
    streams = [torch.cuda.Stream(), torch.cuda.default_stream()]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(len(graphs) + len(streams))]
    together()
    both, own = random.Random(7), random.Random(context.rank)
    for _ in range(replays):
        at, k = both.randrange(len(wrong)), both.randrange(SETS)
        if at < len(graphs):
            graphs[at].run(k, wrong[at])
        else:
            program = both.choice(calls)
            with torch.cuda.stream(streams[at - len(graphs)]):
                wrong[at] += program.run(k)
        if own.random() < 0.002:
            time.sleep(own.random() * 0.005)
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0] * len(wrong)


def run_beside_groups(context: ProcessContext, rounds: int, say: Callable[[str], None]) -> None:
    """All-reduces of two process groups and kernels that exchange, each kind on a stream of its own, which every rank
    starts in an order of its own.  One of the groups is made when programs have run already."""
    programs = [Checked(kind, rows, context) for kind in ("rms_norm", PARTIAL) for rows in (8, 400)]
    groups = [dist.group.WORLD, dist.new_group(backend="nccl")]
    numbers = [torch.ones(LARGE, device="cuda") for _ in groups]
    streams = [torch.cuda.Stream() for _ in (*groups, "kernels")]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def reduce(j: int) -> None:
        for _ in range(2):
            dist.all_reduce(numbers[j], dist.ReduceOp.MAX, group=groups[j])

    # A kernel is loaded at its first launch, for which CUDA may wait until nothing runs: ranks that start things in
    # other orders would wait for one another.  So all of them have been launched before, one at a time.
    with torch.cuda.stream(streams[-1]):
        for program in programs:
            for k in range(SETS):
                wrong.add_(program.run(k))
                torch.cuda.synchronize()
    for j in range(len(groups)):
        with torch.cuda.stream(streams[j]):
            reduce(j)
        torch.cuda.synchronize()
    say("has groups")
    together()
    both, own = random.Random(9), random.Random(context.rank)

    for _ in range(rounds):
        steps = [(program, both.randrange(SETS)) for program in both.choices(programs, k=3)]

        def call(steps: list[tuple[Checked, int]] = steps) -> None:
            for program, k in steps:
                wrong.add_(program.run(k))

        started = [*(lambda j=j: reduce(j) for j in range(len(groups))), call]
        for at in own.sample(range(len(started)), len(started)):
            with torch.cuda.stream(streams[at]):
                started[at]()
            if own.random() < 0.2:
                time.sleep(own.random() * 0.0005)
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert all(number.eq(1).all() for number in numbers)


def together() -> None:
    """All ranks are here, and have done what they had to."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
