"""DTensors in and out over processes."""

from __future__ import annotations

import pytest
import torch
from dtensor_cases import check_norm, check_sum, make_mesh, numbers
from test_nn_uneven import Check, rms_norm
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardfuse import FusionDefinition
from shardfuse.nn import RMSNorm

pytestmark = pytest.mark.mpi


# Older torch takes a strided shard only beside the shard that it is strided for: test_two_mesh_dimensions has that.
STRIDED = pytest.param(
    _StridedShard(1, split_factor=2),
    marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 refuses a lone _StridedShard"),
)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial(), STRIDED], ids=str)
def test_norm(placement: Placement, pg) -> None:
    check_norm((pg.size,), (2 * pg.size, 4 * pg.size), (placement,), pg.device.type)


def test_uneven(pg) -> None:
    check_norm((pg.size,), (2 * pg.size + 1, 12), (Shard(0),), pg.device.type)


def test_two_mesh_dimensions(pg) -> None:
    if pg.size % 2 == 0 and pg.size > 2:
        shape = (2, pg.size // 2)
        check_norm(shape, (8, 4 * pg.size), (Shard(0), Shard(1)), pg.device.type)
        check_norm(shape, (4 * pg.size + 1, 8), (Shard(0), Shard(0)), pg.device.type)  # torch cuts it elsewhere
        check_norm(shape, (4 * pg.size, 8), (_StridedShard(0, split_factor=pg.size // 2), Shard(0)), pg.device.type)


def test_sums(pg) -> None:
    x = numbers((2 * pg.size, 6))

    def define(fd: FusionDefinition) -> None:
        t = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(t, [0]))
        fd.add_output(fd.ops.sum(t, [1]))

    mesh = make_mesh((pg.size,), pg.device.type)
    outputs = check_sum(define, [(x, (Shard(0),))], mesh, lambda x: [x.sum(0), x.sum(1)])
    assert [y.placements for y in outputs] == [(Replicate(),), (Shard(0),)]


@pytest.mark.parametrize("more", [-1, 1], ids=["fewer rows than ranks", "one row more"])
def test_modules_on_uneven_batches(more: int, pg) -> None:
    for shape in ((pg.size + more, 6), (1, 6), (0, 6)):
        case = Check(make_mesh((pg.size,), pg.device.type), [Shard(0)], shape)
        module = RMSNorm(6, mesh=case.ours, input=Shard(0), dtype=torch.float64, device=pg.device)
        x = case.activation()
        case.parameter(module, "weight")
        case.compare([module(x)], [case.at], rms_norm)
