"""What a kernel takes of a multiprocessor: registers of a thread, shared memory of a program, and with both how many
programs are resident.  Every scheduler and the tuner ask here.

Registers have 32 bits.  Numbers for what is no element of a row were counted in kernels compiled for ``sm_90``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..device import WARP, Device
from ..ir.dtype import DataType
from ..ir.expr import REDUCTIONS, Expr
from ..ops.reductions import REDUCTION_TABLE
from .schedule import Schedule
from .segment import Segment
from .space import Space, run_below

REGISTER = 4
"""Bytes of a register."""
_SHARED = 0.9
"""The part of shared memory that copies in flight may take; reductions across warps need the rest."""
_ADDRESSES = 16
"""Registers of a thread of a row loop for all but its elements."""
_COMPUTED, _COMPUTED_AGAIN = 1.5, 0.5
"""Registers of each element of a row loop while it is computed with; and where a second reduction follows the first."""
_LAGGED_ADDRESSES, _LAGGED_EACH = 42, 2
"""Registers of a thread of a group's row loop for all but its elements; and of each load and each exchanged result."""


@dataclass(frozen=True)
class Element:
    """Bytes of one element of the rows that a kernel walks.

    rows: of all inputs that change from row to row, as they are loaded.
    vectors: of those that are the same for all rows, as they are loaded; computed: as they are computed with.
    sums: of the sums down its column that are carried from row to row.
    """

    rows: int
    vectors: int
    computed: int
    sums: int

    def in_row_loop(self, phases: int, *, keeps: bool) -> float:
        """Registers of one element of a row loop: of its row, of what stays, and to compute.

        What stays are sums of columns, and vectors where they are kept as they are computed with.
        """
        stays = (self.rows + self.sums + (self.computed if keeps else 0)) / REGISTER
        return stays + _COMPUTED + (_COMPUTED_AGAIN if phases > 2 else 0)

    def in_lagged_loop(self, elements: int, rows: int, exchanged: int) -> int:
        """Registers of a thread of a group's row loop: so many elements of the rows of two turns, and of what stays.

        All of it is as it is loaded.  exchanged: loads and results of a row.
        """
        held = elements * (2 * rows * self.rows + self.vectors + self.sums) // REGISTER
        return held + _LAGGED_ADDRESSES + _LAGGED_EACH * rows * exchanged


def row_loop_fits(of_element: float, elements: float, registers: int) -> bool:
    """Do so many elements of a row loop's thread, each of so many registers, leave enough of ``registers``?"""
    return elements * of_element + _ADDRESSES <= registers


def element_of(segment: Segment, space: Space, columns: Iterable[Expr]) -> Element:
    """``columns``: the reductions of ``segment`` that run down columns."""
    along = [t for t in segment.loads if space.has_r(t)]
    vectors = [t.dtype for t in along if not space.is_walked(t)]
    return Element(
        rows=sum(t.dtype.itemsize for t in along if space.is_walked(t)),
        vectors=sum(dtype.itemsize for dtype in vectors),
        computed=sum(dtype.compute.itemsize for dtype in vectors),
        sums=sum(carried(e).itemsize for e in columns),
    )


def carried(expr: Expr) -> DataType:
    """The type that the reduction ``expr`` accumulates in."""
    return REDUCTION_TABLE[expr.op].carried(expr.tensors[0].dtype, expr.output.dtype)


def summed_registers(segment: Segment) -> int:
    """Of one element while it is added up: of the widest of what is reduced, and of what it is accumulated in."""
    widest = (d for e in segment.exprs if e.op in REDUCTIONS for d in (e.tensors[0].dtype.compute, carried(e)))
    return max(max(d.itemsize for d in widest) // REGISTER, 1)


# of a multiprocessor


def resident(device: Device, warps: int, registers: int) -> int:
    """Programs of ``warps`` warps that run at once where a thread has ``registers`` (a multiple of 8)."""
    return device.multiprocessors * min(device.registers // (warps * WARP * registers), device.warps // warps)


def resident_copies(device: Device, copied: int) -> int:
    """Programs, each with so many bytes of copies in flight, that shared memory lets be resident."""
    return copies_of_one(device) // max(copied, 1) * device.multiprocessors


def copies_of_one(device: Device) -> int:
    """Bytes of copies in flight on one multiprocessor, at most."""
    return int(_SHARED * device.shared_bytes)


def within_shared(segment: Segment, space: Space, schedule: Schedule, device: Device) -> Schedule:
    """``schedule`` of a loop with no more stages than shared memory holds the copies of."""
    if schedule.is_held:
        return schedule
    return schedule.with_stages(stages(turn_bytes(segment, space, schedule), schedule.launch.stages, device))


def stages(copied: int, most: int, device: Device) -> int:
    """So many that the copies of all but one, of ``copied`` bytes each, fit; ``most`` at the most."""
    return min(most, copies_of_one(device) // max(copied, 1) + 1)


def turn_bytes(segment: Segment, space: Space, schedule: Schedule) -> int:
    """What a turn copies: its part of all that differs within it."""
    differs = [t for t in segment.loads if space.has_r(t) and run_below(t, space.r, space) % schedule.reduced]
    return sum(t.dtype.itemsize * (schedule.kept if space.has_x(t) else 1) for t in differs) * schedule.reduced
