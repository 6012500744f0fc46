"""The whole way from a recorded fusion and sizes to a plan: one function, a line a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .analysis.communication_table import communication_of
from .device import Device
from .executor.host_scalars import seeds_sent
from .ir.expr import BoundFusion, BoundTensor
from .ir.fusion import Fusion
from .ir.printer import fusion_text
from .ir.scalar import Number, Scalar
from .ir.tensor_view import TensorView
from .ir.verify import verify
from .passes import PASSES, bind
from .passes.aliases import check_replaced_shapes
from .passes.promise_checks import check_promises
from .schedulers import kernels_of, makes_kernels
from .schedulers.plan import KernelPlan
from .schedulers.schedule import Schedule
from .segmenter import ScheduledSegment, segment_fusion
from .segments.overlap import overlap
from .segments.segment import Segment, renaming


@dataclass(frozen=True)
class PlannedSegment:
    """A segment, its scheduler, why each one before refused it, and the kernels that it became.

    ``is_beside``: a collective that runs on a stream of its own, beside the kernels until its first reader.
    ``like``: of a chunk that is done as an earlier one is, the number of that segment, whose kernels these are.
    ``renamed``: for each tensor of that segment the one of this.
    """

    segment: Segment
    scheduler: str
    refusals: tuple[tuple[str, str], ...]
    kernels: tuple[KernelPlan, ...]
    is_beside: bool = False
    like: int | None = None
    renamed: Mapping[BoundTensor, BoundTensor] = field(default_factory=dict[BoundTensor, BoundTensor])


@dataclass(frozen=True)
class Plan:
    """What every rank agrees on: nothing in it depends on a rank.  ``trace``: the text after each stage.

    ``device``: the GPU that kernels are planned for.  ``in_kernel``: of each collective, whether a kernel does it, or
    why not, where that was asked.  ``apart``: where kernels do, the plan in which collectives stand by themselves.
    """

    fusion: BoundFusion
    segments: tuple[PlannedSegment, ...]
    trace: tuple[tuple[str, str], ...]
    device: Device
    in_kernel: tuple[str, ...] = ()
    apart: Plan | None = None


def compile_fusion(
    fusion: Fusion,
    sizes: Mapping[TensorView, Sequence[int]],
    numbers: Mapping[Scalar, Number] | None = None,
    ranks_per_node: int = 8,
    *,
    device: Device,
    has_cheap_sums: bool = False,
    passes_sums: bool = False,
) -> Plan:
    """``sizes``: the unsharded shape of every input tensor.  ``numbers``: the scalar inputs that shapes depend on.

    ``ranks_per_node``: neighbours in the world that share a host, for the cost of collectives.  ``device``: the GPU
    that kernels are planned for.  ``has_cheap_sums``, ``passes_sums``: see ``BoundFusion``.
    """
    bound = bind(fusion, sizes, numbers)
    check_replaced_shapes(bound)
    check_promises(bound)
    bound.ranks_per_node, bound.is_settled = ranks_per_node, True
    bound.has_cheap_sums, bound.passes_sums = has_cheap_sums, passes_sums
    trace, before = [("bind", fusion_text(bound))], _state(bound)
    for run in PASSES:
        run(bound)
        now = _state(bound)
        trace.append((run.__name__, trace[-1][1] if now == before else fusion_text(bound)))
        before = now
    verify(bound, PASSES[-1].__name__)
    found = segment_fusion(bound, device)
    order, beside = overlap([(s.segment, s.scheduler) for s in found], device)
    segments: list[PlannedSegment] = []
    for k in order:
        segments.append(_plan(found[k], segments, device, is_beside=k in beside))
    trace.append(("segments", "\n\n".join(map(_text, segments))))
    return Plan(bound, tuple(segments), tuple(trace), device)


def with_schedules(plan: Plan, chosen: Sequence[Schedule | None]) -> Plan:
    """``plan`` with these schedules for its segments; ``None`` leaves a segment, and those like it, as they are."""
    segments: list[PlannedSegment] = []
    for s, schedule in zip(plan.segments, chosen, strict=True):
        if s.like is not None:
            segments.append(replace(s, kernels=segments[s.like].kernels))
        else:
            kernels = s.kernels if schedule is None else kernels_of(s.scheduler, s.segment, plan.device, schedule)
            segments.append(replace(s, kernels=kernels))
    return replace(plan, segments=tuple(segments))


def sent(plan: Plan) -> list[str]:
    """What the ranks of ``plan`` send one another, in order, a line each: it has to be the same on all of them."""
    return [
        *seeds_sent(plan.fusion),
        *_sent_by_segments(plan),
        *[f"exchanges in a kernel: {p.name} # {p.exchange}" for s in plan.segments for p in s.kernels if p.exchange],
    ]


def _sent_by_segments(plan: Plan) -> list[str]:
    return [
        f"sends{' beside kernels' if s.is_beside else ''}: {line} # {communication_of(e)}"
        for s in plan.segments
        if s.scheduler == "communication"
        for e, line in zip(s.segment.exprs, str(s.segment).splitlines(), strict=True)
    ]


def _plan(
    scheduled: ScheduledSegment, before: Sequence[PlannedSegment], device: Device, *, is_beside: bool
) -> PlannedSegment:
    """``before``: the segments that were planned so far, of which one may be another chunk of the same."""
    segment, scheduler = scheduled.segment, scheduled.scheduler
    planned = PlannedSegment(segment, scheduler, scheduled.refusals, (), is_beside)
    if segment.exprs[0].chunk is not None and makes_kernels(scheduler):
        for k, s in enumerate(before):
            if s.like is None and s.scheduler == scheduler and s.segment.exprs[0].chunk is not None:
                renamed = renaming(s.segment, segment)
                if renamed is not None:
                    return replace(planned, kernels=s.kernels, like=k, renamed=renamed)
    return replace(planned, kernels=kernels_of(scheduler, segment, device))


def _state(fusion: BoundFusion) -> tuple[list[object], ...]:
    """What its text is made of: most passes change nothing of most fusions, and to print takes longer than they do."""
    return [*fusion.inputs], [*fusion.exprs], [*fusion.outputs], [t.domain for t in fusion.tensors()]


def _text(planned: PlannedSegment) -> str:
    return f"{planned.scheduler}{' beside kernels' if planned.is_beside else ''}:\n{planned.segment}"
