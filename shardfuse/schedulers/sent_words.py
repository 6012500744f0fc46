"""How a tensor that ranks send one another is cut: what no kernel sends, and the blocks and slots of one that does."""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import BoundTensor
from .limits import WARP
from .plan import KernelPlan, RankExchange
from .schedule import Registers, Schedule, Tile
from .space import Space

MOST_ELEMENTS = 1 << 17
"""256 KB of 16-bit elements: beyond, half of what is sent being flags costs more than a flag for each row."""
_EACH = 8
"""Elements of 16 bits that a thread has of each block at the least: the 16 bytes of its widest access."""
FLAG_WORDS = 4
"""64-bit words from one flag of a row to the next: 32 bytes, the sector that a poll reads from L2."""


def why_not_sent(sent: BoundTensor, space: Space) -> str | None:
    """Why no kernel sends ``sent``; ``None`` where one does."""
    if not space.is_streamed(sent):
        return f"{sent} does not have every element"
    if space.reduced % _EACH:
        return f"rows of {space.reduced} elements are not cut into whole words"
    return None


def is_in_rows(space: Space) -> bool:
    """Is so much sent that words which are their own flags would take longer?"""
    return space.kept * space.reduced > MOST_ELEMENTS


def for_words(schedule: Schedule, space: Space) -> Schedule:
    """``schedule`` with a row for each program, and 8 elements of each block for a thread.

    Few rows are bounded by latency, and load all before they wait; many by registers, and load weights at their end.
    """
    warps = min(schedule.launch.warps, max(space.reduced // (_EACH * WARP), 1))
    warps = 1 << (warps.bit_length() - 1)
    order, launch = Tile(1, warps * WARP * _EACH), replace(schedule.launch, warps=warps)
    return replace(schedule, order=order, residency=Registers(eager=not is_in_rows(space)), launch=launch)


def row_elements(plan: KernelPlan) -> int:
    """Elements of a row of what is sent, in whole blocks."""
    return -(-plan.space.reduced // plan.schedule.reduced) * plan.schedule.reduced


def flags_of_rows(exchange: RankExchange) -> int:
    """64-bit words of the flags of rows: in two sets, for each program and peer."""
    return 2 * exchange.programs * (exchange.ranks - 1) * FLAG_WORDS


def words_of_rows(plan: KernelPlan) -> int:
    """64-bit words of each rank's slots for rows, with their flags."""
    exchange = plan.exchange
    assert exchange is not None, "a kernel whose ranks exchange"
    return flags_of_rows(exchange) + 2 * exchange.programs * (exchange.ranks - 1) * row_elements(plan) // 4
