"""row_loop_tiles: how many rows a program of a row loop has side by side, and by how many warps (``mix_order``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..device import Device
from ..ir.expr import Expr
from .features import Features
from .limits import MAX_WARPS, WARP, WARPS, power_of_two, power_of_two_within
from .ordered_row_loop import is_ordered
from .resources import element_of, row_loop_fits


@dataclass(frozen=True)
class RowTile:
    """``rows`` of a tile, ``warps`` that hold it, ``programs`` a multiprocessor; ``keeps`` as in ``RowLoop``."""

    rows: int
    warps: int
    programs: int
    keeps: bool

    def registers(self, device: Device) -> int:
        """What a thread may have."""
        return device.bound(self.programs * self.warps)


def tile_of_rows(space: Features, columns: Sequence[Expr]) -> RowTile | None:
    """Of the tiles that fit, the first: more programs before fewer, more rows before less; reloading as a last resort.

    ``columns``: sums down columns.  ``None`` where rows are too long.
    """
    tuned, n = space.tuned.row_loops, space.reduced
    warps = power_of_two(-(-n // (tuned.each * WARP)))
    if warps > MAX_WARPS:
        return None
    most = (2 * tuned.resident // warps, tuned.resident // warps)
    tiles = [RowTile(1, warps, programs, True) for programs in most if 0 < programs <= tuned.programs]
    if warps == 1:
        shared = WARPS if 2 * n > tuned.each * WARP and turns(space) < tuned.many_turns else WARPS // 2
        rows = power_of_two_within(tuned.each * WARP * shared // n)
        tiles = [RowTile(rows >> k, shared, tuned.resident // shared, True) for k in range(rows.bit_length())]
        tiles = [t for t in tiles if t.rows == 1 or not is_ordered(space)]
    last = RowTile(1, max(warps, WARPS), 1, True)
    return next((t for t in (*tiles, last, replace(last, keeps=False)) if fits(space, columns, t, n)), None)


def fits(space: Features, columns: Sequence[Expr], tile: RowTile, lanes: int) -> bool:
    """Do registers hold ``tile``, of so many lanes a row?"""
    of_element = registers(space, columns, keeps=tile.keeps)
    return row_loop_fits(of_element, tile.rows * lanes / (tile.warps * WARP), tile.registers(space.device))


def registers(space: Features, columns: Sequence[Expr], *, keeps: bool) -> float:
    """Of one element: what its row holds, what is the same for all rows, sums of columns; and to compute."""
    return element_of(space, columns).in_row_loop(space.phases, keeps=keeps)


def turns(space: Features) -> int:
    """Rows of a program, of tiles that fill it."""
    tuned = space.tuned.row_loops
    return space.kept * space.reduced // (tuned.each * WARP * tuned.resident * space.device.multiprocessors)
