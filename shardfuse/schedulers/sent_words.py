"""How words of a tensor that ranks send one another are cut: what no kernel sends, and the blocks of one that does."""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import BoundTensor
from .limits import WARP
from .schedule import Registers, Schedule, Tile
from .space import Space

MOST_ELEMENTS = 1 << 17
"""256 KB of 16-bit elements: beyond, half of what is sent being flags costs more than a collective's latency."""
_EACH = 8
"""Elements of a row that a thread has at the least: whole words, as many for each."""


def why_not_sent(sent: BoundTensor, space: Space) -> str | None:
    """Why no kernel sends ``sent``; ``None`` where one does."""
    if not space.is_streamed(sent):
        return f"{sent} does not have every element"
    if space.reduced % _EACH:
        return f"rows of {space.reduced} elements are not cut into whole words"
    elements = space.kept * space.reduced
    return f"{elements} elements are more than {MOST_ELEMENTS}" if elements > MOST_ELEMENTS else None


def for_words(schedule: Schedule, space: Space) -> Schedule:
    """``schedule`` with a row for each program, and 8 elements of each block for a thread."""
    warps = min(schedule.launch.warps, max(space.reduced // (_EACH * WARP), 1))
    warps = 1 << (warps.bit_length() - 1)
    order, launch = Tile(1, warps * WARP * _EACH), replace(schedule.launch, warps=warps)
    return replace(schedule, order=order, residency=Registers(eager=True), launch=launch)
