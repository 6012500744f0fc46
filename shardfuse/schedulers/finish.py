"""Adds up the partial results of the programs that shared rows or columns."""

from __future__ import annotations

from dataclasses import replace

from ..device import MAX_REGISTERS, SECTOR_BYTES, Device
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce
from .limits import WARP, power_of_two, power_of_two_within
from .persistent import in_registers
from .resources import REGISTER
from .schedule import Loop, Schedule, Tile
from .segment import Segment
from .space import Space, streamed


def finishing(segment: Segment, space: Space, device: Device) -> Schedule:
    """All partial results of some kept elements in registers."""
    splits = power_of_two(space.reduced)
    if space.is_inner or space.kept == 1:
        return in_registers(segment, space, device)
    held = splits * max(len(streamed(segment, space)), 1)
    lanes = power_of_two_within(max(device.measured.columns.tile // held, 1))
    lanes = max(lanes, 16)
    return Schedule(Tile(min(lanes, power_of_two(space.kept)), splits))


def fitting(finish: Schedule, first: Schedule, words: int) -> Schedule:
    """``finish`` in a launch of the threads and registers of ``first``: half of them hold a tile, or a loop and sums.

    words: of a partial result.  The sum over dim 0 of 20000 x 301, int8, has 1792 parts: at once, 16 columns of them,
    they spilled 1568 bytes.
    """
    registers = (first.launch.registers or MAX_REGISTERS) // 2
    most = power_of_two(first.launch.warps * WARP * registers // words + 1) // 2
    if finish.kept * finish.reduced <= most:
        return finish
    lanes = max(most // finish.reduced, min(finish.kept, SECTOR_BYTES // REGISTER // words))
    if finish.reduced <= most // lanes:
        return finish.sized(kept=lanes)
    return replace(finish.sized(kept=lanes, reduced=most // (2 * lanes)).with_stages(1), residency=Loop())


def finish_of(reduction: Expr, partial: BoundTensor, axes: tuple[int, ...]) -> Expr:
    """The reduction over ``axes`` of what the programs have of ``reduction``."""
    assert isinstance(reduction.op, Reduce), f"{reduction.op.name} is no reduction"
    return Expr(Reduce(reduction.op.kind, axes), (partial,), reduction.outputs)
