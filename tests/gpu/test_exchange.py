"""Ranks that exchange statistics inside of a kernel, as launches on streams of one GPU that run side by side.

Their slots are in one memory; the text of the kernels, the words and the waits are those of several GPUs.  A wait ends
after two seconds here, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exchange_cases import (
    KINDS,
    LOSS,
    PARTIAL,
    Ranks,
    assembled,
    define,
    expected,
    inputs,
    kernel_of,
    piece_of_output,
    plan_of,
    with_room,
)
from exchange_fusions import BACKWARD, LOG_PROB, OF_COLUMNS, OF_SUMMANDS, PROGRAMS, SOFTMAX_BACKWARD
from exchange_images import LONG, ImageNorm

from benchmarks.roundings import assert_near
from shardfuse import DataType
from shardfuse.codegen.claims import within
from shardfuse.codegen.mesh_exchange import Reported
from shardfuse.codegen.source import KernelSource
from shardfuse.device import H200, Device
from shardfuse.executor.kernel import Launch
from shardfuse.ir.expr import BoundTensor
from shardfuse.schedulers.exchange_forms import Form, exchanged_form
from shardfuse.schedulers.exchange_room import LEFT_FREE

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
ROWS = [1, 8, 37, 64]
REPLAYS = 10_000


class Job:
    """A program on so many ranks, with its inputs."""

    def __init__(
        self,
        kind: str,
        rows: int,
        n: int,
        ranks: int,
        directory: Path,
        device: Device = H200,
        launched_as: Callable[[int, KernelSource], list[KernelSource]] = lambda rank, source: [source],
    ) -> None:
        self.kind, self.given = kind, inputs(kind, rows, n, torch.bfloat16, ranks)
        self.plan = kernel_of(plan_of(define(kind, n, ranks, DataType.BFloat16), rows, device, n))
        self.world = Ranks(self.plan, GPU)
        self.launches = self.world.launches(directory, launched_as=launched_as)
        self.tensors = [self.world.pieces(kind, rank, self.given) for rank in range(ranks)]
        self.streams = [torch.cuda.Stream(GPU) for _ in range(ranks)]

    def arguments(self, rank: int) -> list[torch.Tensor]:
        return [self.tensors[rank][t] for t in (*self.plan.segment.inputs, *self.plan.segment.outputs)]

    def launch(self, *, but: int | None = None) -> None:
        torch.cuda.synchronize()
        for rank, launch in enumerate(self.launches):
            if rank != but:
                with torch.cuda.stream(self.streams[rank]):
                    launch(self.streams[rank].cuda_stream, *self.arguments(rank))

    def check(self) -> None:
        torch.cuda.synchronize()
        assert Reported.of(int(self.world.report[0])) is None
        if self.kind in PROGRAMS:
            PROGRAMS[self.kind].check(assembled(self.plan, self.tensors), [v.cpu() for v in self.given])
            return
        wide, eager = (expected(self.kind, [v.to(t) for v in self.given]) for t in (torch.float64, torch.float32))
        for k, out in enumerate(self.plan.segment.outputs):
            for rank, t in enumerate(self.tensors):
                parts = [piece_of_output(self.kind, v[k], len(self.tensors), rank) for v in (wide, eager)]
                assert_near(t[out].cpu(), parts[0], parts[1].bfloat16(), n=2, what=f"output {k} of rank {rank}")

    def clear(self) -> None:
        for tensors in self.tensors:
            for out in self.plan.segment.outputs:
                tensors[out].fill_(float("nan"))


def outputs(job: Job) -> list[tuple[BoundTensor, torch.Tensor]]:
    return [(t, tensors[t]) for tensors in job.tensors for t in job.plan.segment.outputs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n", "ranks"), [(1, 8192, 2), (37, 2048, 4), (64, 8192, 2), (500, 512, 2)])
def test_all_ranks_have_what_they_have_together(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    job = Job(kind, min(rows, 8) if kind == PARTIAL else rows, n, ranks, tmp_path)
    for _ in range(5):
        job.clear()
        job.launch()
        job.check()


@pytest.mark.parametrize("kind", [*OF_SUMMANDS, *OF_COLUMNS])
@pytest.mark.parametrize(("rows", "n", "ranks"), [(1, 8192, 2), (8, 8192, 2), (8, 2048, 4)])
def test_results_that_are_cast_to_float8(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    """Once this has passed for blocks, ``exchange_forms.py`` is to say so: then they are chosen by default."""
    test_all_ranks_have_what_they_have_together(kind, rows, n, ranks, tmp_path)


@pytest.mark.parametrize("kind", [LOG_PROB, SOFTMAX_BACKWARD, *BACKWARD])
@pytest.mark.parametrize(("rows", "n", "ranks"), [(1, 8192, 2), (37, 2048, 4), (8, 8191, 2)])
def test_programs_of_modules(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    test_all_ranks_have_what_they_have_together(kind, rows, n, ranks, tmp_path)


@pytest.mark.parametrize("kind", OF_SUMMANDS)
def test_rows_that_ranks_send_are_cast_to_float8(kind: str, tmp_path: Path) -> None:
    part = replace(H200, multiprocessors=LEFT_FREE + (H200.multiprocessors - 4) // 4)
    job = Job(kind, 100, 8192, 2, tmp_path, part)
    assert job.plan.exchange.is_in_rows
    for _ in range(5):
        job.clear()
        job.launch()
        job.check()


@pytest.mark.parametrize(("rows", "n", "ranks"), [(17, 8192, 2), (500, 8192, 2), (300, 4096, 3), (77, 5120, 4)])
def test_rows_that_ranks_send(rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    """In many turns of few programs, so that those of all ranks run at once on one GPU."""
    part = replace(H200, multiprocessors=LEFT_FREE + (H200.multiprocessors - 4) // ranks // 2)
    job = Job(PARTIAL, rows, n, ranks, tmp_path, part)
    assert job.plan.exchange.is_in_rows
    for _ in range(5):
        job.clear()
        job.launch()
        job.check()


@pytest.mark.parametrize("rooms", [(100, 100), (20, 7), (0, 40)])
@pytest.mark.parametrize(("kind", "rows"), [("rms_norm", 500), ("layer_norm", 1100), (PARTIAL, 300)])
def test_programs_claim_their_numbers(kind: str, rows: int, rooms: tuple[int, int], tmp_path: Path) -> None:
    """Each rank on as many multiprocessors as it may take; where that is none, one program has all numbers."""

    def within_room(rank: int, source: KernelSource) -> list[KernelSource]:
        return [replace(source, integers=(*source.integers[:-1], rooms[rank]))]

    job = Job(kind, rows, 8192, 2, tmp_path, launched_as=within_room)
    assert job.plan.exchange.is_claimed
    for _ in range(5):
        job.clear()
        job.launch()
        job.check()
    assert [job.world.tickets_of(rank) for rank in range(2)] == [0, 0]
    assert job.plan.exchange.is_in_rows or [job.world.launches_of(rank) for rank in range(2)] == [5, 5]


@pytest.mark.parametrize(("kind", "rows"), [("rms_norm", 60), (PARTIAL, 8), (PARTIAL, 60)])
def test_ranks_may_run_fewer_programs_at_a_time(kind: str, rows: int, tmp_path: Path) -> None:
    plan = kernel_of(plan_of(define(kind, 8192, 2, DataType.BFloat16), rows))
    job = Job(kind, rows, 8192, 2, tmp_path, launched_as=lambda rank, s: within(s, plan.exchange, (50, 13)[rank]))
    for _ in range(5):
        job.clear()
        job.launch()
        job.check()


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "softmax"])
@pytest.mark.parametrize(("rows", "n", "ranks"), [(37, 8191, 2), (300, 2047, 4)])
def test_ranks_with_more_or_less_of_each_row(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    """Once this and the next have passed, ``exchange_forms.py`` is to say so: then they are chosen by default."""
    test_all_ranks_have_what_they_have_together(kind, rows, n, ranks, tmp_path)


@pytest.mark.parametrize(("rows", "n", "ranks"), [(64, 32768, 2), (64, 32001, 2), (33, 50257, 4)])
def test_a_loss_over_a_sharded_vocabulary_is_the_same_bits_on_all_ranks(
    rows: int, n: int, ranks: int, tmp_path: Path
) -> None:
    job = Job(LOSS, rows, n, ranks, tmp_path)
    assert job.plan.exchange.is_alike == (n % ranks != 0)
    for _ in range(5):
        job.clear()
        job.launch()
        torch.cuda.synchronize()
        (wide,), (eager,) = (expected(LOSS, [v.to(t) for v in job.given]) for t in (torch.float64, torch.float32))
        (out,) = job.plan.segment.outputs
        assert_near(job.tensors[0][out].cpu(), wide, eager, n=4, what="loss")
        assert all(torch.equal(own[out], job.tensors[0][out]) for own in job.tensors)


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "softmax", "add_rms_norm", LOG_PROB, SOFTMAX_BACKWARD])
@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 80000, 2), (12, 66001, 2), (5, 131072, 3)])
def test_rows_that_no_program_holds(kind: str, rows: int, n: int, ranks: int, members: int, tmp_path: Path) -> None:
    """Read again in each phase, or held by several."""
    job = Job(kind, rows, n, ranks, tmp_path, with_room(rows, members))
    shared = Form.SHARED_ALIKE if job.plan.exchange.is_alike else Form.SHARED
    assert exchanged_form(job.plan) is (shared if members > 1 else Form.LONG)
    for _ in range(5):
        job.clear()
        job.launch()
        job.check()


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("norm", LONG)
def test_channels_and_groups_of_images(norm: ImageNorm, members: int, tmp_path: Path) -> None:
    plan, given = norm.plan(with_room(norm.rows, members)), norm.inputs()
    world = Ranks(plan, GPU)
    launches, tensors = world.launches(tmp_path), norm.pieces(world, given)
    streams = [torch.cuda.Stream(GPU) for _ in launches]
    for _ in range(2):
        for own in tensors:
            own[-1].fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, launch, own in zip(streams, launches, tensors, strict=True):
            with torch.cuda.stream(stream):
                launch(stream.cuda_stream, *own)
        torch.cuda.synchronize()
        assert Reported.of(int(world.report[0])) is None
        norm.check(tensors, given)


def test_statistics_are_the_same_bits_on_all_ranks(tmp_path: Path) -> None:
    """Every rank has the same row, so that its piece of the result has to be the same."""
    job = Job("layer_norm", 64, 4096, 2, tmp_path)
    for t in job.plan.segment.inputs:
        job.tensors[1][t].copy_(job.tensors[0][t])
    job.launch()
    torch.cuda.synchronize()
    for t in job.plan.segment.outputs:
        assert torch.equal(job.tensors[0][t], job.tensors[1][t])


def test_graphs_out_of_step(tmp_path: Path) -> None:
    """Each rank replays a graph of its own, as often as the others, whenever it comes to it."""
    job = Job("rms_norm", 8, 8192, 2, tmp_path)
    job.launch()
    job.check()
    graphs = [captured(job.launches[rank], job, rank) for rank in range(2)]
    job.clear()
    for k in range(REPLAYS // 50):
        for rank in (0, 1) if k % 3 else (1, 0):
            with torch.cuda.stream(job.streams[rank]):
                for _ in range(50):
                    graphs[rank].replay()
    job.check()
    assert all(job.world.launches_of(rank) == REPLAYS + 1 for rank in range(2))


def captured(launch: Launch, job: Job, rank: int) -> torch.cuda.CUDAGraph:
    graph, arguments = torch.cuda.CUDAGraph(), job.arguments(rank)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=job.streams[rank]):
        launch(torch.cuda.current_stream().cuda_stream, *arguments)
    return graph


def test_a_rank_that_does_not_come_is_reported(tmp_path: Path) -> None:
    """After the limit, once, and all later launches end at once."""
    job = Job("layer_norm", 200, 8192, 2, tmp_path)
    job.launch(but=1)
    torch.cuda.synchronize()
    reported = Reported.of(int(job.world.report[0]))
    assert reported is not None
    assert (reported.epoch, reported.name) == (1, 2)
    assert 0 <= reported.row < 200
    assert job.tensors[0][job.plan.segment.outputs[0]].isnan().all()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record(job.streams[0])
    for _ in range(20):
        job.launch(but=1)
    after.record(job.streams[0])
    torch.cuda.synchronize()
    assert before.elapsed_time(after) < 1000 * job.world.seconds


@pytest.mark.parametrize(("kind", "rows"), [("layer_norm", 200), (PARTIAL, 8), (PARTIAL, 500)])
def test_a_rank_that_comes_when_others_have_given_up_ends_at_once(kind: str, rows: int, tmp_path: Path) -> None:
    """Their later launches, or their flags of rows, tell it that nobody waits for it any longer."""
    job = Job(kind, rows, 8192, 2, tmp_path)
    for _ in range(3):
        job.launch(but=1)
    torch.cuda.synchronize()
    job.world.report.zero_()  # each rank has its own
    job.world.tables[1][0] = 60 * 10**9
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record(job.streams[1])
    job.launch(but=0)
    after.record(job.streams[1])
    torch.cuda.synchronize()
    assert before.elapsed_time(after) < 30_000
    reported = Reported.of(int(job.world.report[0]))
    assert reported is not None
    assert reported.name == 1
    assert job.tensors[1][job.plan.segment.outputs[0]].isnan().any()
