"""What a loop copies ahead of time, and how many of its turns shared memory holds."""

from __future__ import annotations

from dataclasses import replace

from ..device import Device
from .limits import SHARED
from .plan import Params
from .segment import Segment
from .space import Space, run_below


def within_shared(segment: Segment, space: Space, params: Params, device: Device) -> Params:
    """``params`` of a loop with no more stages than shared memory holds the copies of."""
    if params.unrolled:
        return params
    return replace(params, num_stages=stages(turn_bytes(segment, space, params), params.num_stages, device))


def stages(copied: int, most: int, device: Device) -> int:
    """So many that the copies of all but one, of ``copied`` bytes each, fit; ``most`` at the most."""
    return min(most, int(SHARED * device.shared_bytes) // max(copied, 1) + 1)


def turn_bytes(segment: Segment, space: Space, params: Params) -> int:
    """What a turn copies: its part of all that differs within it."""
    differs = [t for t in segment.loads if space.has_r(t) and run_below(t, space.r, space) % params.r_block]
    return sum(t.dtype.itemsize * (params.x_block if space.has_x(t) else 1) for t in differs) * params.r_block
