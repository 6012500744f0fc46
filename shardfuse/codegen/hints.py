"""What a load tells the caches."""

from __future__ import annotations

from ..ir.expr import BoundTensor
from ..schedulers.plan import KernelPlan

EVICT_LAST = ', eviction_policy="evict_last"'
_L2_ONLY = ', cache_modifier=".cg"'
_MANY = 2
"""Vectors beside each input of a row, that its own elements push out of the first cache: LayerNorm of 8192 x 4096,
float16, with 4 of them, took 37.0 us with the row kept out of it, 38.3 with the row kept; RMSNorm, with one, of
32768 x 4096 133.6 and 129.7."""


def hint(plan: KernelPlan, tensor: BoundTensor) -> str:
    """Options of a load of ``tensor``."""
    space = plan.space
    if not space.r or space.walked:
        return ""
    loads = plan.segment.loads
    walked = [t for t in loads if space.is_streamed(t)]
    beside = [t for t in loads if space.has_r(t) and t not in walked]
    params = plan.params
    is_row = space.is_inner and params.unrolled and params.x_block == 1 and not params.team
    if is_row and len(beside) > _MANY * len(walked):
        return _L2_ONLY if tensor in walked else EVICT_LAST if tensor in beside else ""
    return EVICT_LAST if tensor in walked else ""
