"""pairs: two rows at a time, all threads along each, so that vectors beside the rows are loaded once for both."""

from __future__ import annotations

from ..device import Device
from .limits import MANY_VECTORS, MAX_TEAM, WARP, WIDEST_LOAD, power_of_two, resident, vector
from .schedule import Group, Immediate, Launch, Schedule, Tile
from .segment import Segment
from .space import Space, beside
from .team import cannot_exchange

_CACHED_VECTORS = 0.75
"""Of the first cache, of which rows that come and go leave so much.  LayerNorm of 8192 x 20480, float16, with 4 of
them, took 179 us with a program for each row, 201 with pairs of rows in teams; of 8192 x 24576 284 and 251."""
_WARPS = 8
_HELD = 32
"""Elements of each row that a thread holds where there are so many warps, at the most."""
_FEW, _MOST = 24, 56
"""Where it holds more than a few, half as many warps hold twice as much, up to the most."""
_REGISTERS = ((_FEW, 80), (40, 128), (_MOST, 168))
"""Of a thread that holds so many elements at the most.  LayerNorm of 4096 x 49152, float16, with 4 vectors, took 254 us
on an H200 with 24 in 80 registers, in 96 283; of 8192 x 28672 298 with 56, 307 with 28 in 96.
Those that hold more than a few poll each other's words: LayerNorm of 4096 x 65536, 1024 x 262144, bfloat16, with 4
vectors, took 334 and 379 us so, counting each other in 351 and 409."""
_TURNS = 4
"""Pairs that a team takes one after the other, at the least."""


def paired_team(segment: Segment, space: Space, device: Device) -> Schedule | None:
    """A team that takes two rows at a time, for which it reads vectors beside them once; ``None`` where that loses.

    ``space``: of the segment with its statistics joined.  Where all of the vectors stay in the first cache of a
    multiprocessor it need not be shared out.
    """
    walked, n = [t for t in segment.loads if space.is_streamed(t)], space.reduced
    if segment.loads != segment.inputs or space.inside != len(space.r) or space.phases != 2 or space.grouped:
        return None
    if cannot_exchange(segment, space) is not None:
        return None
    vectors = beside(segment, space)
    if not space.is_inner or len(walked) != 1 or len(vectors) <= MANY_VECTORS or any(map(space.has_x, vectors)):
        return None
    width = vector(walked[0].dtype, n, device)
    if width != WIDEST_LOAD or segment.has_indices:
        return None
    if n * sum(t.dtype.itemsize for t in vectors) <= int(_CACHED_VECTORS * device.shared_bytes):
        return None
    warps, members = _WARPS, max(power_of_two(-(-n // (_WARPS * WARP * _HELD))), 2)
    each = -(-n // (members * warps * WARP))
    if each <= _MOST // 2 and (each > _FEW or each % width == width // 2):
        warps, each = warps // 2, 2 * each  # as many in each thread, or no half of a load masked
    registers = next(r for most, r in _REGISTERS if each <= most)
    programs = resident(device, warps, registers)
    if members > min(MAX_TEAM, programs) or space.kept * members < 2 * _TURNS * programs:
        return None
    return Schedule(
        Tile(2, warps * WARP * width),
        group=Group(members, programs, Immediate(counted=each <= _FEW, prefetches=True)),
        launch=Launch(warps, registers=registers),
    )
