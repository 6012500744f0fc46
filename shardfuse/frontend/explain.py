"""What a plan comes to: segments, kernels, collectives and bytes; prints as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..analysis.communication_table import Communication, communication_of, local_bytes, packed
from ..codegen.specialisation import Specialisation, specialised
from ..compiler import Plan, PlannedSegment
from ..device import Device
from ..executor.stream_chunks import places_of
from ..in_kernel_sums import EXCHANGE
from ..ir.op import Reduce, StreamCat
from ..ir.promises import SEGMENTS
from ..schedulers import SCHEDULERS
from ..schedulers.overwritten_inputs import replaceable
from ..schedulers.plan import KernelPlan, reads
from ..schedulers.schedule import Schedule
from .cuts import Cut, cuts_of, moved_bytes


@dataclass(frozen=True)
class SegmentExplanation:
    """``kernels``: names of the generated kernels; ``refusals``: what every other scheduler says, in order of priority.

    ``asked``: how many of them come before the chosen one.  ``bytes``: on one rank, each input read once, or as often
    as a loop walks over it, and each output written once.  ``sizes``: of each kernel, or stage, which axes it was
    written for and which may be of any size: a plan of another size has the same kernel, and compiles nothing.  Of
    contiguous tensors, on the first rank; a size so different that another tile is better has another kernel all the
    same.  ``schedules``: for each kernel the schedule of each of its stages, in the order in which they run.
    ``turns``: are elements that a plain reduction takes together side by side in memory in some of its large tensors,
    and apart in others?
    """

    scheduler: str
    kernels: tuple[str, ...]
    refusals: tuple[tuple[str, str], ...]
    asked: int
    bytes: int
    text: str
    sizes: tuple[Specialisation, ...]
    schedules: tuple[tuple[Schedule, ...], ...]
    turns: bool = False

    def schedule_lines(self) -> list[str]:
        """For each kernel a line with its schedules."""
        return [
            f"{name}: schedule: {'; then '.join(map(str, stages))}"
            for name, stages in zip(self.kernels, self.schedules, strict=True)
        ]


@dataclass(frozen=True)
class Explanation:
    """``kernels``: how many kernels one rank launches (torch calls apart); ``bytes``: what its segments read and write.

    ``copies``: outputs that are copied into an input's storage, as no kernel may write them there; ``bytes`` has them
    too.  ``cuts``: pairs of kernels' segments that read the same or one of which reads the other's result, and why they
    are not one.

    ``collectives``: those of the last call have also what exchanges pieces of DTensors that torch cuts elsewhere.

    A plan is the same on every rank.  Without a GPU it is for an H200, and ranks exchange by collectives.
    """

    segments: tuple[SegmentExplanation, ...]
    kernels: int
    collectives: tuple[Communication, ...]
    bytes: int
    copies: int
    cuts: tuple[Cut, ...]
    in_kernel: tuple[str, ...] = ()
    """Of each all-reduce, whether a kernel does it, or why none does."""
    promised: tuple[str, ...] = ()
    """What the fusion promises, and by what each kernel that adds up keeps it."""

    def __str__(self) -> str:
        copies = f"{self.copies} copies into inputs, " if self.copies else ""
        lines = [
            f"{len(self.segments)} segments, {self.kernels} kernels, "
            f"{len(self.collectives)} collectives, {copies}{self.bytes} bytes"
        ]
        for k, segment in enumerate(self.segments):
            names = f" -> {', '.join(segment.kernels)}" if segment.kernels else ""
            lines.append(f"segment {k}: {segment.scheduler}{names}, {segment.bytes} bytes")
            lines += [f"    {line}" for line in segment.text.splitlines()]
            lines += [f"    {line}" for line in (*segment.schedule_lines(), *segment.sizes)]
            lines += [
                f"    not {name}: {reason}"
                for name, reason in segment.refusals[: segment.asked]
                if name not in _OBVIOUS
            ]
        lines += [str(cut) for cut in self.cuts]
        lines += [f"collective: {c}" for c in self.collectives]
        lines += [f"exchange in a kernel: {said}" for said in self.in_kernel]
        lines += [f"promised: {said}" for said in self.promised]
        return "\n".join(lines)


_OBVIOUS = ("communication", "no_op", "torch_call")
"""Refusals that are in the record but say nothing new in print."""


def explain_plan(plan: Plan, exchanged: Sequence[Communication] = ()) -> Explanation:
    """``exchanged``: what the pieces of DTensors were exchanged by, before and after."""
    rank = next((t.domain.mesh.ranks[0] for t in plan.fusion.tensors() if t.domain.mesh is not None), 0)
    places = places_of([(s.segment, s.scheduler) for s in plan.segments], rank)
    segments = tuple(_segment(s, plan.device, is_placed=s.segment.outputs[0] in places) for s in plan.segments)
    found = [c for s in plan.segments for c in collectives_of(s)]
    collectives = (*exchanged, *(c for c in found if not c.is_free))
    replaced = replaceable(plan.fusion, [(s.segment, s.scheduler, s.kernels) for s in plan.segments])
    copied = [t for t in plan.fusion.aliases if t not in replaced]
    moved = sum(s.bytes for s in segments) + sum(2 * local_bytes(t) for t in copied)
    kernels = sum(len(s.kernels) for s in segments)
    told = plan.in_kernel, _promised(plan)
    return Explanation(segments, kernels, collectives, moved, len(copied), cuts_of(plan), *told)


def _promised(plan: Plan) -> tuple[str, ...]:
    promises = plan.fusion.promises
    found = [str(promises)] if promises.arguments else []
    if promises.ranks:
        ops = [e.op for e in plan.fusion.exprs if isinstance(e.op, Reduce)]
        if any(op.in_pairs for op in ops):
            found.append("float sums in pairs, of which a rank has a branch, whatever the kernel")
        if any(op.segments for op in ops):
            cut = f"float sums in {SEGMENTS} segments, or as many of them as divide the axis"
            found.append(f"{cut}, which ranks hand each other instead of sums")
    for kernel in (k for s in plan.segments for k in s.kernels if k.space.is_invariant):
        schedule, group = kernel.schedule, kernel.schedule.members
        shared = group or (schedule.parts if not kernel.space.walked else 1)
        who = f"{shared} programs of {schedule.launch.warps} warps" if shared > 1 else f"{schedule.launch.warps} warps"
        found.append(f"{kernel.name}: {who}, {schedule.reduced} elements at a time, for any number of rows")
    return tuple(found)


def collectives_of(planned: PlannedSegment) -> list[Communication]:
    """The calls that a segment makes: one where several collectives are packed, none of what its kernel exchanges."""
    exprs = planned.segment.exprs if planned.scheduler != EXCHANGE else ()
    one = packed(exprs) if planned.scheduler == "communication" else None
    return [one] if one is not None else [c for c in map(communication_of, exprs) if c is not None]


def _segment(planned: PlannedSegment, device: Device, *, is_placed: bool) -> SegmentExplanation:
    """``is_placed``: its output is a part of a tensor, or a tensor whose parts are made where they belong."""
    segment = planned.segment
    runs_nothing = planned.scheduler == "no_op" or (is_placed and isinstance(segment.exprs[0].op, StreamCat))
    moved = 0 if runs_nothing else moved_bytes(segment)
    own = planned.renamed
    again = [{own.get(t, t): n for t, n in reads(kernel).items()} for kernel in planned.kernels]
    moved += sum(local_bytes(t) * (counts.get(t, 1) - 1) for counts in again for t in segment.inputs)
    text = str(segment)
    if planned.scheduler == "communication":
        text += f"   # {collectives_of(planned)[0]}{', beside kernels' if planned.is_beside else ''}"
    if runs_nothing and is_placed:
        text += "   # made in parts, where they belong"
    kernels = tuple(k.name for k in planned.kernels)
    refusals = (*planned.refusals, *_later(planned, device))
    sizes = tuple(s for k in planned.kernels for s in _sizes(k))
    scheduler = "no_op" if runs_nothing else planned.scheduler
    schedules = tuple(tuple(stage.schedule for stage in k.stages or (k,)) for k in planned.kernels)
    turns = scheduler == "reduction" and any((k.stages or (k,))[0].space.is_turned for k in planned.kernels)
    return SegmentExplanation(scheduler, kernels, refusals, len(planned.refusals), moved, text, sizes, schedules, turns)


def _sizes(kernel: KernelPlan) -> tuple[Specialisation, ...]:
    tensors = [t for plan in kernel.stages or (kernel,) for t in (*plan.segment.inputs, *plan.segment.outputs)]
    rank = next((t.domain.mesh.ranks[0] for t in tensors if t.domain.mesh is not None), 0)
    return specialised(kernel, {t: t.domain.layout(rank) for t in tensors}, rank)


def _later(planned: PlannedSegment, device: Device) -> list[tuple[str, str]]:
    """What the schedulers behind the chosen one say, which the segmenter had no need to ask."""
    behind = SCHEDULERS[len(planned.refusals) + 1 :]
    return [(name, why_not(planned.segment, device) or f"{planned.scheduler} comes first") for name, why_not in behind]
