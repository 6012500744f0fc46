"""Kernels whose ranks exchange statistics, one rank after the other: as often as words have to go round.

Programs of the interpreter do not wait.  Every pass of all ranks has the same number of a launch, so that what one
stores in a pass the others find in the next: after one pass for each exchange, and one, all is there.
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
)
from exchange_fusions import BACKWARD, LOG_PROB, OF_COLUMNS, OF_SUMMANDS, PROGRAMS, SOFTMAX_BACKWARD

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.codegen import claims
from shardfuse.codegen.claims import within
from shardfuse.codegen.exchange_functions import GONE
from shardfuse.codegen.mesh_exchange import flags_of_rows, row_elements
from shardfuse.codegen.source import KernelSource
from shardfuse.device import H200, Device
from shardfuse.ir.expr import BoundTensor
from shardfuse.ir.op import Reduce
from shardfuse.schedulers import sent_words
from shardfuse.schedulers.exchange_room import LEFT_FREE
from shardfuse.schedulers.plan import KernelPlan


def run(
    world: Ranks,
    tensors: list[dict[BoundTensor, torch.Tensor]],
    directory: Path,
    launched_as: Callable[[int, KernelSource], list[KernelSource]] = lambda rank, source: [source],
) -> None:
    """The kernel of all ranks on the ``tensors`` of each, as often as words have to go round."""
    plan = world.plan
    launches = world.launches(directory, interpret=True, launched_as=launched_as)
    rounds = 1 + max(len(plan.exchange.statistics), 1)
    rounds += sum(isinstance(e.op, Reduce) for e in plan.segment.exprs) * (plan.exchange.members > 1)
    for _ in range(rounds):
        for rank, launch in enumerate(launches):
            world.set_launches(7, rank)
            launch(None, *(tensors[rank][t] for t in (*plan.segment.inputs, *plan.segment.outputs)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 640, 2), (5, 96, 3), (1, 2048, 4)])
def test_what_all_ranks_have_together(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    check_together(kind, rows, n, ranks, tmp_path)


def check_together(kind: str, rows: int, n: int, ranks: int, directory: Path, device: Device = H200) -> None:
    """What all ranks make of a program, compared with torch."""
    plan = kernel_of(plan_of(define(kind, n, ranks, DataType.BFloat16), rows, device))
    world, given = Ranks(plan, torch.device("cpu")), inputs(kind, rows, n, torch.bfloat16, ranks)
    tensors = [world.pieces(kind, r, given) for r in range(ranks)]
    run(world, tensors, directory)
    wide, eager = expected(kind, [v.double() for v in given]), expected(kind, [v.float() for v in given])
    for k, out in enumerate(plan.segment.outputs):
        for rank, t in enumerate(tensors):
            parts = [piece_of_output(kind, v[k], ranks, rank) for v in (wide, eager)]
            assert_near(t[out], parts[0], parts[1].bfloat16(), n=2, what=f"output {k} of rank {rank}")
    assert all(world.launches_of(rank) == 8 for rank in range(ranks))


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "softmax"])
@pytest.mark.parametrize("n", [640, 1000, 3000, 5120, 8192, 11008, 32000])
def test_two_ranks_have_the_bits_of_one_that_are_promised(kind: str, n: int, tmp_path: Path) -> None:
    """Of rows whose runs are in parts, of which the last may be shorter, and of a power of two."""
    alone, fd = (define(kind, n, ranks, DataType.BFloat16, invariant="ranks") for ranks in (1, 2))
    plan, given = kernel_of(plan_of(fd, 3)), inputs(kind, 3, n, torch.bfloat16)
    world = Ranks(plan, torch.device("cpu"))
    tensors = [world.pieces(kind, rank, given) for rank in range(2)]
    run(world, tensors, tmp_path)
    (out,), (whole,) = plan.segment.outputs, alone.execute(given)
    for rank, t in enumerate(tensors):
        assert torch.equal(t[out].view(torch.int16), piece_of_output(kind, whole, 2, rank).view(torch.int16)), rank


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "softmax"])
@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 643, 2), (5, 97, 3)])
def test_ranks_with_more_or_less_of_each_row(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    test_what_all_ranks_have_together(kind, rows, n, ranks, tmp_path)


def check_program(kind: str, rows: int, n: int, ranks: int, directory: Path, device: Device = H200) -> KernelPlan:
    """The kernel of a program, with what all ranks make of it compared; where they have the same, bit by bit."""
    plan = kernel_of(plan_of(define(kind, n, ranks, DataType.BFloat16), rows, device, columns=n))
    world, given = Ranks(plan, torch.device("cpu")), inputs(kind, rows, n, torch.bfloat16, ranks)
    tensors = [world.pieces(kind, rank, given) for rank in range(ranks)]
    run(world, tensors, directory)
    PROGRAMS[kind].check(assembled(plan, tensors), given)
    return plan


@pytest.mark.parametrize("kind", OF_SUMMANDS)
@pytest.mark.parametrize(
    ("rows", "n", "ranks", "members"),
    [(3, 640, 2, 1), (5, 384, 3, 1), (1, 2048, 4, 2), (2, 8192, 2, 4), (2, 16384, 2, 4)],
)
def test_a_norm_of_partial_sums_is_cast_to_float8(
    kind: str, rows: int, n: int, ranks: int, members: int, tmp_path: Path
) -> None:
    """Its scale is given, of rows, whose programs give each other their largest elements, or of blocks of rows."""
    assert check_program(kind, rows, n, ranks, tmp_path).exchange.members == members


@pytest.mark.parametrize("kind", OF_SUMMANDS)
@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 640, 2), (2, 384, 3)])
def test_a_norm_of_rows_that_ranks_send_is_cast_to_float8(
    kind: str, rows: int, n: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_words, "MOST_ELEMENTS", 0)
    assert check_program(kind, rows, n, ranks, tmp_path).exchange.is_in_rows


@pytest.mark.parametrize("kind", OF_COLUMNS)
@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 768, 2), (5, 384, 3), (1, 4096, 4)])
def test_a_norm_over_a_sharded_axis_is_cast_to_float8(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    """The largest element of a row is one more statistic; each block is of one rank."""
    plan = check_program(kind, rows, n, ranks, tmp_path)
    assert len(plan.exchange.statistics) == (2 if "row" in kind else 1)


@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 640, 2), (3, 643, 2), (5, 97, 4), (2, 36, 8)])
def test_log_probabilities_and_entropies_over_a_sharded_vocabulary(
    rows: int, n: int, ranks: int, tmp_path: Path
) -> None:
    """Four statistics, of which the picked logit is one; the results are the same bits on all ranks."""
    plan = check_program(LOG_PROB, rows, n, ranks, tmp_path)
    assert (len(plan.exchange.statistics), plan.exchange.is_alike) == (4, n % ranks != 0)


@pytest.mark.parametrize("kind", [SOFTMAX_BACKWARD, *BACKWARD])
@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 640, 2), (5, 96, 3), (1, 2048, 4), (3, 643, 2)])
def test_a_backward_over_a_sharded_axis(kind: str, rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    """Of softmax and of norms, also of the sum of an input and a residual, of even and of uneven rows."""
    plan = check_program(kind, rows, n, ranks, tmp_path)
    assert len(plan.exchange.statistics) == (2 if "LayerNorm" in kind else 1)


@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 640, 2), (3, 643, 2), (5, 97, 4), (2, 36, 8)])
def test_a_loss_over_a_sharded_vocabulary_is_the_same_bits_on_all_ranks(
    rows: int, n: int, ranks: int, tmp_path: Path
) -> None:
    check_loss(rows, n, ranks, tmp_path)


def check_loss(rows: int, n: int, ranks: int, directory: Path, device: Device = H200) -> None:
    """Its largest logit, sum and picked logit are exchanged in one kernel, of which ranks have unlike ones."""
    plan = kernel_of(plan_of(define(LOSS, n, ranks, DataType.BFloat16), rows, device))
    assert (len(plan.exchange.statistics), plan.exchange.is_alike) == (3, n % ranks != 0)
    world, given = Ranks(plan, torch.device("cpu")), inputs(LOSS, rows, n, torch.bfloat16, ranks)
    tensors = [world.pieces(LOSS, rank, given) for rank in range(ranks)]
    run(world, tensors, directory)
    (wide,), (eager,) = (expected(LOSS, [v.to(t) for v in given]) for t in (torch.float64, torch.float32))
    (out,) = plan.segment.outputs
    assert_near(tensors[0][out], wide, eager, n=4, what="loss")
    assert all(torch.equal(own[out], tensors[0][out]) for own in tensors)


@pytest.mark.parametrize(("rows", "n", "ranks"), [(3, 640, 2), (5, 96, 3), (1, 2048, 4)])
def test_rows_that_ranks_send(rows: int, n: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as are sent so, without so many."""
    monkeypatch.setattr(sent_words, "MOST_ELEMENTS", 0)
    test_what_all_ranks_have_together(PARTIAL, rows, n, ranks, tmp_path)


@pytest.mark.parametrize(("rows", "n"), [(1, 6144), (2, 12288)])
def test_programs_that_share_a_row_have_whole_blocks(rows: int, n: int, tmp_path: Path) -> None:
    """A part of a row that is no power of two is cut into smaller blocks: a block of more would be its neighbour's."""
    assert kernel_of(plan_of(define(PARTIAL, n, 2, DataType.BFloat16), rows)).exchange.members > 1
    test_what_all_ranks_have_together(PARTIAL, rows, n, 2, tmp_path)


@pytest.mark.parametrize("dtype", [DataType.Double, DataType.Int, DataType.Int32])
def test_sums_that_are_no_float32_are_those_of_one_program(dtype: DataType, tmp_path: Path) -> None:
    """Programs that share a row give each other float32: of sums of other types each has a whole row."""
    with FusionDefinition() as fd:
        given = fd.define_tensor([2, -1, 2048], contiguity=True, dtype=DataType.BFloat16)
        x = fd.ops.cast(fd.ops.cast(fd.ops.sum(given, [0]), DataType.Float), dtype)
        total = fd.ops.max(x, [-1], keepdim=True) if dtype is DataType.Int32 else fd.ops.sum(x, [-1], keepdim=True)
        fd.add_output(fd.ops.sub(x, total))
        given.set_device_mesh(DeviceMesh(range(2)))
        given.axis(0).parallelize(ParallelType.mesh_x)
    world = Ranks(kernel_of(plan_of(fd, 3)), torch.device("cpu"))
    summands = torch.randint(-50, 50, (2, 3, 2048), generator=torch.Generator().manual_seed(3)).bfloat16()
    tensors = [world.pieces(PARTIAL, rank, [summands]) for rank in range(2)]
    run(world, tensors, tmp_path)
    whole = summands.sum(0).to(dtype.torch)
    total = whole.amax(-1, keepdim=True) if dtype is DataType.Int32 else whole.sum(-1, keepdim=True)
    for found in tensors:
        assert torch.equal(found[world.plan.segment.outputs[0]], whole - total.to(dtype.torch))


ROOMS = [(9, 9), (2, 5), (1, 0)]
"""Of two ranks: multiprocessors that their programs may take.  The interpreter has all programs on number 0."""


@pytest.mark.parametrize("rooms", ROOMS)
@pytest.mark.parametrize(("kind", "is_in_rows"), [("layer_norm", False), (PARTIAL, True)])
def test_programs_claim_their_numbers(
    kind: str, is_in_rows: bool, rooms: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first takes all of them, or the last where all others are to leave their multiprocessors."""
    monkeypatch.setattr(sent_words, "MOST_ELEMENTS", 0)
    monkeypatch.setattr(claims, "LEFT_FREE", 2)  # programs beside those that may stay: 32 more do what these do
    device = replace(H200, multiprocessors=LEFT_FREE + 2)
    plan = kernel_of(plan_of(define(kind, 96, 2, DataType.BFloat16), 5, device))
    assert (plan.exchange.is_claimed, plan.exchange.is_in_rows) == (True, is_in_rows)
    world = check(
        kind, plan, tmp_path, lambda rank, source: [replace(source, integers=(*source.integers[:-1], rooms[rank]))]
    )
    for rank in range(2):
        assert world.launches_of(rank) == 8  # of a program, as many turns
        assert world.tickets_of(rank) == 0


@pytest.mark.parametrize(("kind", "rooms"), [("rms_norm", (2, 5)), (PARTIAL, (2, 5)), (PARTIAL, (1, 9))])
def test_ranks_may_run_fewer_programs_at_a_time(
    kind: str, rooms: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as many as it has room for beside NCCL."""
    monkeypatch.setattr(sent_words, "MOST_ELEMENTS", 0)
    plan = kernel_of(plan_of(define(kind, 96, 2, DataType.BFloat16), 5))
    assert not plan.exchange.is_claimed
    check(kind, plan, tmp_path, lambda rank, source: within(source, plan.exchange, rooms[rank]))


def check(
    kind: str, plan: KernelPlan, directory: Path, launched_as: Callable[[int, KernelSource], list[KernelSource]]
) -> Ranks:
    """All ranks of a kernel of 5 rows of 96, launched so, have what they have together."""
    world, given = Ranks(plan, torch.device("cpu")), inputs(kind, 5, 96, torch.bfloat16, 2)
    tensors = [world.pieces(kind, r, given) for r in range(2)]
    run(world, tensors, directory, launched_as)
    wide, eager = expected(kind, [v.double() for v in given]), expected(kind, [v.float() for v in given])
    for k, out in enumerate(plan.segment.outputs):
        for rank, t in enumerate(tensors):
            parts = [piece_of_output(kind, v[k], 2, rank) for v in (wide, eager)]
            assert_near(t[out], parts[0], parts[1].bfloat16(), n=2, what=f"output {k} of rank {rank}")
    return world


def test_a_program_that_has_given_up_stores_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late peer may still read those of turns before: it is told by its flags, also in launches that follow."""
    monkeypatch.setattr(sent_words, "MOST_ELEMENTS", 0)
    world = Ranks(kernel_of(plan_of(define(PARTIAL, 640, 2, DataType.BFloat16), 3)), torch.device("cpu"))
    given = inputs(PARTIAL, 3, 640, torch.bfloat16)
    tensors = [world.pieces(PARTIAL, rank, given) for rank in range(2)]
    flags = flags_of_rows(world.plan.exchange)
    world.slots[1].fill_(77)
    world.tables[0][10:] = 1 << 32 | 6  # six turns, and has given up
    launch = world.launches(tmp_path, interpret=True)[0]
    launch(None, *(tensors[0][t] for t in (*world.plan.segment.inputs, *world.plan.segment.outputs)))
    assert set(world.slots[1][:flags].tolist()) == {77, int(GONE)}
    assert world.slots[1][flags:].eq(77).all()
    assert all(tensors[0][t].isnan().all() for t in world.plan.segment.outputs)
    assert world.tables[0][10] == 1 << 32 | 7


def test_rows_are_sent_without_their_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_words, "MOST_ELEMENTS", 0)
    world = Ranks(kernel_of(plan_of(define(PARTIAL, 640, 2, DataType.BFloat16), 1)), torch.device("cpu"))
    given = inputs(PARTIAL, 1, 640, torch.bfloat16)
    tensors = world.pieces(PARTIAL, 0, given)
    world.launches(tmp_path, interpret=True)[0](
        None, *(tensors[t] for t in (*world.plan.segment.inputs, *world.plan.segment.outputs))
    )
    rows = world.slots[1][flags_of_rows(world.plan.exchange) :].view(torch.bfloat16)
    assert row_elements(world.plan) > 640
    assert rows.count_nonzero() == 640
