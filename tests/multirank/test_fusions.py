"""Sharded fusions over processes: gloo on the CPU, NCCL and generated kernels where every rank has a GPU of its own."""

from __future__ import annotations

import itertools

import pytest
import torch
from fusion_check import check
from random_fusions import random_case
from thread_check import X, shard, world_mesh

from shardfuse import DeviceMesh, FusionDefinition
from shardfuse.errors import ShardfuseError

pytestmark = pytest.mark.mpi


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("rows", [8, 7, 5])
def test_every_change_of_sharding(rows: int, pg) -> None:
    shape = (rows, 3, 8)
    outer = [None, *((k, "outer") for k in range(3))]
    for source, target in itertools.product([*outer, (2, "inner")], repeat=2):
        with FusionDefinition() as fd:
            x = fd.define_tensor(list(shape))
            y = fd.ops.set(x)
            fd.add_output(y)
        shard(x, world_mesh(pg.size), (X, source))
        shard(y, world_mesh(pg.size), (X, target))
        check(fd, [values(*shape)], reference=lambda x: x, device=pg.device)


def block(size: int, sequence: int) -> FusionDefinition:
    """Partial sums of a row-parallel linear, residual, RMSNorm over the sequence shard, gathered for the next one."""
    mesh = world_mesh(size)
    with FusionDefinition() as fd:
        parts, residual, w = (fd.define_tensor(s) for s in ([size, 2, -1, 16], [2, -1, 16], [16]))
        total = fd.ops.sum(parts, [0])
        hidden = fd.ops.add(total, residual)
        mean = fd.ops.mean(fd.ops.mul(hidden, hidden), [-1], keepdim=True)
        out = fd.ops.set(fd.ops.mul(fd.ops.mul(hidden, fd.ops.rsqrt(fd.ops.add(mean, 1e-6))), w))
        fd.add_output(hidden)
        fd.add_output(out)
        fd.add_output(fd.ops.sum(hidden, [0, 1]))
    parts.set_device_mesh(mesh)
    parts.axis(0).parallelize(X)
    for tv in (residual, total):
        shard(tv, mesh, (X, (1, "outer")))
    out.set_device_mesh(mesh)
    return fd


@pytest.mark.parametrize("sequence", [8, 7, 3])
def test_a_block_of_a_transformer(sequence: int, pg) -> None:
    def reference(parts: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        hidden = parts.sum(0) + residual
        return [hidden, torch.nn.functional.rms_norm(hidden, (16,), w, 1e-6), hidden.sum((0, 1))]

    fd = block(pg.size, sequence)
    data = [values(pg.size, 2, sequence, 16), values(2, sequence, 16, seed=1), values(16, seed=2)]
    sizes = {tv: x.shape for tv, x in zip(fd.fusion.tensors(), data, strict=False)}
    for _ in range(2):  # the second call finds the program
        check(fd, data, sizes=sizes, reference=reference, device=pg.device)
    kinds = sorted(c.kind for c in fd.explain().collectives)
    assert kinds == (["all_gather", "all_reduce", "reduce_scatter"] if pg.size > 1 else [])


def test_replicated_outputs_are_bitwise_the_same(pg) -> None:
    x = torch.randn(pg.size * 100, 33, generator=torch.Generator().manual_seed(0))
    with FusionDefinition() as fd:
        tv = fd.define_tensor(list(x.shape))
        fd.add_output(fd.ops.sum(tv, [0]))
    shard(tv, world_mesh(pg.size), (X, (0, "outer")))
    runs = [check(fd, [x], device=pg.device)[0] for _ in range(3)]
    for out in runs:
        assert out is not None
        told = out.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        pg.store.set(f"sum/{pg.rank}", told)
        assert told == pg.store.get("sum/0")


def test_sizes_that_nobody_told(pg) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3])
        fd.add_output(fd.ops.mean(x, [0]))
    shard(x, world_mesh(pg.size), (X, (0, "outer")))
    for rows in (2 * pg.size + 1, 9, 2 * pg.size + 1):
        check(fd, [values(rows, 3)], device=pg.device)


def test_from_the_first_rank_to_the_last(pg) -> None:
    if pg.size == 1:
        pytest.skip("one rank has no other")
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 4])
        y = fd.ops.set(fd.ops.mul(x, 2.0))
        fd.add_output(fd.ops.add(y, 1.0))
    x.set_device_mesh(DeviceMesh([0]))
    y.set_device_mesh(DeviceMesh([pg.size - 1]))
    (out,) = check(fd, [values(5, 4)], reference=lambda x: x * 2 + 1, device=pg.device)
    assert (out is None) == (pg.rank != pg.size - 1)


def test_random_fusions(pg) -> None:
    """The same seeds on all ranks; each definition is made by each rank itself."""
    for seed in range(60):
        _, case = random_case(900_000 + seed, (pg.size,), backend=None)
        try:
            check(case.fd, case.inputs, sizes=case.sizes, device=pg.device)
        except Exception as error:
            error.add_note(f"rank {pg.rank} of {case}")
            raise


def test_a_refusal_on_one_rank_ends_all(pg) -> None:
    """The last rank hands over too much: all say so, nobody waits, and the next call works."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4 * pg.size, 2])
        fd.add_output(fd.ops.sum(x, [0]))
    shard(x, world_mesh(pg.size), (X, (0, "outer")))
    wrong = torch.ones(5 if pg.rank == pg.size - 1 else 4, 2, device=pg.device)
    with pytest.raises(ShardfuseError, match=rf"to be of shape \[4, 2\] on rank {pg.size - 1}"):
        fd.execute([wrong])
    check(fd, [values(4 * pg.size, 2)], device=pg.device)
