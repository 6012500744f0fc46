"""Params near those that a scheduler proposes, for the tuner to try: a change at a time, within the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

from ..device import Device
from ..ir.digits import Axis
from .late_team import MOST_MEMBERS
from .limits import MAX_CHUNKS, MAX_TEAM, WARP, WIDEST_WARPS, power_of_two, resident
from .mix_order import analyse_mixed
from .plan import Params, may_be_stages
from .segment import Segment
from .space import Space, analyse
from .team import in_columns
from .transpose import two_sided

_STAGES = (2, 3, 4, 5)
_REGISTERS = (40, 48, 56, 64, 80, 96, 128, 168)
"""Of a thread: the steps at which one more program fits a multiprocessor."""
_MOST_EACH = 128
"""Elements of a tile for a thread: more would not stay in registers."""
_MAX_SPLITS = 1024

Step = Callable[[Params, Device], Iterator[Params]]


def candidates(scheduler: str, segment: Segment, params: Params, device: Device) -> tuple[Params, ...]:
    """The neighbours of ``params``, a change each; none that differs from another in name only."""
    found: dict[Params, None] = {}
    space = _space_of(scheduler, segment)
    if space is None:
        return ()
    rows = params.x_block if params.columns else min(params.x_block, power_of_two(space.kept))
    for step in _STEPS[scheduler]:
        for other in step(replace(params, x_block=rows), device):
            if other != params and _is_full(space, other) and fits(scheduler, segment, other, device):
                found[other] = None
    return tuple(found)


def fits(scheduler: str, segment: Segment, params: Params, device: Device) -> bool:
    """May ``params`` run ``segment`` at all?  What the compiler makes of them is seen when it is tried."""
    if not _is_well_formed(params, device):
        return False
    space = _space_of(scheduler, segment)
    threads = params.num_warps * WARP
    if space is None or params.x_block * params.r_block > _MOST_EACH * threads:
        return False
    is_parted = params.splits > 1 or scheduler == "mix_order"
    if params.once and not (is_parted and may_be_stages(segment)):
        return False
    if params.team and params.team != power_of_two(params.team) and not params.late:
        return False
    if params.team > 1 and -(-space.reduced // params.team) < params.r_block:
        return False
    is_held = params.unrolled and bool(space.r)
    return not is_held or -(-space.reduced // max(params.team, 1)) <= MAX_CHUNKS * params.r_block


def _is_full(space: Space, params: Params) -> bool:
    """Is there something for most of a block to do, whichever way it grew?"""
    across, along = space.sides
    if across:
        return params.x_block <= _rounded_up(along) and params.r_block <= _rounded_up(across)
    rows = _rounded_up(space.walked) if space.walked else power_of_two(space.kept)
    return params.x_block <= rows and params.r_block <= power_of_two(space.reduced)


def _is_well_formed(params: Params, device: Device) -> bool:
    """Blocks, warps and programs that a multiprocessor can have at all."""
    blocks = (params.x_block, params.r_block, params.num_warps)
    if any(n < 1 or n != power_of_two(n) for n in blocks) or params.num_warps > WIDEST_WARPS:
        return False
    if params.max_registers is not None and not 32 <= params.max_registers <= 255:
        return False
    if params.num_warps * WARP * (params.max_registers or 32) > device.registers:
        return False
    if params.x_block > 1 and (params.packed or params.aligned or params.late):
        return False
    most = MOST_MEMBERS if params.late else MAX_TEAM
    if not 1 <= params.splits <= _MAX_SPLITS or not 0 <= params.team <= most:
        return False
    return not params.team or params.programs >= params.team


def _space_of(scheduler: str, segment: Segment) -> Space | None:
    if scheduler == "mix_order":
        mixed = analyse_mixed(segment)
        return None if isinstance(mixed, str) else mixed.space
    space = two_sided(segment) if scheduler == "transpose" else analyse(segment)
    if isinstance(space, str):
        return None
    return in_columns(segment, space) if scheduler in ("persistent", "looped") else space


def _rounded_up(axis: Axis) -> int:
    """The smallest power of two that holds the axis."""
    return power_of_two(prod(digit.extent for digit in axis))


# one step


def _x_blocks(params: Params, device: Device) -> Iterator[Params]:
    if not params.columns:
        yield from (replace(params, x_block=n) for n in (2 * params.x_block, params.x_block // 2) if n)


def _r_blocks(params: Params, device: Device) -> Iterator[Params]:
    yield from (replace(params, r_block=n) for n in (2 * params.r_block, params.r_block // 2) if n)


def _sides(params: Params, device: Device) -> Iterator[Params]:
    """Longer one way and shorter the other."""
    for x, r in ((2, 0.5), (0.5, 2)):
        yield replace(params, x_block=int(params.x_block * x), r_block=int(params.r_block * r))


def _warps(params: Params, device: Device) -> Iterator[Params]:
    """More or fewer threads for the same block, and for one that grows with them."""
    for warps in (2 * params.num_warps, params.num_warps // 2):
        if warps:
            yield _with_programs(replace(params, num_warps=warps), device)
            block = params.r_block * warps // params.num_warps
            if params.r_block > 1:
                yield _with_programs(replace(params, num_warps=warps, r_block=max(block, 1)), device)


def _stages(params: Params, device: Device) -> Iterator[Params]:
    if not params.unrolled or params.splits > 1:
        yield from (replace(params, num_stages=n) for n in _STAGES)


def _registers(params: Params, device: Device) -> Iterator[Params]:
    """The next steps up and down, and no bound."""
    now = params.max_registers
    steps = [n for n in _REGISTERS if params.num_warps * WARP * n <= device.registers]
    below = [n for n in steps if now is None or n < now][-1:]
    above = [n for n in steps if now is not None and n > now][:1]
    for bound in (*below, *above):
        yield _with_programs(replace(params, max_registers=bound), device)
    if now is not None and not params.team:
        yield replace(params, max_registers=None)


def _splits(params: Params, device: Device) -> Iterator[Params]:
    if params.splits > 1:
        yield from (replace(params, splits=n) for n in (2 * params.splits, params.splits // 2) if n > 1)


def _teams(params: Params, device: Device) -> Iterator[Params]:
    if params.team > 1:
        yield from (replace(params, team=n) for n in (2 * params.team, params.team // 2) if n > 1)
        if params.unrolled and not params.late:
            yield replace(params, prefetch=not params.prefetch)
        if params.x_block > 1:
            yield replace(params, counted=not params.counted)


def _launches(params: Params, device: Device) -> Iterator[Params]:
    yield replace(params, once=not params.once)


def _with_programs(params: Params, device: Device) -> Params:
    """A team's grid is as large as its warps and registers let be resident."""
    if not params.team or params.max_registers is None:
        return params
    return replace(params, programs=resident(device, params.num_warps, params.max_registers))


_STEPS: dict[str, tuple[Step, ...]] = {
    "pointwise": (_x_blocks, _warps, _registers),
    "transpose": (_x_blocks, _r_blocks, _sides, _warps),
    "persistent": (_x_blocks, _r_blocks, _warps, _registers, _teams),
    "reduction": (_x_blocks, _r_blocks, _warps, _stages, _registers, _splits, _launches),
    "looped": (_x_blocks, _r_blocks, _warps, _stages, _registers, _teams),
    "mix_order": (_x_blocks, _r_blocks, _warps, _stages, _registers, _splits, _launches),
}
"""What is changed under each scheduler."""
