"""Collectives of DTensors whose shards differ in size: every rank decides alike, from a graph of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_graphs import regions_in
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

F = torch.nn.functional
DIM = 16
Made = tuple[Callable[..., DTensor], DTensor]


def gathered(mesh: DeviceMesh, shape: list[int], dim: int) -> Made:
    """A norm of this rank's rows, gathered, and another of all rows."""
    pieces = list(torch.chunk(torch.randn(shape), mesh.size(), dim))
    rank = mesh.get_local_rank()
    piece = pieces[rank] if rank < len(pieces) else torch.randn(shape).narrow(dim, 0, 0)
    strides = torch.empty(shape).stride()
    x = DTensor.from_local(piece, mesh, [Shard(dim)], shape=torch.Size(shape), stride=strides, run_check=False)

    def run(x: DTensor) -> DTensor:
        return F.rms_norm(F.rms_norm(x, (DIM,)).redistribute(placements=[Replicate()]) * 2, (DIM,))

    return run, x


def scattered(mesh: DeviceMesh, shape: list[int], dim: int) -> Made:
    """Summands added up, each rank some rows of the sum, and a norm of these."""
    x = DTensor.from_local(torch.randn(shape), mesh, [Partial()], run_check=False)

    def run(x: DTensor) -> DTensor:
        return F.rms_norm(x.redistribute(placements=[Shard(dim)]), (DIM,))

    return run, x


def said_on(rank: int, ranks: int, make: Callable[..., Made], shape: list[int], dim: int) -> list[str]:
    """What the report says of each collective of the graph of this rank."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    said: list[str] = []

    def compiler(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., object]:
        said.extend(line for region in regions_in(copy.deepcopy(gm)) for line in region.collectives)
        return gm.forward

    try:
        torch._dynamo.reset()
        run, x = make(init_device_mesh("cpu", (ranks,)), shape, dim)
        partition, table = min_cut_rematerialization_partition, select_decomp_table()
        backend = aot_autograd(fw_compiler=compiler, partition_fn=partition, decompositions=table)
        with torch.no_grad():
            torch.compile(run, backend=backend, fullgraph=True)(x)
    finally:
        dist.destroy_process_group()
    return said


@pytest.mark.parametrize("make", [gathered, scattered])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 4), (2, 5), (2, 1), (4, 6), (4, 5)])
def test_every_rank_decides_alike(make: Callable[..., Made], dim: int, ranks: int, rows: int) -> None:
    """A rank with a region would wait for ranks that pad their shards, in whose graphs there is none."""
    shape = [4, 4, DIM]
    shape[dim] = rows
    found = [said_on(rank, ranks, make, shape, dim) for rank in range(ranks)]
    is_inside = [[line for line in said if "inside" in line] for said in found]
    if rows % ranks == 0:
        assert all(len(lines) == 1 for lines in is_inside)
    else:
        assert not any(is_inside)
        assert any("shards may differ in size" in line for said in found for line in said)
