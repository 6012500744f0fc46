"""lagged_group: groups of programs that read rows before they wait for the results of those that they have.

The kernel is written by ``codegen/lagged_rows.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..device import Device
from ..ir.expr import BoundTensor
from ..ir.op import Statistic, StatisticKind
from ..segments.space import run_below
from .features import Features, itemsizes
from .limits import WARP, WARPS, power_of_two, vector
from .resources import copies_of_one, resident, resident_copies
from .schedule import Access, Group, Lagged, Launch, Registers, Schedule, Tile
from .schedule_parts import MAX_LAGGED_MEMBERS, MAX_MEMBERS

_INPUTS = 2
"""Inputs of a row that a group reads ahead, at most: of three no two rows stay in registers."""


def lagged_group(space: Features, *, are_few_held: bool = False) -> Schedule | None:
    """A group that reads its next row before it waits for this one; ``None`` where that does not pay.

    ``space``: of the segment with its statistics joined.  ``are_few_held``: may a small group hold each row instead?
    RMSNorm of 4096 x 65536, bfloat16, took 284 us on an H200 so, 323 us where programs wait for the row that they have
    just read; the gradient of batch norm of 64 x 64 x 112 x 112, float16, 110 and 165, batch norm of 32 x 256 x 56 x 56
    34 and 57.
    """
    device, tuned = space.device, space.tuned.lagged
    walked, n = space.streamed, space.reduced
    if space.has_windows or space.is_cut_short:
        return None  # windows, and a place of its own for each element
    vectors = [t for t in space.beside if space.r[-1] in space.atoms[t]]
    if space.phases != 2 or space.grouped or not space.is_inner or any(map(space.has_x, vectors)):
        return None
    if not 1 <= len(walked) <= _INPUTS or any(t.dtype is not walked[0].dtype for t in walked):
        return None
    form = _lagged_form(space, vectors)
    if form is None or (space.block and form.rows > 1):  # sums of blocks are handed on one row late
        return None
    block = form.warps * WARP * form.width
    by_channel = [t for t in space.segment.inputs if space.has_r(t) and t not in (*walked, *vectors)]
    share, run = (form.width, form.width) if form.is_folded else (form.members * block, block)
    if by_channel and (n % share or any(run_below(t, space.r, space) % run for t in by_channel)):
        return None  # not one number for all of a load; of two inputs, for all of a chunk
    programs, stages = resident(device, form.warps, form.registers), 1
    if form.is_copied_ahead:
        copied = itemsizes((*walked, *vectors)) * -(-n // form.members)
        by_shared = resident_copies(device, copied)
        programs = min(programs, by_shared)
        is_deep = form.is_folded and form.registers > device.bound(tuned.resident) and by_shared >= 2 * programs
        stages = 3 if is_deep else 2
    turns = tuned.more_turns if are_few_held or (vectors and form.is_folded) else tuned.turns
    if not 2 <= form.members <= programs or space.kept * form.members < turns * programs:
        return None
    if are_few_held and (vectors or walked[0].dtype.itemsize > 2):
        return None
    if len(walked) == _INPUTS and -(-n // form.members) % (2 * block) == 0:
        block *= 2
    return Schedule(
        Tile(1, block),
        Registers(accumulated=form.width if form.is_folded else 1),
        Group(form.members, programs, Lagged(form.rows)),
        access=Access.ALIGN_DOWN if form.is_aligned else Access.NATIVE,
        launch=Launch(form.warps, stages, form.registers),
    )


@dataclass(frozen=True)
class _LaggedForm:
    """How a lagged group holds a row.

    ``width``: elements of a load.  ``rows``: that it reads before it waits for one.  ``is_folded``: it takes a variance
    in load by load.  ``is_aligned``: it reads from the beginning of the word that the row begins in.
    """

    warps: int
    members: int
    registers: int
    width: int
    rows: int = 1
    is_folded: bool = False
    is_aligned: bool = False
    is_copied_ahead: bool = False


def _lagged_form(space: Features, vectors: Sequence[BoundTensor]) -> _LaggedForm | None:
    """``None`` where no group holds a row.  ``vectors``: beside rows, along all of them."""
    device, tuned, walked = space.device, space.tuned.lagged, space.streamed
    kinds: set[StatisticKind] = {e.op.kind for e in space.segment.exprs if isinstance(e.op, Statistic)}
    dtype, n = walked[0].dtype, space.reduced
    loaded, is_variance, is_softmax = vector(dtype, n, device), "welford" in kinds, "online_softmax" in kinds
    is_narrow, row = dtype.itemsize == 2, n * len(walked) * max(dtype.itemsize, 2)
    is_element_wise = space.is_invariant and space.is_odd(dtype)
    if is_narrow and (is_element_wise or (is_variance and loaded < tuned.fold)):
        size = _sized(row, WARPS, tuned.single_bytes, device.bound(tuned.single_resident))
        return size and _LaggedForm(*size, max(loaded, tuned.single_each))
    is_aligned = is_narrow and not is_variance and space.may_align_down()
    is_aligned = is_aligned and (n * dtype.itemsize > tuned.odd_weighted_bytes if vectors else loaded == 1)
    width = device.access_bytes // dtype.itemsize if is_aligned else max(loaded, 2)
    if is_aligned and not vectors:
        size = _sized(row, tuned.odd_warps, tuned.odd_held_bytes, device.bound(tuned.most_resident))
        return size and _LaggedForm(*size, width, is_aligned=True)
    if is_softmax and is_narrow and len(walked) == 1:
        size = _sized(row, WARPS, tuned.two_ahead_bytes, device.bound(tuned.two_ahead_resident))
        return size and _LaggedForm(*size, width, rows=2, is_aligned=is_aligned)
    is_folded = is_variance and len(walked) == 1 and width >= tuned.fold
    copied = itemsizes((*walked, *vectors))
    held = len(walked) * max(dtype.itemsize, 2)
    size = _lagged_size(row, _few_members(kinds, held, copied, device, is_folded=is_folded), device)
    if size is None or (size[0] > WARPS and not is_folded and len(walked) == 1):
        return None
    is_ahead = not (is_softmax or is_aligned) and len(walked) == 1
    return _LaggedForm(*size, width, is_folded=is_folded, is_aligned=is_aligned, is_copied_ahead=is_ahead)


def _few_members(kinds: set[StatisticKind], held: int, copied: int, device: Device, *, is_folded: bool) -> int:
    """Up to how many members a thread has few registers.  ``held``, ``copied``: bytes for each element of a row."""
    tuned = device.measured.lagged
    if "online_softmax" in kinds:
        return 2 * tuned.members
    shared = (
        WARPS * WARP * 2 * tuned.bytes // held * copied * resident(device, WARPS, device.bound(tuned.most_resident))
    )
    fits = shared <= copies_of_one(device) * device.multiprocessors
    return tuned.folded_members if is_folded and fits else tuned.members


def _lagged_size(row: int, few: int, device: Device) -> tuple[int, int, int] | None:
    """Warps of a program, members of a group, and registers of a thread, for a row of so many bytes.

    ``None`` where it is too long.  ``few``: how many members have few registers.
    """
    tuned = device.measured.lagged
    lanes = WARPS * WARP
    members = power_of_two(-(-row // (lanes * tuned.bytes)))
    if members <= few:
        return WARPS, members, device.bound(tuned.resident)
    if members <= 2 * MAX_MEMBERS:
        return WARPS, members // 2, device.bound(tuned.most_resident)
    members = power_of_two(-(-row // (2 * lanes * tuned.most_bytes)))
    return (2 * WARPS, members, device.bound(tuned.most_resident)) if members <= MAX_LAGGED_MEMBERS else None


def _sized(row: int, warps: int, held: int, registers: int) -> tuple[int, int, int] | None:
    """``_lagged_size`` of threads that hold at most so many bytes of a row: no more members than that takes."""
    members = max(-(-row // (warps * WARP * held)), 2)
    return (warps, members, registers) if members <= MAX_MEMBERS else None
