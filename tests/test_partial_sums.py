"""Partial sums of 16-bit floats: rounded once, added up by the ranks, in one kernel with what follows."""

from __future__ import annotations

import pytest
import torch
from thread_check import X, shard, world_mesh

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, simulate
from shardfuse.passes import partial_sums

ROWS, COLUMNS = 24, 10


def partial_sum(ranks: int, cut: int | None, *, then_scaled: bool = False) -> FusionDefinition:
    """The sum over the ranks of what each has, cut along an axis or whole on all."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([ranks, -1, -1], dtype=DataType.BFloat16)
        total = fd.ops.sum(x, [0])
        out = fd.ops.mul(fd.ops.exp(total), 0.5) if then_scaled else total
        fd.add_output(out)
    mesh: DeviceMesh = world_mesh(ranks)
    shard(x, mesh, (X, (0, "outer")))
    if cut is None:
        out.set_device_mesh(mesh)
    else:
        shard(out, mesh, (X, (cut, "outer")))
    return fd


def drawn(rows: int, ranks: int) -> torch.Tensor:
    return torch.randn(ranks, rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("cut", "rows"), [(None, ROWS), (None, ROWS + 1), (0, ROWS)])
def test_they_are_rounded_once(ranks: int, cut: int | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_sums, "ONE_STEP_BYTES", 0)
    x = drawn(rows, ranks)
    expected = x.float().sum(0).bfloat16()

    def run(rank: int) -> torch.Tensor:
        fd = partial_sum(ranks, cut)
        (found,) = fd.execute([x[rank : rank + 1]])
        kinds = [c.kind for c in fd.explain().collectives]
        if ranks == 2:
            assert kinds == (["all_reduce"] if cut is None else ["reduce_scatter"])
        elif cut == 0:
            assert kinds == ["all_to_all"]
        else:
            assert kinds in (["all_to_all", "all_gather"], ["all_reduce"])
        assert torch.equal(found, expected if cut is None else expected.chunk(ranks)[rank])
        return found

    simulate(lambda: run(torch.distributed.get_rank()), world_size=ranks)


def test_what_follows_is_in_the_kernel_that_adds() -> None:
    x = drawn(ROWS, 4)
    expected = (x.float().sum(0).bfloat16().float().exp().bfloat16().float() * 0.5).bfloat16()

    def run() -> None:
        rank = torch.distributed.get_rank()
        fd = partial_sum(4, 0, then_scaled=True)
        (found,) = fd.execute([x[rank : rank + 1]])
        assert_near(found, expected.double().chunk(4)[rank], n=1)  # the kernel's exponential may round the other way
        plan = fd.explain()
        assert [c.kind for c in plan.collectives] == ["all_to_all"]
        assert plan.kernels == 1

    simulate(run, world_size=4)


def test_small_ones_are_gathered_in_one_call() -> None:
    def run() -> None:
        fd = partial_sum(4, None)
        fd.execute([drawn(ROWS, 4)[:1]])
        assert [c.kind for c in fd.explain().collectives] == ["all_reduce"]

    simulate(run, world_size=4)
