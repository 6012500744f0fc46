"""ordered_row_loop: row loops of ``mix_order`` whose sums say their order themselves (``passes/segments.py``).

Sums along rows are in pairs, for which a program holds one row at a time.  Each program adds up the columns of its own
rows, one after another: partial sums that are tensors of the fusion (``passes/segments.py``), so that there is no split
and no finish.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.digits import extent
from ..ir.expr import Expr
from ..ir.op import Reduce
from ..segments.pair_runs import has_order
from .features import Features, carried
from .schedule import RowLoop, Schedule, ScheduleError


def is_ordered(space: Features) -> bool:
    """Do its sums say their order?"""
    return "ranks" in space.promised


def why_no_order(space: Features, columns: Sequence[Expr], *, is_only_row: bool) -> str | None:
    """Why a row loop would add up in another order; ``None`` where it keeps it.

    ``columns``: sums down columns.  is_only_row: are they of one row, which is stored as it is?
    """
    if not space.adds_in_pairs:
        return "sums that are the same on any number of ranks are in pairs"
    if any(map(_is_in_pairs, columns)):
        return "sums of columns in pairs are of columns that a program holds"
    free = [e for e in space.segment.exprs if space.reduces(e) and has_order(e) and not _is_in_pairs(e)]
    if free:
        return f"{free[0].output} is not added up in pairs"
    if is_only_row:
        return None
    walked = extent(space.walked)
    if space.samples < min(walked, space.device.multiprocessors):
        return f"{space.samples} programs, as many as it has partial sums of columns, would walk {walked} rows each"
    if not _are_stored_whole(space, columns):
        return "sums of columns that say their order are stored as programs have them"
    return None


def _is_in_pairs(expr: Expr) -> bool:
    return isinstance(expr.op, Reduce) and expr.op.in_pairs > 0


def _are_stored_whole(space: Features, columns: Sequence[Expr]) -> bool:
    """Are sums of columns stored as a program has them, one behind the other, and is nothing made of them?"""
    kept = [a for a in space.x if a not in space.walked]
    for e in columns:
        domain = e.output.domain
        own = [atom for axis in domain.local_axes() for digit in axis for atom in space.pieces[digit]]
        if carried(e) is not e.output.dtype or domain.allocation is not None or own != [*kept, *space.r]:
            return False
    rests = {e.output for e in columns}
    return not any(t in rests for e in space.segment.exprs for t in e.tensors)


def check_in_order(schedule: Schedule, space: Features) -> None:
    """Raise ScheduleError where programs would not have the sums that say their order."""
    is_one = isinstance(schedule.order, RowLoop) and schedule.group is None and schedule.kept == schedule.parts == 1
    if not is_one or schedule.is_one_launch or schedule.reduced != space.as_branch(schedule.reduced):
        found = f"sums that say their order are of one row of {space.row_lanes} lanes, and of one program's columns"
        raise ScheduleError(f"{schedule}: {found}")
