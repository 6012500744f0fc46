"""How many parts a reduction is split into, and how they are finished."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..device import Device
from .copies import within_shared
from .limits import power_of_two, resident
from .plan import may_be_stages
from .schedule import Schedule, Split
from .segment import Segment
from .space import Space, streamed

WORTH_SPLITTING = 8
"""Turns of the loop below which a second kernel costs more than it saves."""
TURNS = 2
"""A program of a split reduction has at least so many turns of its loop."""
MAX_SPLITS = 512
_REGISTERS = (255, 168, 128)
"""Of a thread, where all programs are to be resident: the more, the fewer are."""
_LAST = 16384
"""Partial results that the last program of a block adds up: of more, all programs have a part, having met.  The sum
over dim 0 of 65536 x 512, bfloat16, 264 parts, took 29 us so, by one program 51."""
_IDLE = 0.125
"""Of the lanes of a program's turns, up to which a block is left as it is."""


def evenly(
    segment: Segment, space: Space, schedule: Schedule, device: Device, wanted: int, side_by_side: int = 1
) -> Schedule:
    """``schedule`` with as many parts as there are to be programs.  ``side_by_side``: rows that stand so as one."""
    turns = -(-space.reduced // schedule.reduced)
    most = turns // TURNS if turns >= WORTH_SPLITTING else 1
    parts = max(min(_even(space, schedule, device, wanted), most, MAX_SPLITS), 2 if side_by_side > 1 else 1)
    split = Split(parts, side_by_side=side_by_side) if parts > 1 else None
    return in_parts(segment, space, replace(schedule, split=split), device)


def _even(space: Space, schedule: Schedule, device: Device, wanted: int) -> int:
    """Parts that give about ``wanted`` programs with all lanes in use, and few multiprocessors one more than others.

    The bias gradient of GELU, 4096 x 3000 of bfloat16, took 31.6 us on an H200 in 528 programs, in 270 39.8.
    """
    blocks = -(-space.kept // schedule.kept)
    programs = wanted * schedule.kept // space.kept * blocks
    over = programs % device.multiprocessors
    if over < min(device.multiprocessors // 2, programs):
        programs -= over
    return programs // blocks


def in_parts(segment: Segment, space: Space, schedule: Schedule, device: Device) -> Schedule:
    """``schedule``, whose parts are finished in the same launch: by the last program of each block, or by all at once.

    The latter where all are resident, if need be half as many.
    """
    schedule = within_shared(segment, space, schedule, device)
    split = schedule.split
    if split is None or not may_be_stages(segment):
        return schedule
    if is_for_one(schedule):
        return schedule.finished_at_once()
    blocks, launch = -(-space.kept // schedule.kept), schedule.launch
    ahead = (launch.stages - 1) * schedule.kept * schedule.reduced * element_bytes(segment, space)
    shared = device.multiprocessors * (device.shared_bytes // max(ahead, 1))
    for parts, registers in (*((split.parts, n) for n in _REGISTERS), (split.parts // 2, _REGISTERS[-1])):
        most = min(registers, launch.registers or registers)
        if parts > 1 and blocks * parts <= min(resident(device, launch.warps, most), shared):
            bound = most if registers != _REGISTERS[0] else launch.registers
            return schedule.split_into(parts).finished_at_once().with_registers(bound)
    if split.side_by_side > 1 and schedule.reduced > 1:
        half = schedule.reduced // 2
        wider = schedule.sized(kept=2 * schedule.kept, reduced=half)
        wider = in_parts(segment, space, wider.accumulating(min(wider.accumulated, half)), device)
        return wider if wider.is_one_launch else schedule
    return schedule


def is_for_one(schedule: Schedule) -> bool:
    """Are the parts of a block so few that one program adds them up?"""
    is_apart = schedule.split is not None and schedule.split.side_by_side > 1
    return not is_apart and power_of_two(schedule.parts) * schedule.kept <= _LAST


def in_full_turns(segment: Segment, space: Space, schedule: Schedule, device: Device) -> Schedule:
    """``schedule`` with half the threads and half the block, where that leaves fewer lanes of the last turn idle.

    The weight gradients of a group norm of 2 x 1280 x 32 x 32, float16, channels-last, took 11.4 us so, else 13.4.
    """

    def idle(block: int) -> float:
        turns = space.reduced / (schedule.parts * block)
        return 1 - turns / ceil(turns)

    half, warps = schedule.reduced // 2, schedule.launch.warps
    if warps == 1 or idle(schedule.reduced) < max(_IDLE, 2 * idle(max(half, 1))):
        return schedule
    halved = schedule.with_warps(warps // 2).sized(reduced=half).accumulating(min(schedule.accumulated, half))
    return in_parts(segment, space, halved, device)


def element_bytes(segment: Segment, space: Space) -> int:
    """Of all inputs, that each tile reads its own part of."""
    return sum(t.dtype.itemsize for t in streamed(segment, space))
