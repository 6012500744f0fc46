"""Tiles with sides that are each contiguous in some tensor: offsets of a program's place ``b``, of ``y`` and of ``x``.

*Two sides*, ``y`` across the tile and ``x`` along it, are for tensors whose fastest axes differ.  *One side* is a
pointwise walk whose programs stay within one row ``b``, at ``x`` along it: what a row has one of is loaded once, where
in a flat walk each element finds out which row it is of, and fetches that value for itself::

    b = program // blocks; x = program % blocks * block + lanes
    T2 = load(T2_ptr + b)
    T0 = load(T0_ptr + b * columns + x, x < columns)
"""

from __future__ import annotations

from math import prod

from ..ir.digits import Axis
from ..ir.layout import local_extent
from ..schedulers.limits import power_of_two
from .emitter import Emitter
from .indexing import Strides, dynamic_terms, integer, promise, runs
from .statements import Statement
from .tile import Chunk

ALONG = "i0"
"""Argument: elements along the tile."""
ACROSS = "i1"
"""Argument: elements across the tile."""


class Sided(Emitter):
    """An emitter whose tiles have a side ``x``, and where there is an other a side ``y`` where others have ``r``."""

    def extents(self, atoms: Axis) -> list[int]:
        return [local_extent(a, self.tile.coordinates) for a in atoms]

    @property
    def along(self) -> int:
        return prod(self.extents(self.space.sides[1]))

    @property
    def across(self) -> int:
        return prod(self.extents(self.space.sides[0]))

    @property
    def x_block(self) -> int:
        return min(self.schedule.kept, power_of_two(self.along))

    @property
    def y_block(self) -> int:
        return min(self.schedule.reduced, power_of_two(self.across))

    @property
    def tiles(self) -> int:
        """Of all places."""
        here = -(-self.along // self.x_block) * -(-self.across // self.y_block)
        return self.tile.x_total // (self.along * self.across) * here

    def terms(self, strides: Strides, chunk: Chunk) -> tuple[list[str], bool, bool]:
        across, along = self.space.sides
        place, y, x = (
            dynamic_terms(name, runs(self.extents(atoms), [strides.get(a, 0) for a in atoms]))
            for name, atoms in (("b", self.space.around), ("y", across), ("x", along))
        )
        if place:
            place = [self.offset(" + ".join(place))] if len(place) > 1 or " " in place[0] else place
        return [*place, *y, *x], bool(x), bool(y)

    def masks(self, in_x: bool, in_r: bool, chunk: Chunk) -> list[str]:
        return [
            name
            for name, there, total, block in (
                ("x_mask", in_x and not self.is_before_ends, self.along, self.x_block),
                ("y_mask", in_r, self.across, self.y_block),
            )
            if there and total % block
        ]


def turned_index(e: Sided) -> tuple[dict[str, tuple[int, str]], list[Statement]]:
    """Extent arguments with their values and types, and the lines that make ``b``, ``y`` and ``x``."""
    integers: dict[str, tuple[int, str]] = {}
    lines: list[Statement] = []
    for name, value, block in ((ALONG, e.along, e.x_block), (ACROSS, e.across, e.y_block)):
        integers[name] = integer(value)
        lines += promise(name, value) if value % block else []
    wide = ".to(tl.int64)" if e.tile.x_wide else ""
    lines.append(f"program = {e.program}{wide}")
    columns, rows = f"tl.cdiv({ALONG}, {e.x_block})", f"tl.cdiv({ACROSS}, {e.y_block})"
    lines.append(f"x = program % {columns} * {e.x_block} + tl.arange(0, {e.x_block})[None, :]")
    row = f"program // {columns}"
    if e.tile.x_total > e.along * e.across:
        lines.append(f"b = {row} // {rows}")
        row = f"{row} % {rows}"
    lines.append(f"y = {row} * {e.y_block} + tl.arange(0, {e.y_block})[:, None]")
    if e.along % e.x_block:
        lines.append(f"x_mask = x < {ALONG}")
    if e.across % e.y_block:
        lines.append(f"y_mask = y < {ACROSS}")
    return integers, lines


def rows_index(e: Sided) -> list[Statement]:
    """The lines that make ``b`` and ``x``.  The length of a row is literal: each program divides by it."""
    along, block = e.along, e.x_block
    blocks, program = -(-along // block), e.program
    lines: list[Statement] = []
    if e.tile.x_total > along:
        row = f"{program} // {blocks}" if blocks > 1 else program
        lines.append(f"b = ({row}).to(tl.int64)" if e.tile.x_wide else f"b = {row}")
        program = f"{program} % {blocks}" if blocks > 1 else "0"
    lines.append(f"x = {program} * {block} + tl.arange(0, {block})" if blocks > 1 else f"x = tl.arange(0, {block})")
    if along % block:
        lines.append(f"x_mask = x < {along}")
    return lines
