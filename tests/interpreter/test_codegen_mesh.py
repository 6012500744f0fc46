"""One rank's kernels of sharded segments: uneven shards, global indices, workspaces, one source for all ranks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from interpreted import close, run, values
from segments import Builder, layout_of, rms_norm, shard

from shardfuse.codegen import generate
from shardfuse.device import H200
from shardfuse.ir.digits import root_of
from shardfuse.ir.dtype import DataType
from shardfuse.schedulers import looped, persistent, pointwise, reduction


@pytest.mark.parametrize("scheduler", [persistent, looped])
@pytest.mark.parametrize(("rows", "ranks"), [(8, 2), (7, 3), (10, 4)])
def test_rows_over_ranks(tmp_path: Path, scheduler: ModuleType, rows: int, ranks: int) -> None:
    segment = rms_norm(rows, 130, DataType.Float)
    x, w = segment.inputs
    shard(segment, root_of(x.domain.logical[0][0]), ranks)
    data, scale = values(rows, 130), values(130, seed=1)
    wanted = data.double() * torch.rsqrt(data.double().square().mean(1, keepdim=True) + 1e-6) * scale.double()
    for rank, (piece, part) in enumerate(zip(data.chunk(ranks), wanted.chunk(ranks), strict=True)):
        (out,) = run(segment, {x: piece, w: scale}, tmp_path, scheduler=scheduler, rank=rank)
        close(out, part)


@pytest.mark.parametrize("ranks", [2, 4])
def test_iota_gives_global_indices(tmp_path: Path, ranks: int) -> None:
    """Vocabulary of 10 over the ranks (3, 3, 3, 1 over 4): each picks the targets that it holds."""
    b = Builder()
    i, v = b.axis(6), b.axis(10)
    x, target = b.input(DataType.Float, i, v), b.input(DataType.Int, i, ())
    picked = b.op("where", b.op("eq", b.iota(v), target), x, 0.0)
    segment = shard(b.segment(b.reduce("sum", picked, [1], keepdim=False)), root_of(v[0]), ranks)
    data, label = values(6, 10), torch.tensor([0, 3, 9, 5, 8, 2])[:, None]
    total = torch.zeros(6)
    for rank, piece in enumerate(data.chunk(ranks, 1)):
        total += run(segment, {x: piece, target: label}, tmp_path, rank=rank, op_by_op=False)[0]
    assert torch.equal(total, data.gather(1, label)[:, 0])


def test_iota_of_a_merged_axis(tmp_path: Path) -> None:
    """An axis of two digits, of which the outer one is sharded, counts on through both."""
    b = Builder()
    rows, columns = b.axis(4), b.axis(6)
    x = b.input(DataType.Int, rows, columns)
    flat = b.flatten(x, 0, 1)
    segment = shard(b.segment(b.op("sub", b.iota(flat.domain.logical[0]), flat)), root_of(rows[0]), 2)
    data = torch.arange(24).view(4, 6)
    for rank, piece in enumerate(data.chunk(2)):
        (out,) = run(segment, {x: piece}, tmp_path, rank=rank, op_by_op=False)
        assert torch.equal(out, torch.zeros(12, dtype=torch.int64))


def test_partial_sums_of_a_rank_are_split_too(tmp_path: Path) -> None:
    """The local part of a sum over sharded rows: [W, D], the first axis this rank's own, through a workspace."""
    b = Builder()
    rows, columns = b.axis(8000), b.axis(24)
    x = b.input(DataType.Float, rows, columns)
    segment = b.segment(b.reduce("sum", b.op("mul", x, x), [0], keepdim=False))
    shard(segment, root_of(columns[0]), 2)
    assert reduction.propose(segment, H200).parts > 1
    data = values(8000, 24)
    for rank, piece in enumerate(data.chunk(2, 1)):
        (out,) = run(segment, {x: piece.contiguous()}, tmp_path, scheduler=reduction, rank=rank)
        close(out, piece.double().square().sum(0))


def test_ranks_and_batch_sizes_share_a_source() -> None:
    """Grid extents, loop trip counts and global starts are arguments: only what they divide by tells sources apart."""

    def text(scheduler: ModuleType, rows: int, rank: int) -> str:
        segment = rms_norm(rows, 512, DataType.BFloat16)
        shard(segment, root_of(segment.inputs[0].domain.logical[0][0]), 4)
        (plan,) = scheduler.kernels(segment, scheduler.propose(segment, H200), H200)
        tensors = (*plan.segment.inputs, *plan.segment.outputs)
        empty = {t: torch.empty(t.domain.local_shape(rank)) for t in tensors}
        return generate(plan, {t: layout_of(t, empty[t], rank) for t in tensors}, rank).text

    for scheduler in (persistent, looped):
        assert len({text(scheduler, rows, rank) for rows in (4096, 8192, 12288) for rank in range(4)}) == 1
    b = Builder()
    v = b.axis(4096)
    segment = shard(b.segment(b.op("add", b.iota(v), b.input(DataType.Int, v))), root_of(v[0]), 4)
    (plan,) = pointwise.kernels(segment, pointwise.propose(segment, H200), H200)
    tensors = (*plan.segment.inputs, *plan.segment.outputs)
    sources = [generate(plan, {t: t.domain.layout(rank) for t in tensors}, rank) for rank in range(4)]
    assert len({s.text for s in sources}) == 1
    assert [s.integers[0] for s in sources] == [0, 1024, 2048, 3072]
