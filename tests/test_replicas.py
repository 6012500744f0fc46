"""Replicated outputs are bitwise equal on all ranks: odd meshes, uneven and empty shards, every reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_check import check
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition


def _softmax(o: Any, x: Any, axis: int) -> Any:
    e = o.exp(o.sub(x, o.max(x, [axis], keepdim=True)))
    return o.sum(o.mul(o.div(e, o.sum(e, [axis], keepdim=True)), x), [axis])


def _layer_norm(o: Any, x: Any, axis: int) -> Any:
    var, mean = o.var_mean(x, [axis], 0, True)
    return o.sum(o.mul(o.mul(o.sub(x, mean), o.rsqrt(o.add(var, 1e-5))), x), [axis])


PROGRAMS: dict[str, Callable[[Any, Any, int], list[Any]]] = {
    "sum": lambda o, x, k: [o.sum(x, [k])],
    "sum and exp": lambda o, x, k: [o.exp(o.mul(o.sum(x, [k]), 0.1))],
    "all": lambda o, x, k: [o.sum(x)],
    "mean": lambda o, x, k: [o.mean(x, [k])],
    "prod": lambda o, x, k: [o.prod(o.add(o.mul(x, 0.1), 1.0), [k])],
    "max": lambda o, x, k: [o.max(x, [k])],
    "var": lambda o, x, k: list(o.var_mean(x, [k])),
    "softmax": lambda o, x, k: [_softmax(o, x, k)],
    "layer_norm": lambda o, x, k: [_layer_norm(o, x, k)],
    "rms": lambda o, x, k: [o.rsqrt(o.add(o.mean(o.mul(x, x), [k]), 1e-6))],
    "gram": lambda o, x, k: [o.matmul(o.permute(x, [1, 0]), x)],
}


def _run(mesh: DeviceMesh, extent: int, dtype: torch.dtype, axis: int, over: int) -> None:
    """``over``: how many mesh dimensions, from the last, cut ``axis``; over the others the tensor is replicated."""
    shape = [extent, 6] if axis == 0 else [6, extent]
    full = torch.randn(shape, generator=torch.Generator().manual_seed(extent), dtype=torch.float64).to(dtype)
    fds: dict[str, FusionDefinition] = {}
    for name, define in PROGRAMS.items():
        with FusionDefinition(backend="torch") as fds[name]:
            x = fds[name].define_tensor(shape, dtype=DataType.from_torch(dtype))
            outs = define(fds[name].ops, x, axis)
            for out in outs:
                fds[name].add_output(out)
                out.set_device_mesh(mesh)
            x.set_device_mesh(mesh)
            for k, parallel_type in enumerate(mesh.parallel_types[-over:]):
                x.outer_split(axis + k, mesh.extent(parallel_type), uneven=True)
                x.axis(axis + k).parallelize(parallel_type)

    def on_rank(rank: int, _: int) -> list[list[torch.Tensor]]:
        return [[t for t in check(fd, [full]) if t is not None] for fd in fds.values()]

    found = run_ranks(mesh.size, on_rank)
    for k, name in enumerate(fds):
        for rank in range(1, mesh.size):
            for a, b in zip(found[0][k], found[rank][k], strict=True):
                assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b))), (
                    f"{name} of {shape} on {mesh}, {over} dimensions: {a.tolist()} on rank 0, {b.tolist()} on {rank}"
                )


@pytest.mark.parametrize(
    ("ranks", "dtype", "extent", "axis", "over"),
    [
        ([2, 0, 1], torch.float32, 2, 0, 1),
        ([2, 0, 1], torch.bfloat16, 13, 1, 1),
        ([[0, 1, 2], [5, 4, 3]], torch.float32, 5, 1, 1),
        ([[0, 1, 2], [5, 4, 3]], torch.bfloat16, 48, 0, 1),
        ([[0, 1, 2], [5, 4, 3]], torch.float32, 997, 1, 2),
        ([[0, 5], [4, 1], [2, 3]], torch.float32, 7, 0, 2),
        ([[3, 1, 0, 2]], torch.bfloat16, 5, 1, 1),
        ([[[7, 0], [3, 2]], [[1, 6], [4, 5]]], torch.float32, 48, 1, 2),
        ([[1, 7, 2, 3], [6, 5, 4, 0]], torch.bfloat16, 40, 1, 1),
    ],
    ids=str,
)
def test_bitwise_equal(ranks: list[Any], dtype: torch.dtype, extent: int, axis: int, over: int) -> None:
    _run(DeviceMesh(ranks), extent, dtype, axis, over)
