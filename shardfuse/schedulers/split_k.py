"""How many parts a reduction is split into, what stores their partial results, and how these are finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from ..device import MAX_REGISTERS, SECTOR_BYTES, Device
from ..ir.digits import Axis, Digit, Root, varies
from ..ir.domain import BoundDomain
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce
from ..segments.segment import Segment, leading_to
from .features import Features, carried
from .limits import REGISTER_BYTES, WARP, power_of_two, power_of_two_within
from .persistent import in_registers
from .plan import may_be_stages
from .resources import resident, within_shared
from .row_groups import halved
from .schedule import Loop, Schedule, Split, Tile


def evenly(space: Features, schedule: Schedule, wanted: int, side_by_side: int = 1) -> Schedule:
    """``schedule`` with as many parts as there are to be programs.  ``side_by_side``: rows that stand so as one."""
    tuned = space.tuned.splits
    turns = -(-space.reduced // schedule.reduced)
    most = turns // tuned.turns if turns >= tuned.worth else 1
    parts = max(min(_even(space, schedule, wanted), most, tuned.most), 2 if side_by_side > 1 else 1)
    split = Split(parts, side_by_side=side_by_side) if parts > 1 else None
    return in_parts(space, replace(schedule, split=split))


def _even(space: Features, schedule: Schedule, wanted: int) -> int:
    """Parts that give about ``wanted`` programs with all lanes in use, and few multiprocessors one more than others.

    The bias gradient of GELU, 4096 x 3000 of bfloat16, took 31.6 us on an H200 in 528 programs, in 270 39.8.
    """
    blocks = schedule.blocks(space.kept)
    programs = wanted * schedule.kept // space.kept * blocks
    over = programs % space.device.multiprocessors
    if over < min(space.device.multiprocessors // 2, programs):
        programs -= over
    return programs // blocks


def in_parts(space: Features, schedule: Schedule) -> Schedule:
    """``schedule``, whose parts are finished in the same launch: by the last program of each block, or by all at once.

    The latter where all are resident, if need be half as many.
    """
    device, schedule = space.device, within_shared(space, schedule)
    split = schedule.split
    if split is None or not may_be_stages(space.segment):
        return schedule
    if is_for_one(schedule, device):
        return schedule.finished_at_once()
    blocks, launch = schedule.blocks(space.kept), schedule.launch
    ahead = (launch.stages - 1) * schedule.kept * schedule.reduced * space.element_bytes
    shared = device.multiprocessors * (device.shared_bytes // max(ahead, 1))
    bounds = [device.bound(n) for n in space.tuned.splits.resident]
    for parts, registers in (*((split.parts, n) for n in bounds), (split.parts // 2, bounds[-1])):
        most = min(registers, launch.registers or registers)
        if parts > 1 and blocks * parts <= min(resident(device, launch.warps, most), shared):
            bound = most if registers != bounds[0] else launch.registers
            return schedule.split_into(parts).finished_at_once().with_registers(bound)
    if split.side_by_side > 1 and schedule.reduced > 1:
        half = schedule.reduced // 2
        wider = schedule.sized(kept=2 * schedule.kept, reduced=half)
        wider = in_parts(space, wider.accumulating(min(wider.accumulated, half)))
        return wider if wider.is_one_launch else schedule
    return schedule


def is_for_one(schedule: Schedule, device: Device) -> bool:
    """Are the parts of a block so few that one program adds them up?"""
    tuned = device.measured.splits
    is_apart = schedule.split is not None and schedule.split.side_by_side > 1
    return not is_apart and power_of_two(schedule.parts) * schedule.kept <= tuned.last


def in_full_turns(space: Features, schedule: Schedule) -> Schedule:
    """``schedule`` with half the threads and half the block, where that leaves fewer lanes of the last turn idle.

    The weight gradients of a group norm of 2 x 1280 x 32 x 32, float16, channels-last, took 11.4 us so, else 13.4.
    """

    def idle(block: int) -> float:
        turns = space.reduced / (schedule.parts * block)
        return 1 - turns / ceil(turns)

    least = max(space.tuned.splits.idle, 2 * idle(max(schedule.reduced // 2, 1)))
    if schedule.launch.warps == 1 or idle(schedule.reduced) < least:
        return schedule
    return in_parts(space, halved(schedule))


def finishing(space: Features) -> Schedule:
    """All partial results of some kept elements in registers."""
    splits = power_of_two(space.reduced)
    if space.is_inner or space.kept == 1:
        return in_registers(space)
    held = splits * max(len(space.streamed), 1)
    lanes = power_of_two_within(max(space.tuned.columns.tile // held, 1))
    lanes = max(lanes, 16)
    return Schedule(Tile(min(lanes, power_of_two(space.kept)), splits))


def fitting(finish: Schedule, first: Schedule, words: int) -> Schedule:
    """``finish`` in a launch of the threads and registers of ``first``: half of them hold a tile, or a loop and sums.

    words: of a partial result.  The sum over dim 0 of 20000 x 301, int8, has 1792 parts: at once, 16 columns of them,
    they spilled 1568 bytes.
    """
    registers = (first.launch.registers or MAX_REGISTERS) // 2
    most = power_of_two_within(first.launch.warps * WARP * registers // words)
    if finish.kept * finish.reduced <= most:
        return finish
    lanes = max(most // finish.reduced, min(finish.kept, SECTOR_BYTES // REGISTER_BYTES // words))
    if finish.reduced <= most // lanes:
        return finish.sized(kept=lanes)
    return replace(finish.sized(kept=lanes, reduced=most // (2 * lanes)).with_stages(1), residency=Loop())


def finish_of(reduction: Expr, partial: BoundTensor, axes: tuple[int, ...]) -> Expr:
    """The reduction over ``axes`` of what the programs have of ``reduction``."""
    assert isinstance(reduction.op, Reduce), f"{reduction.op.name} is no reduction"
    return Expr(Reduce(reduction.op.kind, axes), (partial,), reduction.outputs)


def workspace(expr: Expr, axes: tuple[Axis, ...]) -> BoundTensor:
    """Partial results of the reduction ``expr``, in the type that it accumulates in."""
    domain = BoundDomain(axes, expr.output.domain.mesh, expr.output.domain.sharding)
    return BoundTensor(f"{expr.output.name}_partial", carried(expr), domain)


def split_of(parts: int, reduced: Iterable[Digit]) -> Digit:
    """The digit that tells so many parts of a reduction over ``reduced`` apart; of a batch there may be others."""
    return Digit(Root("split", parts, varies=parts > 1 and varies(reduced)), 1, parts)


def storing(
    space: Features, stored: Sequence[BoundTensor], partials: Mapping[Expr, BoundTensor], split: Digit
) -> Features:
    """``space`` of what leads to ``stored`` and to the reductions, whose partial results are stored too.

    ``split`` is the program's own, and no tile walks it.
    """
    before = leading_to(space.segment.exprs, [*stored, *(e.tensors[0] for e in partials)])
    found = [e for e in before if e not in partials]
    found += [replace(e, outputs=(w,)) for e, w in partials.items()]
    gone = space.walked or space.r
    atoms = {w: space.atoms[e.tensors[0]] - frozenset(gone) | {split} for e, w in partials.items()}
    phase = {w: space.phase[e.tensors[0]] + (not space.walked) for e, w in partials.items()}
    return replace(
        space,
        segment=Segment.of(found, [*stored, *partials.values()]),
        atoms={**space.atoms, **atoms},
        phase={**space.phase, **phase},
        pieces={**{a: (a,) for a in space.x}, **space.pieces, split: (split,)},
    )
