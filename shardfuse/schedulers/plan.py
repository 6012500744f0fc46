"""What a scheduler hands to codegen: a segment, its space, and how the space is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..device import Device
from ..ir.digits import Digit
from ..ir.expr import BoundTensor
from ..mesh import DeviceMesh, ParallelType
from .limits import WARP, WIDEST_LOAD
from .segment import Segment
from .space import Space


@dataclass(frozen=True)
class Params:
    """How a kernel cuts its space.  Blocks are powers of two.

    x_block: kept elements of one program.
    columns: how many of ``x_block`` lanes there is something for, where that is no power of two; 0 for all of them.
    r_block: reduced elements of one chunk (``unrolled``) or of one turn of the loop; 1 where nothing is reduced.
    unrolled: r is held in registers, chunk by chunk; else a loop walks it, once for each phase.
    splits: programs that share one reduction, whose partials a second kernel finishes.
    rows: of a split reduction that stand side by side as one, so that what is read is aligned; summed up last.  Of a
    walk, that a late team takes in one turn.
    keeps: a walk holds what is the same for all its rows in registers; else it is loaded with every row.
    max_registers: a bound for the compiler, where one more program a multiprocessor is worth recomputing for.
    team: programs that share one row and exchange their partial results; 0 where a program has rows of its own.
    counted: a team counts its members in, instead of polling all their words.
    prefetch: a team has its next row fetched into L2 while it waits.
    late: how many rows a team reads before it waits for the results of this one, at most 2; 0 where it waits at once.
    eager: all loads come before the first reduction: nothing else hides what later ones would wait for.
    packed: a program holds 16-bit inputs of its row as they are, two in a register, and widens them at each use.
    aligned: a loop begins each row with the word that its first element lies in, so that its loads are wide.
    once: what finishes partial results is a stage of the same launch, not a second one.
    fold: elements of a loop's block that a thread takes into one lane of a running statistic, all of them its own.
    programs: how many programs of a team's kernel are resident at once: its grid is no larger.
    """

    x_block: int
    r_block: int = 1
    unrolled: bool = True
    splits: int = 1
    rows: int = 1
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    keeps: bool = True
    once: bool = False
    team: int = 0
    counted: bool = True
    prefetch: bool = True
    late: int = 0
    eager: bool = False
    packed: bool = False
    aligned: bool = False
    columns: int = 0
    fold: int = 1
    programs: int = 0


@dataclass(frozen=True)
class RankExchange:
    """Inside of a kernel: ``statistics``, each of one number for each kept element, are of all ranks of ``mesh`` along
    ``parallel_type``, and each of these ranks is given all elements of what they have of ``sent``.

    ``programs``: how many are resident at once: the kernel's grid is no larger, the same for all strides of a program.
    """

    mesh: DeviceMesh
    parallel_type: ParallelType
    statistics: tuple[BoundTensor, ...]
    sent: BoundTensor | None = None
    programs: int = 0

    @property
    def ranks(self) -> int:
        """How many exchange."""
        return self.mesh.extent(self.parallel_type)


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: ``segment`` walked as ``params`` say, on ``device``.

    ``stages``: of which one launch does all, one after the other; what one stores for the next is among the outputs.
    ``shares``: programs of the first stage that share kept elements have the last of them do the next stage with these;
    else all programs meet between two stages.
    ``exchange``: what the ranks of a mesh dimension exchange inside of it.
    ``split``: the digit that tells the partial results of a split reduction apart; every output has it outermost.
    """

    name: str
    segment: Segment
    space: Space
    params: Params
    device: Device
    split: Digit | None = None
    exchange: RankExchange | None = None
    stages: tuple[KernelPlan, ...] = ()
    shares: bool = False

    @property
    def is_pair(self) -> bool:
        """Does each program take two long rows, all of its threads along each?"""
        params, space = self.params, self.space
        if params.x_block != 2 or not params.unrolled or not space.is_inner or space.walked:
            return False
        return params.num_warps * WARP * WIDEST_LOAD <= params.r_block < space.reduced


def may_be_stages(segment: Segment) -> bool:
    """Can kernels of ``segment`` follow one another in one launch?  A later stage takes no scalars of its own."""
    return all(s.is_literal for s in segment.scalars)


def one_launch(scheduler: str, segment: Segment, plans: Sequence[KernelPlan], *, shares: bool = False) -> KernelPlan:
    """``plans`` of ``segment`` as stages of one kernel: partial results are stored for the next stage."""
    exprs = [e for p in plans for e in p.segment.exprs]
    made = dict.fromkeys(t for p in plans for t in p.segment.outputs)
    whole = Segment.of(exprs, made)
    name, first = kernel_name(scheduler, segment), plans[0]
    return KernelPlan(name, whole, first.space, first.params, first.device, stages=tuple(plans), shares=shares)


def kernel_name(scheduler: str, segment: Segment) -> str:
    """``persistent_T7_T9``: what it does and what it stores."""
    outputs = [str(t) for t in segment.outputs]
    if len(outputs) > 4:
        outputs = [*outputs[:3], f"and_{len(outputs) - 3}_more"]
    return "_".join([scheduler, *outputs])
