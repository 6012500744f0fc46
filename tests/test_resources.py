"""What a kernel takes of a multiprocessor: the model beside the compiler, and the plans for GPUs that are not here.

``python -m benchmarks.compiled_kernels`` does the same for all kernels of the public grid, in minutes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardfuse.device import A100, B200, H200, RTX_5090, Device
from shardfuse.schedulers.resources import resources_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.compiled_kernels import differences, in_halves, kernels_of, spilled

SAMPLE = (
    *("layer_norm 8192x1280:float16", "rms_norm 8192x32768:float32", "cross_entropy 8192x32000:bfloat16"),
    "group_norm_channels_last 2x640x64x64:float16:channels_last",
)
"""Cases of several forms of kernel: rows, a group that reads ahead, a loop, columns of a group."""
AVERAGE, WORST = 0.12, 0.65
"""How far the model is off, of the registers that the compiler uses; of the whole public grid 0.10 and 0.62."""


def test_the_model_beside_the_compiler() -> None:
    found = differences(kernels_of(SAMPLE))
    assert sum(d.registers for d in found) / len(found) <= AVERAGE
    assert max(d.registers for d in found) <= WORST, max(found, key=lambda d: d.registers)
    assert all(d.is_shared_right for d in found), [d for d in found if not d.is_shared_right]
    tight = in_halves(found[:2])
    assert [d.model.spills for d in tight] == [d.compiled.spills > 0 for d in tight]
    assert any(d.model.spills for d in tight)


def test_programs_of_a_multiprocessor_follow_from_registers_and_shared_memory() -> None:
    (kernel,) = kernels_of(["rms_norm 4096x65536:float32"])
    found = resources_of(kernel.plan)
    assert found.programs == H200.registers // (4 * 32 * -(-found.registers // 8) * 8)
    space = replace(kernel.plan.space, device=replace(H200, shared_bytes=found.shared_bytes))
    small = replace(kernel.plan, space=space)
    assert resources_of(small).programs == 1


@pytest.mark.parametrize("device", [A100, B200, RTX_5090], ids=lambda d: f"sm_{d.capability}")
def test_plans_for_other_gpus_compile_without_spills(device: Device) -> None:
    """A case that spills for each of these architectures with the H200's bounds on registers."""
    case = "layer_norm 8192x24576:float16"
    of_blocks = [f"group_norm_backward {shape}:float16" for shape in ("1x512x256x256", "2x320x128x128")]
    assert spilled([case, *of_blocks], device) == {}
    assert spilled([case], replace(device, measured=H200.measured))[case] > 0
