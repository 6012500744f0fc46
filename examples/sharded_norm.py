"""RMSNorm over a hidden axis that is sharded over all ranks: scripts/launch.sh examples/sharded_norm.py"""

import torch

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, initialize

world = initialize()
mesh = DeviceMesh(range(world.world_size))

with FusionDefinition() as fd:
    x = fd.define_tensor([-1, 1024], contiguity=True, dtype=DataType.Float)  # sizes are unsharded, -1 is any
    weight = fd.define_tensor([1024], contiguity=True, dtype=DataType.Float)
    mean_square = fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)
    rstd = fd.ops.rsqrt(fd.ops.add(mean_square, 1e-6))
    fd.add_output(fd.ops.mul(fd.ops.mul(x, rstd), weight))
    x.set_device_mesh(mesh)
    x.outer_split(1, mesh.size)  # the hidden axis, cut in as many parts as there are ranks ...
    x.axis(1).parallelize(ParallelType.mesh_x)  # ... one each; everything else follows

torch.manual_seed(0)
full, w = torch.randn(8, 1024, device=world.device), torch.randn(1024, device=world.device)
(y,) = fd.execute([mesh.shard_tensor(full, 1), mesh.shard_tensor(w, 0)])  # this rank's piece in, this rank's piece out
error = (y - mesh.shard_tensor(torch.nn.functional.rms_norm(full, (1024,), w, 1e-6), 1)).abs().max().item()
if world.rank == 0:
    print(f"local {list(y.shape)} of {list(full.shape)}, largest difference from unsharded torch {error:.0e}")
    print(fd.explain())
