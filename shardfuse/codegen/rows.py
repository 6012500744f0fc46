"""A pointwise walk whose programs stay within one row ``b``, at ``x`` along it: what a row has one of is loaded once.

    b = program // blocks; x = program % blocks * block + lanes
    T2 = load(T2_ptr + b)
    T0 = load(T0_ptr + b * columns + x, x < columns)

In a flat walk each element finds out which row it is of, and fetches that value for itself.
"""

from __future__ import annotations

from math import prod

from ..ir.layout import local_extent
from ..schedulers.limits import power_of_two
from .emitter import Emitter
from .indexing import dynamic_terms, groups
from .tile import Chunk, Strides


class Rows(Emitter):
    """An emitter whose offsets are those of a row and of places along it."""

    @property
    def along(self) -> int:
        """Elements of a row."""
        return prod(local_extent(a, self.tile.coordinates) for a in self.space.sides[1])

    @property
    def block(self) -> int:
        return min(self.schedule.kept, power_of_two(self.along))

    @property
    def tiles(self) -> int:
        """Programs of all rows."""
        return self.tile.x_total // self.along * -(-self.along // self.block)

    def terms(self, strides: Strides, chunk: Chunk) -> tuple[list[str], bool, bool]:
        along = self.space.sides[1]
        outer = tuple(a for a in self.space.x if a not in along)
        row, x = (
            dynamic_terms(
                name,
                groups([local_extent(a, self.tile.coordinates) for a in atoms], [strides.get(a, 0) for a in atoms]),
            )
            for name, atoms in (("b", outer), ("x", along))
        )
        if len(row) > 1 or (row and " " in row[0]):
            row = [self.offset(" + ".join(row))]
        return [*row, *x], bool(x), False

    def masks(self, in_x: bool, in_r: bool, chunk: Chunk) -> list[str]:
        return ["x_mask"] if in_x and self.along % self.block and not self.is_before_ends else []


def rows_index(e: Rows) -> list[str]:
    """The lines that make ``b`` and ``x``.  The length of a row is literal: each program divides by it."""
    along, block = e.along, e.block
    blocks, program = -(-along // block), "tl.program_id(0)"
    lines: list[str] = []
    if e.tile.x_total > along:
        row = f"{program} // {blocks}" if blocks > 1 else program
        lines.append(f"b = ({row}).to(tl.int64)" if e.tile.x_wide else f"b = {row}")
        program = f"{program} % {blocks}" if blocks > 1 else "0"
    lines.append(f"x = {program} * {block} + tl.arange(0, {block})" if blocks > 1 else f"x = tl.arange(0, {block})")
    if along % block:
        lines.append(f"x_mask = x < {along}")
    return ["    " + line for line in lines]
