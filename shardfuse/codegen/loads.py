"""How tensors are loaded: what a load tells the caches, and what it brings a thread.

    T5 = load(T5_ptr + tl.max_contiguous(offs + c, [1, 8]))             bytes beside wider elements, in runs of 8

    few = load(ptr + (start + 8 * arange(block // 8)) // 1468800)       what elements side by side share, as a weight
    weight = reshape(broadcast_to(few[:, None], [block // 8, 8]), [block])      of each channel: once for all

Element by element the compiler divides and loads for each.  Group norm of 1 x 96 x 17 x 240 x 360, bfloat16, by a group
that loops, took 238 us on an H200 so, else 256.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from ..device import LEAST_COPY
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..schedulers.limits import power_of_two
from ..schedulers.plan import KernelPlan
from .tile import R_SIZE, Chunk, Tile

EVICT_LAST = ', eviction_policy="evict_last"'
EVICT_FIRST = ', eviction_policy="evict_first"'
"""What is read once gives way to what others wrote, which then is not written back meanwhile.  The sum over rows of
8192 x 4096, float32, took 37.2 us on an H200 so, 42.0 with the rows kept; of 16384 x 8192, bfloat16, 69.3 and 71.1."""
L2_ONLY = ', cache_modifier=".cg"'


def hint(plan: KernelPlan, tensor: BoundTensor, *, is_later: bool) -> str:
    """Options of a load of ``tensor``.

    ``is_later``: by a later stage of a launch, which reads past this multiprocessor's cache what others stored.
    """
    found = _kept_in_cache(plan, tensor)
    return L2_ONLY if found and is_later else found


def _kept_in_cache(plan: KernelPlan, tensor: BoundTensor) -> str:
    space = plan.space
    if not space.r or space.walked:
        return ""
    walked, vectors = space.streamed, space.beside
    if _reads_once(plan):
        return EVICT_FIRST if tensor in walked else ""
    schedule = plan.schedule
    is_row = space.is_inner and schedule.is_held and schedule.kept == 1 and not schedule.members
    if (is_row or plan.is_pair) and len(vectors) > plan.device.measured.pairs.many * len(walked):
        return L2_ONLY if tensor in walked else EVICT_LAST if tensor in vectors else ""
    return EVICT_LAST if tensor in walked else ""


def _reads_once(plan: KernelPlan) -> bool:
    """Is nothing read again, by this kernel, or stored for each element?

    Running statistics want what they walk kept: of 2048 x 131072, bfloat16, they took 134 us so, else 138.  So do
    copies ahead of time: the sum over dim 0 of 1048576 x 128 took 73.7 us so, else 75.3.
    """
    space, schedule = plan.space, plan.schedule
    if schedule.members or any(map(space.has_r, plan.segment.outputs)):
        return False
    is_again = space.rereads or any(len(e.outputs) > 1 for e in plan.segment.exprs)
    return schedule.is_held or (schedule.launch.stages == 1 and not is_again)


def in_few(tile: Tile, tensor: BoundTensor, chunk: Chunk, terms: list[str]) -> list[str]:
    """``terms`` of an offset, or one of shorter runs: bytes beside wider elements come as many a thread as these do.

    A load of 16 bytes gives a thread 16 of them, as a dropout's mask has beside gradients, and Triton then lays out
    every tensor of the kernel so: what is four bytes wide is fetched 64 bytes apart, and a thread's part of a row is
    another than without the mask.  The gradients of a residual, a dropout and a norm of 8192 x 1024 took 61 us on an
    H200 so, and 70 barriers; it has 37 now.
    """
    plan = tile.plan
    space, schedule = plan.space, plan.schedule
    if tensor.dtype is not DataType.Bool or not terms or schedule.columns or schedule.is_aligned_down:
        return terms
    others = [t.dtype.itemsize for t in space.streamed if t.dtype.itemsize > 1]
    if not others:
        return terms
    width = max(plan.device.access_bytes // min(others), LEAST_COPY)
    runs, block = tile.lane_runs(tensor), chunk.block if tile.is_along_r else tile.x_block
    if not runs or block % width:
        return terms
    if len(runs) > 1 and runs[-1].extent % width:
        return terms
    shape = f"[1, {width}]" if tile.x_lanes and tile.r_lanes else str(width)
    return [f"tl.max_contiguous({' + '.join(terms)}, {shape})"]


_WORTH_SHARING = 4
"""Elements side by side that are loaded as one."""


@dataclass(frozen=True)
class SharedLoad:
    """A load of one element for every ``each`` of a chunk: the chunk that has those alone, and the text of its mask."""

    few: Chunk
    options: str
    block: int
    each: int

    def spread(self, text: str) -> str:
        """The values of all elements, ``text`` being those that were loaded."""
        return f"tl.reshape(tl.broadcast_to({text}[:, None], [{self.block // self.each}, {self.each}]), [{self.block}])"


def shared_load(tile: Tile, tensor: BoundTensor, chunk: Chunk, named: Callable[[str], str]) -> SharedLoad | None:
    """How ``chunk`` of ``tensor`` is loaded; ``None`` where element by element.  ``named``: gives a text a name."""
    each = _side_by_side(tile, tensor, chunk)
    if each < _WORTH_SHARING:
        return None
    block = chunk.block
    lanes = named(f"tl.arange(0, {block // each}) * {each}")
    few = chunk.few(lanes)
    if not chunk.is_masked:
        return SharedLoad(few, "", block, each)
    if chunk.start is None:
        return SharedLoad(few, f", mask={few.index} < {R_SIZE}", block, each)
    inside = f"{lanes} + {chunk.start} < {tile.own_share}" if tile.plan.schedule.members else f"{lanes} < {chunk.valid}"
    return SharedLoad(few, f", mask={named(inside)}", block, each)


def _side_by_side(tile: Tile, tensor: BoundTensor, chunk: Chunk) -> int:
    """Elements of a row, in one load of a thread, that lie at one place of ``tensor``."""
    schedule, space = tile.plan.schedule, tile.plan.space
    if not tile.space.is_inner or tile.x_lanes or space.walked or space.sides[0] or schedule.is_aligned_down:
        return 1
    if tile.is_apart:
        return 1
    if not schedule.is_held and chunk.index != "r":
        return 1
    runs = [g.below for g in tile.r_runs(tile.strides[tensor])]
    if all(n == power_of_two(n) for n in runs):
        return 1  # the compiler sees that itself
    widest = max((t.dtype.itemsize for t in space.streamed), default=1)
    return gcd(tile.plan.device.access_bytes // widest, *runs)
