"""Kernels whose programs wait for each other are planned for the GPU that is there: all of their programs fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardfuse import DataType, FusionDefinition
from shardfuse.compiler import Plan
from shardfuse.device import H200, device_here
from shardfuse.ir.tensor_view import TensorView
from shardfuse.schedulers.limits import WARP

SMALL = SimpleNamespace(
    name="another",
    multi_processor_count=40,
    max_threads_per_multi_processor=1536,
    shared_memory_per_multiprocessor=100 * 1024,
    shared_memory_per_block=48 * 1024,
    L2_cache_size=8 << 20,
)


def both_ways(fd: FusionDefinition, x: TensorView) -> list[TensorView]:
    x = fd.ops.cast(x, dtype=DataType.Float)
    y = fd.ops.sub(x, fd.ops.sum(x, [1], keepdim=True))
    return [y, fd.ops.sum(y, [0]), fd.ops.sum(fd.ops.mul(x, y), [0])]


def norm(fd: FusionDefinition, x: TensorView) -> list[TensorView]:
    x = fd.ops.cast(x, dtype=DataType.Float)
    mean = fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)
    return [fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(mean, 1e-6)))]


def planned(build, shape: tuple[int, int]) -> Plan:
    with FusionDefinition() as fd:
        x = fd.define_tensor(list(shape), contiguity=True, dtype=DataType.BFloat16)
        for t in build(fd, x):
            fd.add_output(t)
    return fd.fec.plan({x: shape})


def programs(plan: Plan) -> tuple[int, int]:
    """Programs of the one kernel, which are all to be resident, and warps of each."""
    (kernel,) = (k for s in plan.segments for k in s.kernels)
    params = kernel.params
    assert params.once or params.team, "nobody waits"
    return params.programs or params.splits, params.num_warps


@pytest.mark.parametrize(("build", "shape"), [(both_ways, (32768, 4096)), (norm, (1024, 262144))])
def test_grids_fit_the_gpu(build, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_here() == H200
    whole, _ = programs(planned(build, shape))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SMALL)
    here = device_here()
    assert (here.multiprocessors, here.shared_bytes) == (40, 99 * 1024)
    few, warps = programs(planned(build, shape))
    assert few < whole
    assert few * warps * WARP <= 40 * H200.warps * WARP
