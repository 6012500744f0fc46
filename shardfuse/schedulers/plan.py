"""What a scheduler hands to codegen: the space of a segment on a device, and how it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..device import Device
from ..ir.digits import Digit
from ..ir.expr import BoundTensor
from ..ir.op import Pick, Reduce, Statistic
from ..mesh import DeviceMesh, ParallelType
from ..segments.online_reductions import walks
from ..segments.segment import Segment, leading_to
from .features import Features
from .limits import WARP, WIDEST_LOAD
from .schedule import RowLoop, Schedule, Sides
from .schedule_parts import REGISTERS_OF_A_THREAD, WithRanks, refuse


@dataclass(frozen=True)
class RankExchange:
    """Inside of a kernel: ``statistics``, each of one number for each kept element, are of all ranks of ``mesh`` along
    ``parallel_type``, and each of these ranks is given all elements of what they have of ``sent``.

    ``programs``: how many share the rows, the same on all ranks and for all strides of a program.
    ``is_claimed``: are they several on a multiprocessor?  Then those that start claim their numbers, on multiprocessors
    that NCCL never needs alone.  Else the kernel's grid is no larger than there are such multiprocessors.
    ``is_in_rows``: is ``sent`` sent row by row, a flag behind each, instead of in words that are their own flags?
    ``passed``: the sum of what all ranks sent, of which each rank adds up one row in ``ranks`` and passes it on to the
    others in the type of ``sent``; ``None`` where each adds up all rows.
    ``members``: how many programs of a rank share a row: of what is sent in words, or of the group that holds it.
    ``is_uneven``: have some ranks more of each row than others?
    ``gathered``: a result of this rank's rows that all ranks are given, row by row.  ``sent``, if anything, is then cut
    as it is, and each rank is given those elements of its own rows alone.
    ``shift``: elements from the rows of a rank to those of the next one, in all of ``gathered``.
    ``is_alike``: does an uneven one have results that all ranks have, bit by bit?  Then nothing in it is contracted.
    """

    mesh: DeviceMesh
    parallel_type: ParallelType
    statistics: tuple[BoundTensor, ...]
    sent: BoundTensor | None = None
    programs: int = 0
    is_claimed: bool = False
    is_in_rows: bool = False
    passed: BoundTensor | None = None
    members: int = 1
    is_uneven: bool = False
    is_alike: bool = False
    gathered: BoundTensor | None = None
    shift: int = 0

    @property
    def ranks(self) -> int:
        """How many exchange."""
        return self.mesh.extent(self.parallel_type)

    @property
    def parts(self) -> int:
        """Programs of all ranks that have a part of each statistic."""
        return self.ranks * (self.members if self.sent is None else 1)


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: the segment of ``space`` walked as ``schedule`` says, on the device of ``space``.

    ``stages``: of which one launch does all, one after the other; what one stores for the next is among the outputs.
    ``shares``: programs of the first stage that share kept elements have the last of them do the next stage with these;
    else all programs meet between two stages.
    ``exchange``: what the ranks of a mesh dimension exchange inside of it.
    ``split``: the digit that tells the partial results of a split reduction apart; every output has it outermost.
    """

    name: str
    space: Features
    schedule: Schedule
    split: Digit | None = None
    exchange: RankExchange | None = None
    stages: tuple[KernelPlan, ...] = ()
    shares: bool = False

    def __post_init__(self) -> None:
        """Raises ScheduleError where ``schedule`` is none for ``space``, or takes more than ``device`` has."""
        order, launch = self.schedule.order, self.schedule.launch
        refuse(isinstance(order, RowLoop) != bool(self.space.walked), f"{self.name} walks rows, or has none to walk")
        refuse(
            isinstance(order, Sides) != bool(self.space.sides[0]), f"{self.name} has two sides, or has no other side"
        )
        blocks = self.schedule.is_held and self.schedule.split is None and not self.schedule.is_aligned_down
        blocks &= self.schedule.lag <= 1 and not isinstance(self.schedule.exchange, WithRanks)
        held = "rows that are held from their own beginning, no more than one ahead, and by no other rank"
        refuse(bool(self.space.block) and not blocks, f"{self.name} has blocks, which are of {held}")
        refuse(self.schedule.reduced < self.space.block_size, f"{self.name} cuts its rows within blocks")
        members = self.exchange.members if self.exchange is not None and self.exchange.sent is None else 1
        is_of_ranks = isinstance(self.schedule.exchange, WithRanks)
        groups = self.schedule.members if is_of_ranks else 1
        refuse(groups != members, f"{self.name} has groups of {groups} programs, and words of {members} on each rank")
        taken = launch.warps * WARP * (launch.registers or REGISTERS_OF_A_THREAD[0])
        refuse(taken > self.device.registers, f"{taken} registers of a program, {self.device.registers} there are")

    @staticmethod
    def of(scheduler: str, space: Features, schedule: Schedule, split: Digit | None = None) -> KernelPlan:
        """A kernel that ``scheduler`` gives its name."""
        return KernelPlan(_name(scheduler, space.segment), space, schedule, split)

    @property
    def segment(self) -> Segment:
        """What it computes; of stages, all of it."""
        return self.space.segment

    @property
    def device(self) -> Device:
        """What it is planned for."""
        return self.space.device

    @property
    def rank_exchange(self) -> RankExchange:
        """What its ranks exchange, of a kernel whose ranks do."""
        assert self.exchange is not None, f"ranks of {self.name} exchange nothing"
        return self.exchange

    @property
    def turns(self) -> int:
        """How many kept elements programs take in turn; of sums that ranks pass on, a row for each rank is one turn."""
        exchange = self.exchange
        return -(-self.space.kept // (exchange.ranks if exchange is not None and exchange.passed is not None else 1))

    @property
    def is_pair(self) -> bool:
        """Does each program take two long rows, all of its threads along each?"""
        schedule, space = self.schedule, self.space
        if schedule.kept != 2 or not schedule.is_held or not space.is_inner or space.walked:
            return False
        return schedule.launch.warps * WARP * WIDEST_LOAD <= schedule.reduced < space.reduced


def may_be_stages(segment: Segment) -> bool:
    """Can kernels of ``segment`` follow one another in one launch?  A later stage takes no scalars of its own."""
    return all(s.is_literal for s in segment.scalars)


def one_launch(scheduler: str, segment: Segment, plans: Sequence[KernelPlan], *, shares: bool = False) -> KernelPlan:
    """``plans`` of ``segment`` as stages of one kernel: partial results are stored for the next stage.

    Raises ScheduleError where a later stage would need scalars.
    """
    name, first = _name(scheduler, segment), plans[0]
    refuse(not may_be_stages(segment), f"stages of {name} need scalars")
    exprs = [e for p in plans for e in p.segment.exprs]
    made = dict.fromkeys(t for p in plans for t in p.segment.outputs)
    whole = Segment.of(exprs, made)
    return KernelPlan(name, replace(first.space, segment=whole), first.schedule, stages=tuple(plans), shares=shares)


def _name(scheduler: str, segment: Segment) -> str:
    """``persistent_T7_T9``: what it does and what it stores."""
    outputs = [str(t) for t in segment.outputs]
    if len(outputs) > 4:
        outputs = [*outputs[:3], f"and_{len(outputs) - 3}_more"]
    return "_".join([scheduler, *outputs])


def reads(plan: KernelPlan) -> dict[BoundTensor, int]:
    """How often a kernel reads each of its inputs: a loop those that it needs, in every walk."""
    segment, space = plan.segment, plan.space
    if plan.schedule.is_held or space.walked or plan.stages:
        return dict.fromkeys(segment.inputs, 1)
    counts = dict.fromkeys(segment.inputs, 0)
    stops = {e for e in segment.exprs if isinstance(e.op, Pick | Reduce | Statistic)}
    through = [e for e in segment.exprs if e not in stops]
    for wanted in walks(space).values():
        behind = {t for e in leading_to(through, wanted) for t in e.tensors}.union(wanted)
        for tensor in segment.inputs:
            is_windowed = tensor not in space.atoms
            counts[tensor] += tensor in behind and (is_windowed or space.has_r(tensor))
    return {t: max(n, 1) for t, n in counts.items()}
