"""A sharded program as a user writes it, for `python -m shardfuse.simulate` and for `torchrun`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

import shardfuse
from shardfuse import DeviceMesh, FusionDefinition, ParallelType


@dataclass
class Sizes:
    rows: int
    hidden: int


def main(rows: int) -> None:
    context = shardfuse.initialize()
    mesh = DeviceMesh(list(range(context.world_size)))
    sizes = Sizes(rows, 4 * context.world_size)
    torch.manual_seed(0)
    x, w = torch.randn(sizes.rows, sizes.hidden), torch.randn(sizes.hidden)
    with FusionDefinition() as fd:
        tx = fd.define_tensor([-1, sizes.hidden], contiguity=True)
        tw = fd.define_tensor([sizes.hidden], contiguity=True)
        mean = fd.ops.mean(fd.ops.mul(tx, tx), [-1], keepdim=True)
        fd.add_output(fd.ops.mul(fd.ops.mul(tx, fd.ops.rsqrt(fd.ops.add(mean, 1e-6))), tw))
        tx.set_device_mesh(mesh)
        tx.outer_split(1, mesh.size)
        tx.axis(1).parallelize(ParallelType.mesh_x)
    (y,) = fd.execute([mesh.shard_tensor(x, 1), mesh.shard_tensor(w, 0)])
    expected = torch.nn.functional.rms_norm(x, (sizes.hidden,), w, 1e-6)
    torch.testing.assert_close(y, mesh.shard_tensor(expected, 1))
    if len(sys.argv) > 2 and context.rank == 1:
        raise ValueError(sys.argv[2])
    dist.barrier()
    print(f"rank {context.rank} of {context.world_size}: {tuple(y.shape)}")
    shardfuse.finalize()


if __name__ == "__main__":
    main(int(sys.argv[1]))
