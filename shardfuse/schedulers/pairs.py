"""pairs: two rows at a time, all threads along each, so that vectors beside the rows are loaded once for both."""

from __future__ import annotations

from ..device import Device
from .limits import LONG_WARPS, MAX_TEAM, WARP, WIDEST_LOAD, power_of_two, vector
from .resources import resident
from .schedule import Group, Immediate, Launch, Schedule, Tile
from .segment import Segment
from .space import Space, beside, streamed
from .team import cannot_exchange


def paired_team(segment: Segment, space: Space, device: Device) -> Schedule | None:
    """A team that takes two rows at a time, for which it reads vectors beside them once; ``None`` where that loses.

    ``space``: of the segment with its statistics joined.  Where all of the vectors stay in the first cache of a
    multiprocessor it need not be shared out.
    """
    tuned = device.measured.pairs
    walked, n = streamed(segment, space), space.reduced
    if segment.loads != segment.inputs or space.inside != len(space.r) or space.phases != 2 or space.grouped:
        return None
    if cannot_exchange(segment, space) is not None:
        return None
    vectors = beside(segment, space)
    if not space.is_inner or len(walked) != 1 or len(vectors) <= tuned.many or any(map(space.has_x, vectors)):
        return None
    width = vector(walked[0].dtype, n, device)
    if width != WIDEST_LOAD or segment.has_indices:
        return None
    if n * sum(t.dtype.itemsize for t in vectors) <= int(tuned.cached * device.shared_bytes):
        return None
    warps, members = LONG_WARPS, max(power_of_two(-(-n // (LONG_WARPS * WARP * tuned.held))), 2)
    each = -(-n // (members * warps * WARP))
    few, most = tuned.resident[0][0], tuned.resident[-1][0]
    if each <= most // 2 and (each > few or each % width == width // 2):
        warps, each = warps // 2, 2 * each  # as many in each thread, or no half of a load masked
    registers = device.bound(next(n for held, n in tuned.resident if each <= held))
    programs = resident(device, warps, registers)
    if members > min(MAX_TEAM, programs) or space.kept * members < 2 * tuned.turns * programs:
        return None
    return Schedule(
        Tile(2, warps * WARP * width),
        group=Group(members, programs, Immediate(counted=each <= few, prefetches=True)),
        launch=Launch(warps, registers=registers),
    )
