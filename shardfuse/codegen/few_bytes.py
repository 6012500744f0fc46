"""Bytes beside wider elements, as a dropout's mask beside gradients: as many a thread as it has of these.

    T5 = load(T5_ptr + tl.max_contiguous(offs + c, [1, 8]))

A load of 16 bytes gives a thread 16 of them, and Triton then lays out every tensor of the kernel so: what is four bytes
wide is fetched 64 bytes apart, and a thread's part of a row is another than without the mask.  The gradients of a
residual, a dropout and a norm of 8192 x 1024 took 61 us on an H200 so, and 70 barriers; it has 37 now.
"""

from __future__ import annotations

from ..device import LEAST_COPY
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from .tile import Chunk, Tile


def in_few(tile: Tile, tensor: BoundTensor, chunk: Chunk, pointer: str) -> str:
    """``pointer``, or the same as one of shorter runs."""
    plan = tile.plan
    space, schedule = plan.space, plan.schedule
    if tensor.dtype is not DataType.Bool or " + " not in pointer or not space.is_streamed(tensor):
        return pointer
    if space.sides[0] or schedule.columns or schedule.is_aligned_down:
        return pointer
    others = [t.dtype.itemsize for t in plan.segment.loads if t.dtype.itemsize > 1 and space.is_streamed(t)]
    if not others:
        return pointer
    width = max(plan.device.access_bytes // min(others), LEAST_COPY)
    strides, along = tile.strides[tensor], bool(space.r) and tile.is_inner
    runs = tile.r_groups(strides) if along else tile.x_groups(strides)
    block = (chunk.block or schedule.reduced) if along else tile.x_block
    if not runs or (runs[-1].below, runs[-1].stride) != (1, 1) or block % width:
        return pointer
    if len(runs) > 1 and runs[-1].extent % width:
        return pointer
    start, offset = pointer.split(" + ", 1)
    shape = f"[1, {width}]" if tile.x_lanes and tile.r_lanes else str(width)
    return f"{start} + tl.max_contiguous({offset}, {shape})"
