"""Kernels of the public grid beside what the compiler makes of them, without a GPU.

    python -m benchmarks.compiled_kernels model               how far the model of registers and shared memory is off
    python -m benchmarks.compiled_kernels spills [DEVICE]     which kernels spill, or take too much shared memory

The model is fitted to ``sm_90``; each device's plans are compiled for its own architecture.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from shardfuse.codegen import KernelSource
from shardfuse.device import H200, NAMED, Device
from shardfuse.schedulers.plan import KernelPlan
from shardfuse.schedulers.resources import Resources, form_of, resources_of

from .sm90 import Resources as Compiled
from .sm90 import compile_all, planned
from .workload import Case
from .workloads import WORKLOADS

LEAST = 32
"""Registers below which the number of resident programs does not change."""
SLIGHT = 2048
"""Bytes of shared memory that reductions across warps take, of which the model says nothing."""
ONE_LESS = "as on the H200, where one program less a multiprocessor, without, takes 201 us, not 169"
WHOLE_FILE = "programs of 16 or 32 warps have no register more: a 16-bit row takes half of the register file"
WIDE_COLUMNS = "with 8 resident warps fewer than eight of them are left to hide the loads of a loop"
FEW_BYTES = "less than a register of each thread, or little more"
KNOWN: dict[int, dict[str, tuple[int, str]]] = {
    80: {
        "layer_norm_backward 16384x5140:bfloat16": (16, ONE_LESS),
        "group_norm_channels_last 2x1280x32x32:float32:channels_last": (36, WIDE_COLUMNS),
        "batch_norm 32x256x56x56:float16": (28, FEW_BYTES),
        "batch_norm_channels_last 32x256x56x56:float32:channels_last": (12, WIDE_COLUMNS),
    },
    100: {
        "layer_norm 8192x16384:float32": (8, FEW_BYTES),
        "layer_norm_backward 16384x5140:bfloat16": (112, ONE_LESS),
        "softmax_backward 16384x8192:bfloat16": (20, FEW_BYTES),
        "softmax_backward 8192x32768:bfloat16": (20, WHOLE_FILE),
        "sum_outer 1048576x128:bfloat16": (16, FEW_BYTES),
        "privatised_cast 4096x65536:bfloat16": (12, WHOLE_FILE),
    },
    120: {
        "layer_norm_backward 16384x5140:bfloat16": (92, ONE_LESS),
        "group_norm_channels_last 1x128x20x256x256:bfloat16:channels_last": (36, WIDE_COLUMNS),
        "group_norm_backward 2x640x64x64:float32": (8, FEW_BYTES),
        "batch_norm_channels_last 8x64x256x256:float32:channels_last": (140, WIDE_COLUMNS),
    },
}
"""By compute capability: cases whose kernels spill or have a stack, with the most bytes, and why they are left so.  Of
9.0 they are in ``tests/test_codegen_sm90.py``."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a case."""

    case: str
    plan: KernelPlan
    source: KernelSource


@dataclass(frozen=True)
class Difference:
    """The model beside the compiler: of registers relatively, of shared memory in bytes beyond what is slight."""

    kernel: Kernel
    model: Resources
    compiled: Compiled

    @property
    def registers(self) -> float:
        used = max(self.compiled.registers, LEAST)
        return abs(self.model.registers - used) / used

    @property
    def is_shared_right(self) -> bool:
        """To 2 KB or a tenth?"""
        return abs(self.model.shared_bytes - self.compiled.shared) <= max(SLIGHT, self.compiled.shared // 10)


def kernels_of(cases: Iterable[str], device: Device = H200) -> list[Kernel]:
    """``cases``: a workload and one of its cases each."""
    found: list[Kernel] = []
    for case in cases:
        name, text = case.split(" ")
        found += [Kernel(case, *made) for made in planned(WORKLOADS[name], Case.parse(text), device)]
    return found


def public_grid() -> list[str]:
    """Every case of the benchmarks, and the same in float32."""
    cases = [(w.name, Case.parse(text)) for w in WORKLOADS.values() for text in w.cases]
    return list(
        dict.fromkeys(f"{name} {c}" for name, case in cases for c in (case, replace(case, dtype=torch.float32)))
    )


def differences(kernels: list[Kernel], registers: list[int] | None = None) -> list[Difference]:
    """``registers``: bounds of the kernels, instead of those of their schedules."""
    sources, plans = [k.source for k in kernels], [k.plan.stages[0] if k.plan.stages else k.plan for k in kernels]
    if registers is not None:
        sources = [replace(s, max_registers=n) for s, n in zip(sources, registers, strict=True)]
        plans = [replace(p, schedule=p.schedule.with_registers(n)) for p, n in zip(plans, registers, strict=True)]
    models = map(resources_of, plans)
    return [Difference(*each) for each in zip(kernels, models, compile_all(sources), strict=True)]


def in_halves(found: list[Difference]) -> list[Difference]:
    """The same kernels with half of the registers that the compiler gave them: most of them spill."""
    halves = [max(d.compiled.registers // 16 * 8, LEAST) for d in found]
    return differences([d.kernel for d in found], halves)


def spilled(cases: Iterable[str], device: Device) -> dict[str, int]:
    """Cases whose kernels spill on ``device``, with the most bytes; ``-1`` for too much shared memory."""
    kernels = kernels_of(cases, device)
    found: dict[str, int] = {}
    for kernel, made in zip(kernels, compile_all([k.source for k in kernels], device.capability), strict=True):
        worst = -1 if made.shared > device.shared_bytes else max(made.spills, made.stack)
        if worst:
            found[kernel.case] = max(found.get(kernel.case, worst), worst)
    return found


def unknown(found: dict[str, int], device: Device) -> list[str]:
    """Cases that spill more than is known."""
    known = KNOWN.get(device.capability, {})
    return [case for case, most in found.items() if most < 0 or most > known.get(case, (0, ""))[0]]


def report_model() -> None:
    found = differences(kernels_of(public_grid()))
    tight = in_halves(found)
    by_form: dict[str, list[Difference]] = defaultdict(list)
    for d in found:
        by_form[form_of(d.kernel.plan.stages[0] if d.kernel.plan.stages else d.kernel.plan)].append(d)
    for form, each in sorted(by_form.items()):
        worst = max(each, key=lambda d: d.registers)
        average = sum(d.registers for d in each) / len(each)
        at_worst = f"at worst {worst.registers:.0%}, {worst.kernel.case}"
        print(f"{form}: {len(each)} kernels, registers {average:.0%} off, {at_worst}")
    print(f"all: {sum(d.registers for d in found) / len(found):.0%} off")
    print(f"shared memory right of {sum(d.is_shared_right for d in found)} of {len(found)}")
    much = [d.model.spills for d in tight if d.compiled.spills > 64]
    wrong = sum(d.model.spills and not d.compiled.spills for d in tight)
    print(f"with half of the registers {len(much)} spill, {sum(much)} are said to; {wrong} are said to and do not")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("model", "spills"))
    parser.add_argument("device", nargs="*", help="a part of its name")
    given = parser.parse_args()
    if given.what == "model":
        report_model()
        return
    is_known = True
    for device in NAMED.values():
        if all(part in device.name for part in given.device):
            found = spilled(public_grid(), device)
            more = unknown(found, device) if device.capability in KNOWN else []
            is_known &= not more
            print(f"{device.name}: {len(found)} cases, {len(more)} of them more than is known")
            print("".join(f"    {case}: {most} bytes\n" for case, most in found.items()), end="", flush=True)
    sys.exit(not is_known)


if __name__ == "__main__":
    main()
