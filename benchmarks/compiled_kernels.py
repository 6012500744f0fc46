"""Kernels of the public grid beside what the compiler makes of them, without a GPU.

    python -m benchmarks.compiled_kernels model               how far the model of registers and shared memory is off
    python -m benchmarks.compiled_kernels spills [DEVICE]     which kernels spill, or take too much shared memory

The model is fitted to ``sm_90``; each device's plans are compiled for its own architecture.
"""

from __future__ import annotations

import argparse
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
    for device in NAMED.values():
        if all(part in device.name for part in given.device):
            found = spilled(public_grid(), device)
            print(f"{device.name}: {len(found)} cases")
            print("".join(f"    {case}: {most} bytes\n" for case, most in found.items()), end="", flush=True)


if __name__ == "__main__":
    main()
