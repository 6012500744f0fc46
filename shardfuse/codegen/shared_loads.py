"""Loads of what elements of a row side by side share, as a weight of each channel: once for all of a thread's load.

    few = load(ptr + (start + 8 * arange(block // 8)) // 1468800)
    weight = reshape(broadcast_to(few[:, None], [block // 8, 8]), [block])

Element by element the compiler divides and loads for each.  Group norm of 1 x 96 x 17 x 240 x 360, bfloat16, by a team
that loops, took 238 us on an H200 so, else 256.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

from ..ir.expr import BoundTensor
from ..schedulers.limits import power_of_two
from .tile import R_SIZE, Chunk, Tile

_WORTH_SHARING = 4
"""Elements side by side that are loaded as one."""


@dataclass(frozen=True)
class Run:
    """A load of one element for every ``each`` of a chunk: the chunk that has those alone, and the text of its mask."""

    few: Chunk
    options: str
    block: int
    each: int

    def spread(self, text: str) -> str:
        """The values of all elements, ``text`` being those that were loaded."""
        return f"tl.reshape(tl.broadcast_to({text}[:, None], [{self.block // self.each}, {self.each}]), [{self.block}])"


def in_runs(tile: Tile, tensor: BoundTensor, chunk: Chunk, named: Callable[[str], str]) -> Run | None:
    """How ``chunk`` of ``tensor`` is loaded; ``None`` where element by element.  ``named``: gives a text a name."""
    each = _side_by_side(tile, tensor, chunk)
    if each < _WORTH_SHARING:
        return None
    block = chunk.block or tile.plan.schedule.reduced
    lanes = named(f"tl.arange(0, {block // each}) * {each}")
    few = replace(chunk, lane=lanes, index=f"({chunk.turn} + {lanes})")
    if not chunk.is_masked:
        return Run(few, "", block, each)
    if chunk.start is None:
        return Run(few, f", mask={few.index} < {R_SIZE}", block, each)
    inside = f"{lanes} + {chunk.start} < {tile.own_share}" if tile.plan.schedule.members else f"{lanes} < {chunk.valid}"
    return Run(few, f", mask={named(inside)}", block, each)


def _side_by_side(tile: Tile, tensor: BoundTensor, chunk: Chunk) -> int:
    """Elements of a row, in one load of a thread, that lie at one place of ``tensor``."""
    schedule, space = tile.plan.schedule, tile.plan.space
    if not tile.is_inner or tile.x_lanes or space.walked or space.sides[0] or schedule.is_aligned_down:
        return 1
    if not schedule.is_held and chunk.index != "r":
        return 1
    runs = [g.below for g in tile.r_groups(tile.strides[tensor])]
    if all(n == power_of_two(n) for n in runs):
        return 1  # the compiler sees that itself
    rows = [t.dtype.itemsize for t in tile.plan.segment.loads if space.is_streamed(t)]
    return gcd(tile.plan.device.access_bytes // max(rows, default=1), *runs)
