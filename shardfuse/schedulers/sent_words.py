"""How a tensor that ranks send one another is cut: what no kernel sends, and the blocks of one that does."""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.op import Cast, Factory, OfRank, Pick, Reduce, Statistic
from ..mesh import ParallelType
from ..segments.segment import Segment, leading_to
from ..segments.space import Space
from .exchange_room import WARPS_OF_ROWS
from .features import Features, carried
from .limits import WARP, power_of_two, power_of_two_within
from .schedule import Registers, Schedule, Tile

MOST_ELEMENTS = 1 << 16
"""Of 16 bits: beyond 128 KB, that half of what is sent is flags costs as much as a fence and a flag for each row, and
more memory.  Rows of 8192 in a CUDA graph on 2 x H200, in words / row by row: one 4.3 / 5.7 us, 8 rows 5.2 / 5.6, 16
rows 6.1 / 6.2, 32 rows 8.6 / 7.8, 64 rows 10.4 / 8.5."""
_EACH = 8
"""Elements of 16 bits that a thread has of each block at the least: the 16 bytes of its widest access."""
_OF_ROWS = 32
"""Values of a row that a thread holds where rows are sent.  With half as many, 16 rows of 8192 took 6.8 us instead of
5.7 in a CUDA graph on 2 x H200, and 2048 rows 122 instead of 113."""
_BY_ONE = (Factory, Statistic, Pick)
"""Ops whose programs have whole rows."""
MOST_MEMBERS = 4
"""Programs of a row, each of which waits for a word of every other.  In a CUDA graph on 2 x H200 one row of 8192 took
5.2 us with one program, 4.3 with 4, 4.5 with 8; 8 rows 5.2, 5.2 and 5.5."""
_LEAST_WARPS = 4
"""Warps of a program of which several share a row: of one, the latency of its few loads is all that it has."""


def why_not_sent(sent: BoundTensor, space: Space) -> str | None:
    """Why no kernel sends ``sent``; ``None`` where one does."""
    if not space.is_streamed(sent):
        return f"{sent} does not have every element"
    if space.reduced % _EACH:
        return f"rows of {space.reduced} elements are not cut into whole words"
    return None


def passed_on(sent: BoundTensor, space: Features, over: ParallelType, ranks: int) -> BoundTensor | None:
    """The sum of which each rank adds up some rows and passes them on, where that takes less time than if each were
    given all summands; else ``None``.

    It is one that is rounded to the type of ``sent``, in which it is passed on, and that all ranks have alike.
    """
    send = space.kept * space.reduced * sent.dtype.itemsize
    spared = send * (ranks - 1) * (ranks - 2) / ranks
    is_slower = spared / space.device.rates.link <= space.tuned.collectives.another_turn
    if ranks == 2 or space.kept < ranks or space.adds_in_pairs or is_slower:
        return None
    total = _sum_of_ranks(space.segment, ranks)
    if total is None or total.dtype is not sent.dtype or not space.is_streamed(total) or space.phase[total]:
        return None
    made_of = [t for e in leading_to(space.segment.exprs, [total]) for t in (*e.tensors, *e.outputs) if t is not sent]
    return None if any(t.domain.digits_on(over) for t in made_of) else total


def _sum_of_ranks(segment: Segment, ranks: int) -> BoundTensor | None:
    """What is made of the summands of all ranks, and all that is read of them; rounded, where it is rounded at once."""
    of: dict[BoundTensor, set[int]] = {}
    total: BoundTensor | None = None
    for e in segment.exprs:
        read = [t for t in e.tensors if t in of]
        if isinstance(e.op, OfRank):
            of[e.output] = {e.op.rank}
        elif total is None and read:
            found = set[int]().union(*(of[t] for t in read))
            of |= dict.fromkeys(e.outputs, found)
            total = e.output if len(found) == ranks else None
        elif any(t is not total for t in read):
            return None
    if total is None or any(t in of and t is not total for t in segment.outputs):
        return None
    (*others, last) = segment.readers(total) or [None]
    is_rounded = last is not None and isinstance(last.op, Cast) and last.output.dtype.itemsize == 2
    return last.output if last and is_rounded and not others and total not in segment.outputs else total


def is_in_rows(space: Space) -> bool:
    """Is so much sent that words which are their own flags would take longer?"""
    return space.kept * space.reduced > MOST_ELEMENTS


def members_of(space: Space, free: int, *, in_rows: bool) -> int:
    """How many programs share a row that is sent in words, where ``free`` multiprocessors have one each.

    The words of a row leave and come by all of their multiprocessors at once.
    """
    segment = space.segment
    if in_rows or segment.windows or space.adds_in_pairs or any(isinstance(e.op, _BY_ONE) for e in segment.exprs):
        return 1
    if any(carried(e) is not DataType.Float for e in segment.exprs if isinstance(e.op, Reduce)):
        return 1  # a word holds a float32
    members = min(MOST_MEMBERS, power_of_two_within(max(free // space.kept, 1)))
    least = max(_LEAST_WARPS * WARP * _EACH, space.block_size)  # both are powers of two
    while members > 1 and space.reduced % (members * least):
        members //= 2
    return members


def for_words(schedule: Schedule, space: Features, members: int, *, in_rows: bool) -> Schedule:
    """``schedule`` with a row, or a member's part of one, for each program, and 8 elements of each block for a thread.

    Few rows are bounded by latency, and load all before they wait; many by registers, and load weights at their end.
    """
    each = max(_OF_ROWS // max(space.held_at_most, 1), 1) if in_rows else _EACH
    warps = power_of_two_within(min(schedule.launch.warps, max(space.reduced // members // (each * WARP), 1)))
    while members > 1 and space.reduced // members % (warps * WARP * _EACH):
        warps //= 2  # elements of a block beyond a member's part are the next one's
    return _in_warps(warps, schedule, is_eager=not in_rows)


def for_passing(schedule: Schedule, space: Features, ranks: int) -> Schedule:
    """``schedule`` for rows whose sums are passed on: registers hold summands and sums beside what is made of them."""
    each = max(_OF_ROWS // max(space.held_at_most, 1) // (1 if ranks <= space.tuned.collectives.summands else 2), 1)
    return _in_warps(min(power_of_two(-(-space.reduced // (each * WARP))), WARPS_OF_ROWS), schedule, is_eager=False)


def _in_warps(warps: int, schedule: Schedule, *, is_eager: bool) -> Schedule:
    order, launch = Tile(1, warps * WARP * _EACH), replace(schedule.launch, warps=warps)
    return replace(schedule, order=order, residency=Registers(eager=is_eager), launch=launch)
