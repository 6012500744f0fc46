"""nvFuser's profiler: segments and kernels of the last run of any fusion, as far as shardfuse knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardfuse.compat.nvfuser_direct import execution


@dataclass(frozen=True)
class KernelProfile:
    name: str
    scheduler: str


@dataclass
class FusionProfile:
    fusion_id: int = -1
    segments: int = 0
    kernel_profiles: list[KernelProfile] = field(default_factory=list[KernelProfile])


class PythonProfiler:
    """``with PythonProfiler() as prof: fd.execute(...)``; then ``prof.profile``."""

    def __init__(self, auto_scheduled: bool = True) -> None:
        self._auto = auto_scheduled
        self.profile = FusionProfile()

    def __enter__(self) -> PythonProfiler:
        execution.last_run.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self.profile = get_fusion_profile(self._auto)


def get_fusion_profile(auto_scheduled: bool = True) -> FusionProfile:
    """Of the fusion that ran last."""
    if not execution.last_run:
        return FusionProfile()
    fec = execution.last_run[-1]
    plan = fec.native.last_plan
    if plan is None:
        return FusionProfile()
    kernels = [
        KernelProfile(
            s.kernels[0].name if s.kernels else s.segment.exprs[0].op.name, s.scheduler if auto_scheduled else "user"
        )
        for s in plan.segments
    ]
    return FusionProfile(0, len(kernels), kernels)
