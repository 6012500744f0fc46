"""late_team: teams that read rows before they ask for the results of those that they have (``codegen/late.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..device import Device
from ..ir.expr import BoundTensor
from .limits import MAX_TEAM, SHARED, WARP, is_odd, power_of_two, resident, vector
from .schedule import Access, Group, Lagged, Launch, Registers, Schedule, Tile
from .schedule_parts import MAX_LAGGED_MEMBERS
from .segment import Segment
from .space import Space, beside, may_align_down, run_below, streamed

_MOST_REGISTERS = 128
_WARPS = 4
_BYTES = 64
"""Bytes of a row that a thread of a late team holds, and as many of the next row; twice as many in larger teams."""
_REGISTERS = 80
_TWO_AHEAD_BYTES = 128
_TWO_AHEAD_REGISTERS = 168
"""Of a thread that holds so much of each of three rows: loads are under way while it takes exponentials and waits.
Softmax of 2048 x 131072, 1024 x 262144, bfloat16, took 279 and 273 us so, with two rows of half as much 302 and 316;
RMSNorm, which the compiler copies ahead of time, 322 where that takes 286."""
_ODD_WARPS = 8
_ODD_HELD_BYTES = 128
"""Of rows that begin within a word, with no vector beside them: the masks of their ends are fewer threads' work.
Softmax's gradient of 4096 x 50257, 2048 x 128257, bfloat16, took 353 and 415 us so, with 4 warps 405 and 439; softmax
of 2048 x 128257 324, two rows ahead 339; RMSNorm, with a vector, 387, with 4 warps 373.  Pairs of elements are loads
enough: softmax of 2048 x 128258 took 300 us so, in whole words 313; RMSNorm 380 and 305."""
_ODD_WEIGHTED_BYTES = 128 * 1024
"""Of rows with vectors beside them: RMSNorm of 2048 x 128257 took 371 us so, element by element 401; 300 x 50257 36.7
and 32.8."""
_SINGLE_BYTES = 64
_SINGLE_REGISTERS = 96
_SINGLE_EACH = 4
"""Of rows of a variance that come in a few bytes, which nothing is gained from copying ahead: vectors beside them are
read so many elements at a time.  LayerNorm of 4096 x 50257, 50258 and 50260, with 4 vectors, bfloat16, took 492, 416
and 375 us so, copied ahead 779, 760 and 658."""
_MEMBERS = 16
_INPUTS = 2
_FOLDED_MEMBERS = 2
"""Of teams that take a variance in load by load, where shared memory does: LayerNorm of 4096 x 65536, bfloat16, took
295 us with 8 members, 306 with 16; RMSNorm 289 and 283."""
_MOST = 160
"""Bytes of a row that a thread holds in the largest teams: with as many of the next row, 80 registers of 128."""
_FOLD = 8
"""Elements of a load from which a variance is taken in load by load, so that no row is unpacked at once."""
_TURNS = 1.5
"""Rows that a late team takes one after the other, at the least.  RMSNorm of 128 x 65536, 64 x 131072 and 16 x 1048576,
bfloat16, took 13.3, 13.5 and 24.5 us on an H200 so, where programs wait for the row that they have just read 18.0, 17.7
and 35.3; the gradient of softmax of the first two 18.1 and 17.4, else 23.9 and 23.8."""
_MORE_TURNS = 4
"""Of a variance with vectors beside its rows, and where a small team holds each of few rows."""


def is_cut_short(walked: Sequence[BoundTensor], space: Space, device: Device) -> bool:
    """Do rows lie in pieces that loads of 128 bits do not divide?"""
    widths = (vector(t.dtype, space.run, device) * t.dtype.itemsize for t in walked)
    return space.run != space.reduced and min(widths, default=0) < device.access_bytes


def late_team(segment: Segment, space: Space, device: Device, *, are_few_held: bool = False) -> Schedule | None:
    """A team that reads its next row before it waits for this one; ``None`` where that does not pay.

    ``space``: of the segment with its statistics joined.  ``are_few_held``: may a small team hold each row instead?
    RMSNorm of 4096 x 65536, bfloat16, took 284 us on an H200 so, 323 us where programs wait for the row that they have
    just read; the gradient of batch norm of 64 x 64 x 112 x 112, float16, 110 and 165, batch norm of 32 x 256 x 56 x 56
    34 and 57.
    """
    walked, n = streamed(segment, space), space.reduced
    if segment.loads != segment.inputs or is_cut_short(walked, space, device):
        return None  # windows, and a place of its own for each element
    vectors = [t for t in beside(segment, space) if space.r[-1] in space.atoms[t]]
    if space.phases != 2 or space.grouped or not space.is_inner or any(map(space.has_x, vectors)):
        return None
    if not 1 <= len(walked) <= _INPUTS or any(t.dtype is not walked[0].dtype for t in walked):
        return None
    form = _late_form({e.op for e in segment.exprs}, walked, vectors, space, device)
    if form is None:
        return None
    block = form.warps * WARP * form.width
    by_channel = [t for t in segment.inputs if space.has_r(t) and t not in (*walked, *vectors)]
    share, run = (form.width, form.width) if form.is_folded else (form.members * block, block)
    if by_channel and (n % share or any(run_below(t, space.r, space) % run for t in by_channel)):
        return None  # not one number for all of a load; of two inputs, for all of a chunk
    programs, stages = resident(device, form.warps, form.registers), 1
    if form.is_copied_ahead:
        copied = sum(t.dtype.itemsize for t in (*walked, *vectors)) * -(-n // form.members)
        by_shared = int(SHARED * device.shared_bytes) // copied * device.multiprocessors
        programs = min(programs, by_shared)
        is_deep = form.is_folded and form.registers > _REGISTERS and by_shared >= 2 * programs
        stages = 3 if is_deep else 2
    turns = _MORE_TURNS if are_few_held or (vectors and form.is_folded) else _TURNS
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
class _LateForm:
    """How a late team holds a row.

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


def _late_form(
    kinds: set[str], walked: Sequence[BoundTensor], vectors: Sequence[BoundTensor], space: Space, device: Device
) -> _LateForm | None:
    """``None`` where no team holds a row.  ``vectors``: beside rows.  ``kinds``: the ops of its kernel."""
    dtype, n = walked[0].dtype, space.reduced
    loaded, is_variance, is_softmax = vector(dtype, n, device), "welford" in kinds, "online_softmax" in kinds
    is_narrow, row = dtype.itemsize == 2, n * len(walked) * max(dtype.itemsize, 2)
    is_element_wise = space.is_invariant and is_odd(dtype, n, device)
    if is_narrow and (is_element_wise or (is_variance and loaded < _FOLD)):
        size = _sized(row, _WARPS, _SINGLE_BYTES, _SINGLE_REGISTERS)
        return size and _LateForm(*size, max(loaded, _SINGLE_EACH))
    is_aligned = is_narrow and not is_variance and may_align_down(dtype, space, device)
    is_aligned = is_aligned and (n * dtype.itemsize > _ODD_WEIGHTED_BYTES if vectors else loaded == 1)
    width = device.access_bytes // dtype.itemsize if is_aligned else max(loaded, 2)
    if is_aligned and not vectors:
        size = _sized(row, _ODD_WARPS, _ODD_HELD_BYTES, _MOST_REGISTERS)
        return size and _LateForm(*size, width, is_aligned=True)
    if is_softmax and is_narrow and len(walked) == 1:
        size = _sized(row, _WARPS, _TWO_AHEAD_BYTES, _TWO_AHEAD_REGISTERS)
        return size and _LateForm(*size, width, rows=2, is_aligned=is_aligned)
    is_folded = is_variance and len(walked) == 1 and width >= _FOLD
    copied = sum(t.dtype.itemsize for t in (*walked, *vectors))
    held = len(walked) * max(dtype.itemsize, 2)
    size = _late_size(row, _few_members(kinds, held, copied, device, is_folded=is_folded))
    if size is None or (size[0] > _WARPS and not is_folded and len(walked) == 1):
        return None
    is_ahead = not (is_softmax or is_aligned) and len(walked) == 1
    return _LateForm(*size, width, is_folded=is_folded, is_aligned=is_aligned, is_copied_ahead=is_ahead)


def _few_members(kinds: set[str], held: int, copied: int, device: Device, *, is_folded: bool) -> int:
    """Up to how many members a thread has few registers.  ``held``, ``copied``: bytes for each element of a row."""
    if "online_softmax" in kinds:
        return 2 * _MEMBERS
    shared = _WARPS * WARP * 2 * _BYTES // held * copied * resident(device, _WARPS, _MOST_REGISTERS)
    fits = shared <= int(SHARED * device.shared_bytes) * device.multiprocessors
    return _FOLDED_MEMBERS if is_folded and fits else _MEMBERS


def _late_size(row: int, few: int) -> tuple[int, int, int] | None:
    """Warps of a program, members of a team, and registers of a thread, for a row of so many bytes.

    ``None`` where it is too long.  ``few``: how many members have few registers.
    """
    lanes = _WARPS * WARP
    members = power_of_two(-(-row // (lanes * _BYTES)))
    if members <= few:
        return _WARPS, members, _REGISTERS
    if members <= 2 * MAX_TEAM:
        return _WARPS, members // 2, _MOST_REGISTERS
    members = power_of_two(-(-row // (2 * lanes * _MOST)))
    return (2 * _WARPS, members, _MOST_REGISTERS) if members <= MAX_LAGGED_MEMBERS else None


def _sized(row: int, warps: int, held: int, registers: int) -> tuple[int, int, int] | None:
    """``_late_size`` of threads that hold at most so many bytes of a row: no more members than that takes."""
    members = max(-(-row // (warps * WARP * held)), 2)
    return (warps, members, registers) if members <= MAX_TEAM else None
