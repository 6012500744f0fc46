"""lagged_row_loop: how groups loop over rows that no program holds, and add up columns as they go (``mix_order``).

A member has its columns of all rows of its group, so that sums of columns stay in its registers, and reads rows before
it asks for the statistics of those that it has (``codegen/lagged_row_loop.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..device import LEAST_COPY
from ..ir.expr import Expr
from ..ir.op import Reduce
from .features import Features
from .limits import WARP, WARPS, vector
from .plan import may_be_stages
from .resources import Element, element_of, resident, stages
from .schedule import LAUNCH, Group, Lagged, Launch, RowLoop, Schedule, Split
from .schedule_parts import MAX_MEMBERS


@dataclass(frozen=True)
class _Row:
    """What a thread has of rows.

    element: bytes of one.  results: exchanged of a row.  width: elements of a load.
    """

    space: Features
    element: Element
    results: int
    width: int

    def registers(self, rows: int, loads: int) -> int:
        """Of a thread: rows of two turns, as the bits that they are."""
        return self.element.in_lagged_loop(loads * self.width, rows, loads * len(self.space.streamed) + self.results)

    def share(self, loads: int) -> int:
        """Elements of a row that a member holds."""
        return loads * self.width * WARPS * WARP

    @property
    def takes_two(self) -> bool:
        """Do members hold three loads of each of two rows, and all of them whole?"""
        resident, rows, loads = self.space.tuned.row_loops.lagged_pairs
        fits = self.registers(rows, loads) <= self.space.device.bound(resident)
        return fits and self.space.reduced % self.share(loads) == 0

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Registers of a thread, rows of a turn, and loads of each; ``None`` where all spill."""
        tuned, bound = self.space.tuned.row_loops, self.space.device.bound
        fits = (s for s in tuned.lagged_shapes if self.registers(*s[1:]) <= bound(s[0]))
        found = tuned.lagged_pairs if self.takes_two else next(fits, None)
        return found and (bound(found[0]), *found[1:])


def why_no_lagged_loop(space: Features, columns: Sequence[Expr]) -> str | None:
    """Why no group walks the rows of ``segment``.  ``columns``: its reductions down columns."""
    if space.why_no_exchange is not None:
        return space.why_no_exchange
    if space.has_windows or space.segment.has_indices:
        return "windows and indices take registers"
    if space.phases != 2:
        return f"{space.phases - 1} reductions of a row follow one another"
    if space.x != space.walked:
        return "sums of columns are not over all rows"
    walked = [t for t in space.segment.inputs if space.is_walked(t) and space.has_r(t)]
    odd = next((t for t in walked if not space.is_streamed(t) or t.dtype is not walked[0].dtype), None)
    if odd is not None:
        return f"{odd} is not read as {walked[0]} is"
    n = space.reduced
    if vector(walked[0].dtype, n, space.device) * walked[0].dtype.itemsize < LEAST_COPY:
        return f"rows of {n} elements are not aligned"
    row = _row(space, columns)
    if row.shape is None:
        return "two rows take more registers than there are"
    longest = MAX_MEMBERS * row.share(row.shape[-1])
    if n > longest:
        return f"{n} elements are more than {longest}, what a group of {MAX_MEMBERS} programs holds"
    schedule = lagged_row_loop(space, columns)
    if space.kept * schedule.members < space.tuned.row_loops.lagged_turns * schedule.programs:
        return f"{space.kept} rows are few"
    return None


def takes_two_rows(space: Features, columns: Sequence[Expr]) -> bool:
    """Do groups hold two rows of a turn whole, so that they beat a program of 16 warps that loads weights every row?

    LayerNorm's backward of 4096 x 12288, bfloat16, took 90 us on an H200 so, and 101; of 16384 x 12288 308 and 356.
    """
    return why_no_lagged_loop(space, columns) is None and _row(space, columns).takes_two


def lagged_row_loop(space: Features, columns: Sequence[Expr]) -> Schedule:
    """Groups as small as hold a row, as many as are resident; of a smaller GPU, the one that fits.

    One launch and two took as long on an H200: of RMSNorm's backward of 8192 x 32768, bfloat16, 399 and 405 us, of
    LayerNorm's of 2048 x 32768 124 and 122, of 512 x 32768 44.6 and 47.0.
    """
    row, device = _row(space, columns), space.device
    assert row.shape is not None, "no thread holds two rows"
    registers, rows, loads = row.shape
    programs = resident(device, WARPS, registers)
    members = min(-(-space.reduced // row.share(loads)), programs)
    groups = programs // members
    copied = rows * -(-space.reduced // members) * row.element.rows * (programs // device.multiprocessors)
    return Schedule(
        RowLoop(rows, row.share(1)),
        group=Group(members, groups * members, Lagged()),
        split=Split(groups, in_one_launch=may_be_stages(space.segment)),
        launch=Launch(WARPS, stages(copied, LAUNCH.stages, device), registers),
    )


def _row(space: Features, columns: Sequence[Expr]) -> _Row:
    results = [e for e in space.segment.exprs if isinstance(e.op, Reduce) and not space.has_r(e.output)]
    width = space.device.access_bytes // max(space.streamed[0].dtype.itemsize, 2)
    return _Row(space, element_of(space, columns), len(results), width)
