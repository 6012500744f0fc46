"""What a load tells the caches."""

from __future__ import annotations

from ..ir.expr import BoundTensor
from ..schedulers.plan import KernelPlan
from ..schedulers.space import beside, rereads, streamed

EVICT_LAST = ', eviction_policy="evict_last"'
EVICT_FIRST = ', eviction_policy="evict_first"'
"""What is read once gives way to what others wrote, which then is not written back meanwhile.  The sum over rows of
8192 x 4096, float32, took 37.2 us on an H200 so, 42.0 with the rows kept; of 16384 x 8192, bfloat16, 69.3 and 71.1."""
L2_ONLY = ', cache_modifier=".cg"'


def hint(plan: KernelPlan, tensor: BoundTensor) -> str:
    """Options of a load of ``tensor``."""
    space = plan.space
    if not space.r or space.walked:
        return ""
    walked, vectors = streamed(plan.segment, space), beside(plan.segment, space)
    if _reads_once(plan):
        return EVICT_FIRST if tensor in walked else ""
    schedule = plan.schedule
    is_row = space.is_inner and schedule.is_held and schedule.kept == 1 and not schedule.members
    if (is_row or plan.is_pair) and len(vectors) > plan.device.measured.pairs.many * len(walked):
        return L2_ONLY if tensor in walked else EVICT_LAST if tensor in vectors else ""
    return EVICT_LAST if tensor in walked else ""


def _reads_once(plan: KernelPlan) -> bool:
    """Is nothing read again, by this kernel, or stored for each element?

    Running statistics want what they walk kept: of 2048 x 131072, bfloat16, they took 134 us so, else 138.  So do
    copies ahead of time: the sum over dim 0 of 1048576 x 128 took 73.7 us so, else 75.3.
    """
    space, schedule = plan.space, plan.schedule
    if schedule.members or any(map(space.has_r, plan.segment.outputs)):
        return False
    is_again = rereads(space) or any(len(e.outputs) > 1 for e in plan.segment.exprs)
    return schedule.is_held or (schedule.launch.stages == 1 and not is_again)
