"""A tensor's dtype is its dtype: torch.autocast, which would compute torch's ops in others, is off in a fusion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dtensor_cases import numbers
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, TensorView

Build = Callable[[FusionDefinition, TensorView, TensorView], list[TensorView]]

BUILDS: dict[str, Build] = {
    "matmul": lambda fd, a, b: [fd.ops.matmul(a, b)],
    "matmul and more": lambda fd, a, b: [fd.ops.sum(c := fd.ops.matmul(a, b), [1]), fd.ops.add(c, 1.0)],
    "linear": lambda fd, a, b: [fd.ops.linear(a, fd.ops.transpose(b, 0, 1))],
    "bfloat16": lambda fd, a, b: [fd.ops.cumsum(fd.ops.cast(a, DataType.BFloat16), 0), fd.ops.exp(b)],
    "no torch op": lambda fd, a, b: [fd.ops.mean(fd.ops.mul(a, a), [1]), fd.ops.sum(b, [0])],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_autocast_is_off_in_a_fusion(build: Build, dtype: torch.dtype) -> None:
    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        full = numbers((4, 64)), numbers((64, 3), 1)
        with FusionDefinition() as fd:
            a, b = (fd.define_tensor([-1, -1], dtype=DataType.Float) for _ in full)
            for t, axis in ((a, 1), (b, 0)):
                t.set_device_mesh(mesh)
                t.outer_split(axis, mesh.size)
                t.axis(axis).parallelize(ParallelType.mesh_x)
            for t in build(fd, a, b):
                fd.add_output(t)
        inputs = [mesh.shard_tensor(full[0], 1), mesh.shard_tensor(full[1], 0)]
        expected = fd.execute(inputs)
        with torch.autocast("cpu", dtype):
            for _ in range(2):
                for found, wanted in zip(fd.execute(inputs), expected, strict=True):
                    assert found.dtype == wanted.dtype
                    assert torch.equal(found, wanted)
            assert fd.timeline(inputs).spans
            if size == 1:
                fd.validate(inputs)
            assert torch.is_autocast_enabled("cpu")

    for size in (1, 2):
        run_ranks(size, run)
