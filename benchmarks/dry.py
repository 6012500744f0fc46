"""Every case as it would run, without a GPU: plan, kernels, bytes; on request the kernels compiled for ``sm_90``."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch

from shardfuse.analysis.communication_table import local_bytes
from shardfuse.ir.expr import BoundTensor

from .sm90 import Resources, compile_all, sources_of
from .workload import Case, Draw, Workload


@dataclass(frozen=True)
class Planned:
    """bytes: of inputs and outputs; moved: what the segments read and write; seconds: to plan, without a cache."""

    workload: str
    case: str
    kernels: int
    torch_calls: int
    schedulers: tuple[str, ...]
    bytes: int
    moved: int
    seconds: float
    compiled: tuple[Resources, ...] = ()


def plan_case(workload: Workload, case: Case, *, compiled: bool = False) -> Planned:
    """``compiled``: also compile every kernel for ``sm_90``."""
    inputs = workload.bind(workload.arguments(case, Draw(torch.device("meta"))))
    fd = workload.fusion(case)
    sizes = dict(zip(fd.fec.tensors(), (tuple(t.shape) for t in inputs), strict=True))
    began = perf_counter()
    plan = fd.fec.plan(sizes)
    seconds = perf_counter() - began
    explained = fd.explain(sizes=sizes)
    tensors = [v for v in (*plan.fusion.inputs, *plan.fusion.outputs) if isinstance(v, BoundTensor)]
    schedulers = tuple(s.scheduler for s in explained.segments if s.scheduler != "no_op")
    resources = compile_all(sources_of(plan, inputs)) if compiled else []
    return Planned(
        workload=workload.name,
        case=str(case),
        kernels=explained.kernels,
        torch_calls=schedulers.count("torch_call"),
        schedulers=schedulers,
        bytes=sum(local_bytes(t) for t in tensors),
        moved=explained.bytes,
        seconds=seconds,
        compiled=tuple(resources),
    )
