"""The schedules of a segment that the tuner tries, the cheapest first by their cost.

They are the other forms that its scheduler has for it, and the neighbours of the schedule that it proposes: one change
of a number at a time.  What no kernel can follow is refused by ``Schedule`` and ``KernelPlan``; here is what would be
tried for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from ..device import Device
from ..ir.digits import Axis, extent
from ..segments.segment import Segment
from . import kernels_of, persistent, pointwise, proposed
from .features import Features, features_or_refusal
from .limits import WARPS, power_of_two
from .mix_order import analyse_mixed
from .plan import KernelPlan
from .resources import resident, resources_of
from .schedule import Immediate, Registers, RowLoop, Schedule, ScheduleError
from .schedule_cost import cost_of
from .transpose import two_sided

_STAGES = (2, 3, 4, 5)
"""Pipeline stages of a loop that are tried: more would copy further ahead than any load takes."""
_RESIDENT = (12, 52)
"""Resident warps whose bounds on registers are tried: with fewer no bound binds, with more little is held."""

_WAYS = {"persistent": persistent.ways, "pointwise": pointwise.ways}
"""Other forms that a scheduler has for a segment."""
Tries = Iterator[Callable[[], Schedule]]
"""Neighbours of a schedule, each of which may turn out to be none (``_made``)."""


def candidates(scheduler: str, segment: Segment, schedule: Schedule, device: Device) -> tuple[Schedule, ...]:
    """The neighbours of ``schedule``, a change each, and other forms; none differs from another in name only."""
    space = _space_of(scheduler, segment, device)
    if space is None:
        return ()
    start = schedule if schedule.columns else schedule.sized(kept=min(schedule.kept, power_of_two(space.kept)))
    near = (_made(make) for step in _STEPS[scheduler] for make in step(start, device))
    forms = _WAYS[scheduler](segment, device) if scheduler in _WAYS else ()
    costs: dict[Schedule, float] = {}
    for other in (*near, *forms):
        own = pointwise.space_for(space, other) if other and scheduler == "pointwise" else space
        if other and other != schedule and other not in costs and _is_full(own, other):
            made = _runnable(scheduler, segment, other, space)
            if made:
                costs[other] = cost_of(made)
    return tuple(sorted(costs, key=costs.__getitem__))


def _made(make: Callable[[], Schedule]) -> Schedule | None:
    try:
        return make()
    except ScheduleError:
        return None


def may_run(scheduler: str, segment: Segment, schedule: Schedule, device: Device) -> bool:
    """Can a kernel of ``segment`` follow ``schedule``, and does it seem to spill no more than what is proposed?"""
    space = _space_of(scheduler, segment, device)
    return space is not None and bool(_runnable(scheduler, segment, schedule, space))


def _runnable(scheduler: str, segment: Segment, schedule: Schedule, space: Features) -> tuple[KernelPlan, ...]:
    """The kernels of ``schedule``; none where it may not run."""
    first = proposed(scheduler, segment, space.device)
    if not _is_in_chunks(space, schedule) or (space.is_invariant and _order_of(schedule) != _order_of(first)):
        return ()
    try:
        made = kernels_of(scheduler, segment, space.device, schedule)
    except ScheduleError:
        return ()
    spills = schedule != first and any(resources_of(kernel).spills for kernel in made)
    return () if spills else made


def _order_of(schedule: Schedule) -> tuple[object, ...]:
    """What says in which order the numbers of a row are added up: not which loads come first, nor the parts of a row
    loop, which share columns alone."""
    group = schedule.group and (schedule.group.members, schedule.group.exchange)
    split = None if isinstance(schedule.order, RowLoop) else schedule.split
    held = replace(schedule.residency, eager=False) if isinstance(schedule.residency, Registers) else schedule.residency
    return schedule.order, held, group, split, schedule.access, schedule.launch.warps


def _is_in_chunks(space: Features, schedule: Schedule) -> bool:
    """Do the programs of a group have a chunk each, and is a held row cut into no more chunks than are unrolled?"""
    share = -(-space.reduced // max(schedule.members, 1))
    if schedule.members > 1 and share < schedule.reduced:
        return False
    return not (schedule.is_held and space.r) or share <= space.tuned.rows.chunks * schedule.reduced


def _is_full(space: Features, schedule: Schedule) -> bool:
    """Is there something for most of a block to do, whichever way it grew?"""
    across, along = space.sides
    if across:
        return schedule.kept <= _rounded_up(along) and schedule.reduced <= _rounded_up(across)
    rows = _rounded_up(space.walked) if space.walked else power_of_two(space.kept)
    return schedule.kept <= rows and schedule.reduced <= power_of_two(space.reduced)


def _space_of(scheduler: str, segment: Segment, device: Device) -> Features | None:
    if scheduler == "mix_order":
        mixed = analyse_mixed(segment, device)
        return None if isinstance(mixed, str) else mixed.space
    space = (two_sided if scheduler == "transpose" else features_or_refusal)(segment, device)
    if isinstance(space, str):
        return None
    return space.in_columns if scheduler in ("persistent", "looped") else space


def _rounded_up(axis: Axis) -> int:
    """The smallest power of two that holds the axis."""
    return power_of_two(extent(axis))


# one step


def _kept(schedule: Schedule, device: Device) -> Tries:
    if not schedule.columns:
        yield from (partial(schedule.sized, kept=n) for n in (2 * schedule.kept, schedule.kept // 2))


def _reduced(schedule: Schedule, device: Device) -> Tries:
    yield from (partial(schedule.sized, reduced=n) for n in (2 * schedule.reduced, schedule.reduced // 2))


def _sides(schedule: Schedule, device: Device) -> Tries:
    """Longer one way and shorter the other."""
    yield partial(schedule.sized, kept=2 * schedule.kept, reduced=schedule.reduced // 2)
    yield partial(schedule.sized, kept=schedule.kept // 2, reduced=2 * schedule.reduced)


def _warps(schedule: Schedule, device: Device) -> Tries:
    """More or fewer threads for the same block, and for one that grows with them."""
    for warps in (2 * schedule.launch.warps, schedule.launch.warps // 2):
        yield lambda n=warps: _resident(schedule.with_warps(n), device)
        if schedule.reduced > 1:
            block = max(schedule.reduced * warps // schedule.launch.warps, 1)
            yield lambda n=warps, reduced=block: _resident(schedule.with_warps(n).sized(reduced=reduced), device)


def _stages(schedule: Schedule, device: Device) -> Tries:
    if not schedule.is_held or schedule.parts > 1:
        yield from (partial(schedule.with_stages, n) for n in _STAGES)


def _registers(schedule: Schedule, device: Device) -> Tries:
    """The next steps up and down, and no bound."""
    now = schedule.launch.registers
    fits = device.bound(schedule.launch.warps)
    steps = sorted({n for warps in range(*_RESIDENT, WARPS) if (n := device.bound(warps)) <= fits})
    below = [n for n in steps if now is None or n < now][-1:]
    above = [n for n in steps if now is not None and n > now][:1]
    for bound in (*below, *above):
        yield lambda n=bound: _resident(schedule.with_registers(n), device)
    if now is not None and not schedule.group:
        yield partial(schedule.with_registers, None)


def _parts(schedule: Schedule, device: Device) -> Tries:
    if schedule.parts > 1:
        yield from (partial(schedule.split_into, n) for n in (2 * schedule.parts, schedule.parts // 2) if n > 1)


def _groups(schedule: Schedule, device: Device) -> Tries:
    group = schedule.group
    if group is None or group.members == 1:
        return
    for members in (2 * group.members, group.members // 2):
        if members > 1:
            yield partial(schedule.shared_by, members, group.programs)
    exchange = group.exchange
    if isinstance(exchange, Immediate):
        other = replace(exchange, prefetches=not exchange.prefetches)
        yield lambda: replace(schedule, group=replace(group, exchange=other))
        if schedule.kept > 1:
            polled = replace(exchange, counted=not exchange.counted)
            yield lambda: replace(schedule, group=replace(group, exchange=polled))


def _launches(schedule: Schedule, device: Device) -> Tries:
    yield partial(schedule.finished_at_once, is_one_launch=not schedule.is_one_launch)


def _resident(schedule: Schedule, device: Device) -> Schedule:
    """The grid of a group is as large as its warps and registers let be resident."""
    if schedule.group is None or schedule.launch.registers is None:
        return schedule
    programs = resident(device, schedule.launch.warps, schedule.launch.registers)
    return schedule.shared_by(schedule.group.members, programs)


_STEPS: dict[str, tuple[Callable[[Schedule, Device], Tries], ...]] = {
    "pointwise": (_kept, _warps, _registers),
    "transpose": (_kept, _reduced, _sides, _warps),
    "persistent": (_kept, _reduced, _warps, _registers, _groups),
    "reduction": (_kept, _reduced, _warps, _stages, _registers, _parts, _launches),
    "looped": (_kept, _reduced, _warps, _stages, _registers, _groups),
    "mix_order": (_kept, _reduced, _warps, _stages, _registers, _parts, _launches),
}
"""What is changed under each scheduler."""
