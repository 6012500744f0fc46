"""Kernels whose programs wait for each other are planned for the GPU that is there: all of their programs fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardfuse import DataType, FusionDefinition
from shardfuse.compiler import Plan, compile_fusion
from shardfuse.device import H200, device_here
from shardfuse.executor.binding import Bound
from shardfuse.frontend import executor_cache
from shardfuse.ir.tensor_view import TensorView
from shardfuse.schedulers.limits import WARP
from shardfuse.schedulers.resources import resident

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.workload import Case, Draw
from benchmarks.workloads import WORKLOADS

SMALL = SimpleNamespace(
    name="another",
    multi_processor_count=40,
    max_threads_per_multi_processor=1536,
    shared_memory_per_multiprocessor=100 * 1024,
    shared_memory_per_block=48 * 1024,
    L2_cache_size=8 << 20,
    major=8,
    minor=6,
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
    schedule = kernel.schedule
    assert schedule.is_one_launch or schedule.members, "no program waits"
    return schedule.programs or schedule.parts, schedule.launch.warps


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


def test_a_larger_gpu_is_used_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    few, _ = programs(planned(norm, (1024, 262144)))
    larger = replace(H200, name="larger", multiprocessors=2 * H200.multiprocessors)
    monkeypatch.setattr(executor_cache, "device_here", lambda _: larger)
    many, _ = programs(planned(norm, (1024, 262144)))
    assert many == 2 * few


def test_a_named_gpu_is_that_of_the_table_and_a_slice_of_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = SimpleNamespace(**{**vars(SMALL), "name": H200.name, "multi_processor_count": H200.multiprocessors})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert device_here() is H200
    found.multi_processor_count = 16
    assert device_here() == replace(device_here(), multiprocessors=16, warps=48, l2_bytes=8 << 20)


def test_a_program_is_planned_for_the_gpu_that_its_inputs_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for the larger GPU, which is the current one, programs that wait for each other would not all fit."""
    gpus = [SimpleNamespace(**{**vars(SMALL), "name": H200.name, "multi_processor_count": 132}), SMALL]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: gpus[k])
    shape = 32768, 4096
    with FusionDefinition() as fd:
        x = fd.define_tensor(list(shape), contiguity=True, dtype=DataType.BFloat16)
        for t in both_ways(fd, x):
            fd.add_output(t)
    argument = torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def planned_on(device: torch.device) -> int:
        bound = Bound({x: argument}, {x: shape}, device)
        monkeypatch.setattr(executor_cache, "bind_arguments", lambda *_: bound)
        return programs(fd.fec.plan_for([argument], None))[0]

    second = torch.device("cuda", 1)
    large, small = planned_on(torch.device("cuda", 0)), planned_on(second)
    assert large == planned_on(torch.device("cpu"))
    assert small == programs(fd.fec.plan({x: shape}, None, second))[0] < large
    assert device_here(second).multiprocessors == 40


def test_who_decides_for_a_kernel_asks_the_gpu_that_it_is_proposed_for() -> None:
    """64 rows are few for the teams of a large GPU, and enough for those of a small one."""
    workload, case = WORKLOADS["rms_norm_backward"], Case.parse("64x32768")
    fd = workload.fusion(case)
    inputs = workload.bind(workload.arguments(case, Draw(torch.device("meta"))))
    sizes = dict(zip(fd.fec.tensors(), (tuple(t.shape) for t in inputs), strict=True))
    small = replace(H200, name="small", multiprocessors=8)
    large = compile_fusion(fd.fusion, sizes, device=H200)
    assert "mix_order" not in {s.scheduler for s in large.segments}
    (whole,) = compile_fusion(fd.fusion, sizes, device=small).segments
    assert whole.scheduler == "mix_order"
    schedule = whole.kernels[0].schedule
    assert schedule.launch.registers is not None
    assert (
        0 < schedule.members <= schedule.programs <= resident(small, schedule.launch.warps, schedule.launch.registers)
    )


def test_bounds_on_registers_follow_from_resident_warps() -> None:
    """65536 registers, handed out in eights, 255 for a thread at most; a program of many warps is resident at least."""
    assert [H200.bound(warps) for warps in (8, 12, 16, 20, 24, 32)] == [255, 168, 128, 96, 80, 64]
    assert (H200.bound(12, program=16), H200.bound(12, program=8)) == (128, 168)
    for warps in (1, 2, 4, 8, 16, 32):
        assert resident(H200, warps, H200.bound(8, program=warps)) >= H200.multiprocessors


def test_a_gpu_that_was_not_measured_keeps_fewer_warps_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = SimpleNamespace(**vars(SMALL))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert device_here().measured.groups.resident < H200.measured.groups.resident
    found.major, found.minor = 9, 0
    assert device_here().measured is H200.measured
