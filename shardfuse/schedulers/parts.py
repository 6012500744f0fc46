"""How many parts a reduction is split into, and how they are finished."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..device import Device
from .copies import within_shared
from .limits import power_of_two, resident
from .plan import Params, may_be_stages
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


def evenly(segment: Segment, space: Space, params: Params, device: Device, wanted: int) -> Params:
    """``params`` with as many parts as there are to be programs."""
    turns = -(-space.reduced // params.r_block)
    most = turns // TURNS if turns >= WORTH_SPLITTING else 1
    splits = max(min(_even(space, params, device, wanted), most, MAX_SPLITS), 2 if params.rows > 1 else 1)
    return in_parts(segment, space, replace(params, splits=splits), device)


def _even(space: Space, params: Params, device: Device, wanted: int) -> int:
    """Parts that give about ``wanted`` programs with all lanes in use, and few multiprocessors one more than others.

    The bias gradient of GELU, 4096 x 3000 of bfloat16, took 31.6 us on an H200 in 528 programs, in 270 39.8.
    """
    blocks = -(-space.kept // params.x_block)
    programs = wanted * params.x_block // space.kept * blocks
    over = programs % device.multiprocessors
    if over < min(device.multiprocessors // 2, programs):
        programs -= over
    return programs // blocks


def in_parts(segment: Segment, space: Space, params: Params, device: Device) -> Params:
    """``params``, whose parts are finished in the same launch: by the last program of each block, or by all at once.

    The latter where all are resident, if need be half as many.
    """
    params = within_shared(segment, space, params, device)
    if params.splits == 1 or not may_be_stages(segment):
        return params
    if is_for_one(params):
        return replace(params, once=True)
    blocks = -(-space.kept // params.x_block)
    ahead = (params.num_stages - 1) * params.x_block * params.r_block * element_bytes(segment, space)
    shared = device.multiprocessors * (device.shared_bytes // max(ahead, 1))
    for splits, registers in (*((params.splits, n) for n in _REGISTERS), (params.splits // 2, _REGISTERS[-1])):
        most = min(registers, params.max_registers or registers)
        if splits > 1 and blocks * splits <= min(resident(device, params.num_warps, most), shared):
            bound = most if registers != _REGISTERS[0] else params.max_registers
            return replace(params, splits=splits, once=True, max_registers=bound)
    if params.rows > 1 and params.r_block > 1:
        x_block, r_block = 2 * params.x_block, params.r_block // 2
        wider = replace(params, x_block=x_block, r_block=r_block, fold=min(params.fold, r_block))
        wider = in_parts(segment, space, wider, device)
        return wider if wider.once else params
    return params


def is_for_one(params: Params) -> bool:
    """Are the parts of a block so few that one program adds them up?"""
    return params.rows == 1 and power_of_two(params.splits) * params.x_block <= _LAST


def in_full_turns(segment: Segment, space: Space, params: Params, device: Device) -> Params:
    """``params`` with half the threads and half the block, where that leaves fewer lanes of the last turn idle.

    The weight gradients of a group norm of 2 x 1280 x 32 x 32, float16, channels-last, took 11.4 us so, else 13.4.
    """

    def idle(block: int) -> float:
        turns = space.reduced / (params.splits * block)
        return 1 - turns / ceil(turns)

    half = params.r_block // 2
    if params.num_warps == 1 or idle(params.r_block) < max(_IDLE, 2 * idle(max(half, 1))):
        return params
    halved = replace(params, num_warps=params.num_warps // 2, r_block=half, fold=min(params.fold, half))
    return in_parts(segment, space, halved, device)


def element_bytes(segment: Segment, space: Space) -> int:
    """Of all inputs, that each tile reads its own part of."""
    return sum(t.dtype.itemsize for t in streamed(segment, space))
