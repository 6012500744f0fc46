"""Tiles with two sides: offsets of a program's place ``b``, and of ``y`` across and ``x`` along the tile."""

from __future__ import annotations

from math import gcd, prod

from ..ir.digits import Axis
from ..ir.layout import local_extent
from ..schedulers.limits import INT32_LIMIT, power_of_two
from .emitter import Emitter
from .indexing import dynamic_terms, groups
from .tile import Chunk, Strides

ALONG = "i0"
"""Argument: elements along the tile."""
ACROSS = "i1"
"""Argument: elements across the tile."""


class Turned(Emitter):
    """An emitter whose tiles have a side ``y`` where others have the reduced elements."""

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
        rest = tuple(a for a in self.space.x if a not in (*across, *along))
        place, y, x = (
            dynamic_terms(name, groups(self.extents(atoms), [strides.get(a, 0) for a in atoms]))
            for name, atoms in (("b", rest), ("y", across), ("x", along))
        )
        if place:
            place = [self.offset(" + ".join(place))] if len(place) > 1 or " " in place[0] else place
        return [*place, *y, *x], bool(x), bool(y)

    def masks(self, in_x: bool, in_r: bool, chunk: Chunk) -> list[str]:
        return [
            name
            for name, there, total, block in (
                ("x_mask", in_x, self.along, self.x_block),
                ("y_mask", in_r, self.across, self.y_block),
            )
            if there and total % block
        ]


def write_flat(e: Emitter) -> None:
    """Loads, math and stores, once."""
    (chunk,) = e.tile.chunks()
    outputs = e.plan.segment.outputs
    e.load_needed(outputs, chunk)
    e.out.paragraph()
    for tensor in outputs:
        e.value(tensor, chunk)
    e.out.paragraph()
    for tensor in outputs:
        e.store(tensor, chunk)


def turned_index(e: Turned) -> tuple[dict[str, tuple[int, str]], list[str]]:
    """Extent arguments with their values and types, and the lines that make ``b``, ``y`` and ``x``."""
    integers: dict[str, tuple[int, str]] = {}
    lines: list[str] = []
    for name, value, block in ((ALONG, e.along, e.x_block), (ACROSS, e.across, e.y_block)):
        integers[name] = (value, "tl.int64" if value >= INT32_LIMIT else "tl.int32")
        divisor = gcd(value, 16)
        if value % block and divisor > 1:
            lines.append(f"{name} = {name} // {divisor} * {divisor}")
    wide = ".to(tl.int64)" if e.tile.x_wide else ""
    lines.append(f"program = tl.program_id(0){wide}")
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
    return integers, ["    " + line for line in lines]
