"""A tensor-parallel MLP with its residual and norm, defined and sharded as for nvFuser's Python module.

    scripts/launch.sh examples/nvfuser_mlp.py

A program that was written for `nvfuser_direct` runs unchanged but for its first import.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn import functional

import shardfuse.compat.nvfuser_direct as nvfuser_direct
from shardfuse.compat.nvfuser_direct import DataType, FusionDefinition, ParallelType

ROWS, DIM, HIDDEN, EPS = 64, 256, 1024, 1e-5


def mlp(fd: FusionDefinition, ranks: int) -> list[nvfuser_direct.TensorView]:
    """layer_norm(x + gelu(x @ up.T + bias) @ down.T), of hidden columns that are divided among the ranks."""
    x = fd.define_tensor(shape=[-1, DIM], contiguity=True, dtype=DataType.Float)
    up = fd.define_tensor(shape=[HIDDEN, DIM], contiguity=True, dtype=DataType.Float)
    bias = fd.define_tensor(shape=[HIDDEN], contiguity=True, dtype=DataType.Float)
    down = fd.define_tensor(shape=[DIM, HIDDEN], contiguity=True, dtype=DataType.Float)

    hidden = fd.ops.linear(x, up, bias)
    cube = fd.ops.mul(fd.ops.mul(hidden, hidden), hidden)
    inner = fd.ops.mul(fd.ops.add(hidden, fd.ops.mul(cube, fd.define_scalar(0.044715))), fd.define_scalar(0.79788456))
    gated = fd.ops.mul(fd.ops.mul(hidden, fd.define_scalar(0.5)), fd.ops.add(fd.ops.tanh(inner), fd.define_scalar(1.0)))
    total = fd.ops.add(x, fd.ops.linear(gated, down))  # a sum over sharded columns: an all-reduce
    var, mean = fd.ops.var_mean(total, dims=[1], correction=0, keepdim=True)
    rstd = fd.ops.rsqrt(fd.ops.add(var, fd.define_scalar(EPS)))
    fd.add_output(fd.ops.mul(fd.ops.sub(total, mean), rstd))

    mesh = nvfuser_direct.multidevice.DeviceMesh(torch.arange(ranks))
    for tensor in (x, up, bias, down):
        tensor.set_device_mesh(mesh)
    for tensor, axis in ((up, 0), (bias, 0), (down, 1)):
        tensor.outer_split(axis, ranks)
        tensor.axis(axis).parallelize(ParallelType.mesh_x)
    return [x, up, bias, down]


def plain(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    """The same in torch, unsharded."""
    hidden = functional.gelu(functional.linear(x, up, bias), approximate="tanh")
    return functional.layer_norm(x + functional.linear(hidden, down), (DIM,), eps=EPS)


def main() -> None:
    communicator = nvfuser_direct.Communicator.instance()
    ranks, device = communicator.size(), "cuda" if torch.cuda.is_available() else "cpu"
    with FusionDefinition() as fd:
        inputs = mlp(fd, ranks)

    torch.manual_seed(0)  # the same tensors on every rank, which cuts its part out of each
    sizes = [(ROWS, DIM), (HIDDEN, DIM), (HIDDEN,), (DIM, HIDDEN)]
    whole = [(torch.randn(size) / size[-1] ** 0.5).to(device) for size in sizes]
    own = [nvfuser_direct.shard_tensor(tensor, view) for tensor, view in zip(whole, inputs, strict=True)]
    (y,) = fd.execute(own)

    right = plain(*(tensor.double() for tensor in whole))
    error, rounding = (((z - right).abs().max() / right.abs().max()).item() for z in (y, plain(*whole)))
    assert error <= 2 * rounding + torch.finfo(torch.float32).eps, f"off by {error:.1e}, eager torch by {rounding:.1e}"
    began = time.perf_counter()
    for _ in range(50):
        (y,) = fd.execute(own)
    y.sum().item()  # waits until all have run
    if communicator.rank() == 0:
        print(f"MLP of {ROWS} x {DIM}, {HIDDEN // ranks} of {HIDDEN} hidden columns a rank, on {ranks} x {device}")
        print(f"result differs from unsharded float64 torch by {error:.1e} (eager float32: {rounding:.1e})")
        print(f"{(time.perf_counter() - began) / 50 * 1e6:,.0f} us a call")


if __name__ == "__main__":
    main()
