"""schedule_cost: what a kernel is expected to take, from its features, its schedule and the rates of its device.

    work  = max(bytes / bandwidth, instructions / issue rate)
    waits = waits of a program x latency x programs / resident programs
    us    = max(work, waits) + min(work, waits) / turns + tail + launches

Programs that are resident together wait while others work, but in the first of the ``turns`` that each place on a
multiprocessor has: where all programs start at once, none has what another could wait behind.  The formula knows no
shape.  It ranks the schedules that the tuner tries; ``benchmarks/ranking.py`` says how far it is from recorded timings,
and where it would choose otherwise than the schedulers.  It follows from plans alone, by the same floating-point
operations in the same order, so that all ranks rank alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from ..device.region_costs import HEAVY, RANDOM
from ..ir.digits import extent
from ..ir.expr import BoundTensor
from ..ir.op import Pointwise, Random, Reduce, Statistic
from .features import Features
from .plan import KernelPlan, reads
from .resources import resources_of
from .schedule import RowLoop


@dataclass(frozen=True)
class Cost:
    """The terms of a cost, in microseconds.  turns: of each place on a multiprocessor, one after the other."""

    memory: float
    issue: float
    waits: float
    turns: float
    tail: float
    launches: float

    @property
    def us(self) -> float:
        """What all of them come to."""
        work = max(self.memory, self.issue)
        return max(work, self.waits) + min(work, self.waits) / self.turns + self.tail + self.launches


def cost_of(kernels: Iterable[KernelPlan]) -> float:
    """What ``kernels``, one after the other, are expected to take, in microseconds."""
    return sum(terms_of(stage, k).us for plan in kernels for k, stage in enumerate(plan.stages or (plan,)))


def terms_of(plan: KernelPlan, stage: int = 0) -> Cost:
    """The terms of one kernel; of a later ``stage`` of one launch, which all programs have to reach first."""
    space, schedule, rates = plan.space, plan.schedule, plan.device.rates
    programs, rows = _programs(plan), _turns(plan)
    resident = max(min(resources_of(plan).programs, ceil(programs / plan.device.multiprocessors)), 1)
    waves = programs / (plan.device.multiprocessors * resident)
    memory, loads = _moved(plan) / rates.memory, _waits(plan, rows)
    busiest = ceil(programs / plan.device.multiprocessors) * plan.device.multiprocessors / programs
    tail = max(memory * (busiest / rates.share - 1), 0)
    reductions = space.phases - 1 or bool(schedule.group)
    reached = rates.reached * reductions * (1 if schedule.lag else rows) if schedule.members > 1 else 0
    met = rates.met * reductions * rows * (schedule.launch.warps > 1)
    waits = waves * (rates.loaded * loads + reached + met)
    launched = rates.reached if stage else rates.launched
    work = _instructions(plan) / rates.issued
    return Cost(memory, work, waits, max(waves * loads, 1), tail, launched)


def _programs(plan: KernelPlan) -> int:
    """Programs of the grid."""
    space, schedule = plan.space, plan.schedule
    if isinstance(schedule.order, RowLoop):
        return schedule.programs or space.samples * schedule.parts
    if space.sides[1]:
        along, across = (extent(side) for side in reversed(space.sides))
        rest = space.kept // (along * across)
        return rest * ceil(along / schedule.kept) * (ceil(across / schedule.reduced) if across > 1 else 1)
    return schedule.grid(schedule.blocks(space.kept))


def _turns(plan: KernelPlan) -> int:
    """Blocks of rows that a program takes one after the other."""
    space, schedule = plan.space, plan.schedule
    if isinstance(schedule.order, RowLoop):
        groups = schedule.group.at_once if schedule.group else schedule.parts
        return ceil(extent(space.walked) / (groups * schedule.order.rows))
    return ceil(schedule.blocks(space.kept) / schedule.group.at_once) if schedule.group else 1


def _waits(plan: KernelPlan, turns: int) -> float:
    """How often a program waits for memory with nothing of its own in flight."""
    space, schedule, ahead = plan.space, plan.schedule, max(plan.schedule.launch.stages - 1, 1)
    if isinstance(schedule.order, RowLoop) or schedule.lag:
        return max(turns / (ahead + schedule.lag), 1)
    if schedule.is_held or not space.r:
        return turns
    share = ceil(space.reduced / (schedule.reduced * max(schedule.members, 1) * schedule.parts))
    return turns * max(space.phases - (not space.rereads), 1) * ceil(share / ahead)


def _moved(plan: KernelPlan) -> int:
    """Bytes that are read, as often as they are, and written."""
    counts, space = reads(plan), plan.space
    read = sum(_bytes(space, t) * counts.get(t, 1) for t in plan.segment.loads)
    return read + sum(_bytes(space, t) for t in plan.segment.outputs)


def _bytes(space: Features, tensor: BoundTensor) -> int:
    return tensor.dtype.itemsize * extent(space.atoms.get(tensor, ()))


def _instructions(plan: KernelPlan) -> float:
    """Of all threads: each op of each lane that a program has, whether it has an element or not."""
    space, schedule = plan.space, plan.schedule
    lanes = used = max(space.kept * space.reduced, 1)
    if not space.sides[1]:
        lanes = _lanes(space.kept, schedule.kept) * _lanes(space.reduced, schedule.reduced)
    return instructions_of(space) * lanes / used


def instructions_of(space: Features) -> float:
    """Of all elements of the kernel of ``space``: each op once, whatever a loop does again."""
    total = 0.0
    for e in space.segment.exprs:
        weight = RANDOM if isinstance(e.op, Random) else 0.0
        if isinstance(e.op, Pointwise | Reduce | Statistic):
            weight = HEAVY.get(e.op.name, 1)
        held = (t for t in (*e.tensors, *e.outputs) if t in space.atoms)
        total += weight * max((extent(space.atoms[t]) for t in held), default=0)
    return total


def _lanes(elements: int, block: int) -> int:
    return ceil(elements / block) * block
