"""What a loop copies ahead of time, and how many of its turns shared memory holds."""

from __future__ import annotations

from ..device import Device
from .limits import SHARED
from .schedule import Schedule
from .segment import Segment
from .space import Space, run_below


def within_shared(segment: Segment, space: Space, schedule: Schedule, device: Device) -> Schedule:
    """``schedule`` of a loop with no more stages than shared memory holds the copies of."""
    if schedule.is_held:
        return schedule
    return schedule.with_stages(stages(turn_bytes(segment, space, schedule), schedule.launch.stages, device))


def stages(copied: int, most: int, device: Device) -> int:
    """So many that the copies of all but one, of ``copied`` bytes each, fit; ``most`` at the most."""
    return min(most, int(SHARED * device.shared_bytes) // max(copied, 1) + 1)


def turn_bytes(segment: Segment, space: Space, schedule: Schedule) -> int:
    """What a turn copies: its part of all that differs within it."""
    differs = [t for t in segment.loads if space.has_r(t) and run_below(t, space.r, space) % schedule.reduced]
    return sum(t.dtype.itemsize * (schedule.kept if space.has_x(t) else 1) for t in differs) * schedule.reduced
