"""Kernels whose programs wait for each other, with no more programs than the device runs at once.

Schedulers tell from a GPU's registers and shared memory how many that are; what the compiler made of a kernel, the
driver knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ..codegen import generate
from ..errors import KernelCompileError
from ..ir.expr import BoundTensor
from ..ir.layout import Layout
from ..schedulers.plan import KernelPlan
from .compile_workers import Submit
from .kernel import Kernel
from .options import CompileOptions

Fit = Callable[[KernelPlan, Mapping[BoundTensor, Layout], int, CompileOptions, torch.device], Kernel]
"""``fitted``, or ``begun`` with where to submit."""


def fitted(
    plan: KernelPlan, layouts: Mapping[BoundTensor, Layout], rank: int, options: CompileOptions, device: torch.device
) -> Kernel:
    """The kernel of ``plan``, compiled; with fewer programs where it has more than can wait for each other.

    Raises ``KernelCompileError``, also where a team does not fit.
    """
    kernel = _compiled(plan, layouts, rank, options, device)
    waits_for_all = kernel.source.is_cooperative or (plan.exchange is not None and not plan.exchange.is_claimed)
    most = kernel.resident() if waits_for_all else None
    if most is None or kernel.source.grid <= most:
        return kernel
    if plan.schedule.group and plan.exchange is None:
        kernel = _compiled(_with_programs(plan, most), layouts, rank, options, device)
        if kernel.source.grid <= most:
            return kernel
    message = f"{kernel.source.grid} programs wait for each other, {most} run at once"
    raise KernelCompileError(kernel.source.name, message, kernel.source.text)


def begun(
    plan: KernelPlan, layouts: Mapping[BoundTensor, Layout], rank: int, options: CompileOptions, device: torch.device,
    submit: Submit,
) -> Kernel:  # fmt: skip
    """The kernel of ``plan`` as it is compiled at first, which another process does: there is nothing to launch yet."""
    kernel = _written(plan, layouts, rank, options)
    kernel.begin_compiling(device, submit)
    return kernel


def launches_of(plan: KernelPlan) -> tuple[KernelPlan, ...]:
    """The stages of ``plan`` as launches of their own, none of which waits for another's programs; else ``plan``."""
    if not plan.stages or plan.exchange is not None or any(stage.schedule.group for stage in plan.stages):
        return (plan,)
    first, *rest = plan.stages
    alone = first.schedule.finished_at_once(is_one_launch=False)
    return (replace(first, schedule=alone), *rest)


def _with_programs(plan: KernelPlan, most: int) -> KernelPlan:
    """``plan`` of teams, or one that begins with them, with no more programs than that, if a team has no more."""
    if plan.schedule.members > most:
        return plan
    stages = (_with_programs(plan.stages[0], most), *plan.stages[1:]) if plan.stages else ()
    return replace(plan, schedule=plan.schedule.shared_by(plan.schedule.members, most), stages=stages)


def _compiled(
    plan: KernelPlan, layouts: Mapping[BoundTensor, Layout], rank: int, options: CompileOptions, device: torch.device
) -> Kernel:
    kernel = _written(plan, layouts, rank, options)
    kernel.compile(device)
    return kernel


def _written(plan: KernelPlan, layouts: Mapping[BoundTensor, Layout], rank: int, options: CompileOptions) -> Kernel:
    source = generate(plan, layouts, rank, interpret=options.interpret)
    return Kernel(source, options.cache_directory, interpret=options.interpret)
