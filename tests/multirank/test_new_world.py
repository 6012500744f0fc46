"""What outlives its process group: modules, fusions and DTensors in a world after another one, of other ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from shardfuse import FusionDefinition
from shardfuse.mesh.rendezvous import PrefixStore
from shardfuse.nn import BatchNorm1d, SyncBatchNorm


def begin(pg: Any, name: str, rank: int, size: int) -> None:
    store: Any = PrefixStore(name, pg.store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(rank))


@pytest.mark.fresh_world
def test_a_sync_batch_norm_in_a_larger_world(pg: Any) -> None:
    """Of the first ranks alone, then of all, in another order: its mesh is that of the world in which it is called."""
    if pg.device.type != "cpu" or pg.size < 2:
        pytest.skip("on a CPU, 2 ranks or more")
    dist.destroy_process_group()
    module = SyncBatchNorm(8)
    try:
        if pg.rank < pg.size - 1:
            begin(pg, "first", pg.rank, pg.size - 1)
            module(batch(pg.rank))
            dist.barrier()
            dist.destroy_process_group()
    finally:
        begin(pg, "second", (pg.rank + 1) % pg.size, pg.size)
    module.train()
    own = dist.get_rank()
    found = module(batch(own))
    whole = torch.cat([batch(rank) for rank in range(pg.size)]).double()
    wanted = BatchNorm1d(8, dtype=torch.float64)(whole)[4 * own : 4 * own + 4]
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.fresh_world
def test_results_are_on_the_mesh_of_this_world(pg: Any) -> None:
    """torch finds the groups of a mesh by names, which are another group's, or none's, in the next world."""
    if pg.device.type != "cpu" or pg.size < 2:
        pytest.skip("on a CPU, 2 ranks or more")
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1, -1])))
    for world in range(2):
        for _ in range(world):
            dist.new_group(list(range(pg.size)))
        mesh = init_device_mesh("cpu", (1, pg.size))
        local = torch.full((2, 3), float(dist.get_rank()))
        (found,) = fd.execute([DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=False)])
        assert isinstance(found, DTensor)
        assert found.device_mesh is mesh
        assert found.full_tensor()[:, 0].tolist() == [-float(r) for r in range(pg.size) for _ in range(2)]
        dist.barrier()
        dist.destroy_process_group()
        begin(pg, f"world {world + 1}", pg.rank, pg.size)
