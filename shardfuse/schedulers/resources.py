"""What a kernel takes of a multiprocessor: registers of a thread, shared memory of a program, and with both how many
programs are resident.  Every scheduler and the tuner ask here.

Registers have 32 bits.  Numbers for what is no element of a row were counted in kernels compiled for ``sm_90``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from ..device import REGISTER_STEP, WARP, Device
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce
from ..segments.segment import Segment
from ..segments.space import run_below
from .features import Features, carried, itemsizes
from .limits import REGISTER_BYTES
from .plan import KernelPlan
from .schedule import Loop, Registers, RowLoop, Schedule, Sides
from .schedule_parts import REGISTERS_OF_A_THREAD

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
        stays = (self.rows + self.sums + (self.computed if keeps else 0)) / REGISTER_BYTES
        return stays + _COMPUTED + (_COMPUTED_AGAIN if phases > 2 else 0)

    def in_two_turns(self, rows: int) -> int:
        """Bytes of one element of a group's row loop: of the ``rows`` of two turns, and of what stays, as loaded."""
        return 2 * rows * self.rows + self.vectors + self.sums

    def in_lagged_loop(self, elements: int, rows: int, exchanged: int) -> int:
        """Registers of a thread of a group's row loop that holds so many elements.

        exchanged: loads and results of a row.
        """
        held = elements * self.in_two_turns(rows) // REGISTER_BYTES
        return held + _LAGGED_ADDRESSES + _LAGGED_EACH * rows * exchanged


def row_loop_fits(of_element: float, elements: float, registers: int) -> bool:
    """Do so many elements of a row loop's thread, each of so many registers, leave enough of ``registers``?"""
    return elements * of_element + _ADDRESSES <= registers


def element_of(space: Features, columns: Iterable[Expr]) -> Element:
    """``columns``: the reductions of ``segment`` that run down columns."""
    along = [t for t in space.segment.loads if space.has_r(t)]
    vectors = [t.dtype for t in along if not space.is_walked(t)]
    return Element(
        rows=itemsizes(t for t in along if space.is_walked(t)),
        vectors=sum(dtype.itemsize for dtype in vectors),
        computed=sum(dtype.compute.itemsize for dtype in vectors),
        sums=sum(carried(e).itemsize for e in columns),
    )


def summed_registers(segment: Segment) -> int:
    """Of one element while it is added up: of the widest of what is reduced, and of what it is accumulated in."""
    widest = (d for e in segment.exprs if isinstance(e.op, Reduce) for d in (e.tensors[0].dtype.compute, carried(e)))
    return max(max(d.itemsize for d in widest) // REGISTER_BYTES, 1)


# of a thread


def words_of(plan: KernelPlan) -> float:
    """Registers that hold the elements of a thread: of its rows as they are held, or of one turn of its loop."""
    schedule, space, segment = plan.schedule, plan.space, plan.segment
    threads = schedule.launch.warps * WARP
    rows = space.streamed
    if isinstance(schedule.order, RowLoop):
        elements = schedule.kept * space.reduced / max(schedule.members, 1) / threads
        columns = [e for e in segment.exprs if plan.split in space.atoms[e.output]]
        element = element_of(space, columns)
        if schedule.group:
            return elements * element.in_two_turns(schedule.turn) / REGISTER_BYTES
        return elements * element.in_row_loop(space.phases, keeps=schedule.keeps)
    elements = schedule.kept * schedule.reduced / threads
    if not (schedule.is_held and space.r):
        return elements * len(rows) * _width(rows)
    elements *= -(-space.reduced // (schedule.reduced * max(schedule.members, 1)))
    if schedule.is_packed or schedule.lag:
        return elements * (1 + schedule.lag) * space.element_bytes / REGISTER_BYTES
    return elements * space.held * _width(rows)


def _width(tensors: Iterable[BoundTensor]) -> int:
    """Registers of an element of the widest of them, as it is computed with."""
    return max((t.dtype.compute.itemsize // REGISTER_BYTES for t in tensors), default=1) or 1


def shared_of(plan: KernelPlan) -> int:
    """Bytes of shared memory: of copies in flight, or of a tile that is turned round."""
    schedule, space, segment = plan.schedule, plan.space, plan.segment
    ahead = schedule.launch.stages - 1
    if isinstance(schedule.order, Sides):
        return schedule.kept * schedule.reduced * min(t.dtype.itemsize for t in (*segment.loads, *segment.outputs))
    if isinstance(schedule.order, RowLoop) or schedule.lag:
        along = [t for t in segment.loads if space.r[-1] in space.atoms[t]]
        if schedule.keeps:  # else vectors are copied with each row
            along = [t for t in along if space.is_streamed(t)]
        share = -(-space.reduced // max(schedule.members, 1)) * (schedule.turn if schedule.group else schedule.kept)
        return ahead * share * itemsizes(along)
    return 0 if schedule.is_held else ahead * turn_bytes(space, schedule)


@dataclass(frozen=True)
class Resources:
    """What a kernel is expected to take.

    registers: of a thread, under its bound.  spills: do more of them seem to be needed than the bound leaves?
    shared_bytes: of a program.  programs: resident on a multiprocessor.
    """

    registers: int
    spills: bool
    shared_bytes: int
    programs: int


def resources_of(plan: KernelPlan) -> Resources:
    """What the kernel of ``plan`` takes; ``tests/test_resources.py`` says how far that is from what compilers make."""
    first = plan.stages[0] if plan.stages else plan
    device, launch = first.device, first.schedule.launch
    base, each = _COUNTED[form_of(first)]
    wanted, bound = base + each * words_of(first), launch.registers or device.bound(launch.warps)
    registers = min(max(ceil(wanted), REGISTERS_OF_A_THREAD[0]), bound)
    shared = shared_of(first)
    programs = min(
        resident(device, launch.warps, -(-registers // REGISTER_STEP) * REGISTER_STEP) // device.multiprocessors,
        device.shared_bytes // max(shared, 1),
    )
    return Resources(registers, wanted > _SPILLED * bound, shared, programs)


def form_of(plan: KernelPlan) -> str:
    """The name in ``_COUNTED`` of the form of ``plan``."""
    schedule = plan.schedule
    group = " of a group" if schedule.group else ""
    match schedule.order, schedule.residency:
        case RowLoop(), _:
            return f"row loop{group}"
        case Sides(), _:
            return "sides"
        case _, Registers(packed=True):
            return "packed"
        case _, Loop():
            return f"columns{group}" if group and not plan.space.is_inner else f"loop{group}"
        case _ if schedule.lag:
            return f"lag of {schedule.lag}"
        case _ if not plan.space.r:
            return "map"
        case _:
            return f"held{group}" if plan.space.rereads else "summed"


_COUNTED = {
    "map": (0, 1.2),
    "sides": (20, 0.3),
    "held": (3, 1.65),
    "held of a group": (31, 1.2),
    "packed": (2, 2.15),
    "lag of 1": (29, 1.4),
    "lag of 2": (4, 1.6),
    "loop": (7, 1.5),
    "loop of a group": (48, 1.2),
    "columns of a group": (107, 0.65),
    "summed": (0, 0.25),
    "row loop": (38, 0.9),
    "row loop of a group": (0, 1.75),
}
"""By form: registers of a thread for all but elements, and for each register that holds one; fitted to counts of 309
kernels of the public grid."""
_SPILLED = 1.5
"""How many times its bound a thread wants before the kernel is said to spill: below, the compiler mostly computes again
or loads later."""


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


def within_shared(space: Features, schedule: Schedule) -> Schedule:
    """``schedule`` of a loop with no more stages than shared memory holds the copies of."""
    return schedule.with_stages(stages(turn_bytes(space, schedule), schedule.launch.stages, space.device))


def stages(copied: int, most: int, device: Device) -> int:
    """So many that the copies of all but one, of ``copied`` bytes each, fit; ``most`` at the most."""
    return min(most, copies_of_one(device) // max(copied, 1) + 1)


def turn_bytes(space: Features, schedule: Schedule) -> int:
    """What a turn copies: its part of all that differs within it."""
    differs = [t for t in space.segment.loads if space.has_r(t) and run_below(t, space.r, space) % schedule.reduced]
    return sum(t.dtype.itemsize * (schedule.kept if space.has_x(t) else 1) for t in differs) * schedule.reduced
