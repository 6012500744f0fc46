"""Blocks of a row in a tile that holds it: one number for each block, of reductions, loads and stores.

    T14 = tl.reduce(tl.reshape(T13, [16, 128]), 1, maximum)                     one for each block of the tile
    T17_spread = tl.reshape(tl.broadcast_to(T17[:, None], [16, 128]), [2048])   one for each element again

The elements of a block are neighbours, so that both are in the registers that they were in: what is left is a
reduction across a few threads of a warp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.expr import BoundTensor
from ..segments.space import Space
from .tile import Chunk, Tile


def blocks_of(tile: Tile, chunk: Chunk) -> list[int]:
    """The shape of ``chunk``'s tile with its blocks along an axis of their own."""
    size = tile.space.block_size
    rows = [tile.x_block] if tile.x_lanes else []
    return [*rows, chunk.block // size, size]


def in_blocks(tile: Tile, chunk: Chunk, text: str) -> str:
    """``text``, which has all lanes, with its blocks along an axis of their own."""
    return f"tl.reshape({text}, {blocks_of(tile, chunk)})"


def spread(tile: Tile, chunk: Chunk, text: str) -> str:
    """``text``, one for each block, as one for each element."""
    head = "[:, :, None]" if tile.x_lanes else "[:, None]"
    return f"tl.reshape(tl.broadcast_to({text}{head}, {blocks_of(tile, chunk)}), {tile.shape_of(chunk)})"


def first_of_blocks(tile: Tile, chunk: Chunk, named: Callable[[str], str]) -> Chunk:
    """The lanes of ``chunk`` that are the first of their blocks.  ``named``: gives a text a name.

    What is read there is one number for each block, and has a name of its own.
    """
    *_, count, size = blocks_of(tile, chunk)
    lane = named(f"{tile.part_start}{tile.lanes(count, reduced=True)} * {size}")
    inside = f"{lane} + {chunk.start} < {tile.own_share}" if tile.schedule.members else f"{lane} < {chunk.valid}"
    mask = named(inside) if chunk.is_masked else chunk.mask
    return replace(chunk, suffix=f"{chunk.suffix}_b", lane=lane, mask=mask, of_blocks=True)


def sums_made_first(space: Space) -> list[BoundTensor]:
    """Outputs of blocks that wait for no reduction of the row, which are stored before it: what they are made of is not
    held.  Of a row that is not reduced they are what is stored last."""
    outputs = space.segment.outputs if space.phases > 1 else ()
    return [t for t in outputs if t in space.of_blocks and not space.phase[t]]
