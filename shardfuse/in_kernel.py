"""in_kernel: a plan whose small all-reduces are inside of the kernels that make and read what is reduced.

For each all-reduce, in order: the segment that makes its partial results, itself, and the first segment that reads what
comes are one segment (``schedulers/rank_exchange.py``), where no segment between them needs what they make.  Where they
are not, the plan says why, and the collective stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .compiler import Plan, PlannedSegment
from .schedulers import makes_kernels
from .schedulers.plan import KernelPlan
from .schedulers.rank_exchange import Exchanged, exchanged, scheduled, why_not
from .schedulers.rank_gather import gathered
from .schedulers.segment import Segment

EXCHANGE = "exchange"
"""The scheduler of a segment whose ranks exchange words inside of its kernel."""


def with_exchanges(plan: Plan, why_none: str | None = None) -> Plan:
    """``plan`` with kernels that exchange; ``plan.in_kernel`` says of each all-reduce where it is, or why not.

    why_none: why no kernel exchanges anything here; "" where that goes without saying.
    """
    if not any(s.scheduler == "communication" for s in plan.segments):
        return plan
    if why_none is not None:
        return replace(plan, in_kernel=(f"none: {why_none}",) if why_none else ())
    segments, said = list(plan.segments), list[str]()
    for call in [s for s in plan.segments if s.scheduler == "communication"]:
        k = next(i for i, s in enumerate(segments) if s is call)
        found = _joined(plan, segments, k)
        name = ", ".join(str(t) for t in call.segment.outputs)
        said.append(f"{name}: {found if isinstance(found, str) else 'exchanged inside of a kernel'}")
        if not isinstance(found, str):
            segments = _with_readers(plan, found)
    if len(segments) == len(plan.segments):
        return replace(plan, in_kernel=tuple(said))
    text = "\n\n".join(f"{s.scheduler}:\n{s.segment}" for s in segments)
    trace = (*plan.trace, ("segments, with exchanges in kernels", text))
    return replace(plan, segments=tuple(segments), trace=trace, in_kernel=tuple(said), apart=plan)


def _joined(plan: Plan, segments: Sequence[PlannedSegment], k: int) -> list[PlannedSegment] | str:
    """``segments`` with the all-reduce ``k`` inside of a kernel, or why it is not."""
    call = segments[k].segment
    if call.exprs[0].op == "set":
        return _sent_within(plan, segments, k)
    makers = [i for i, s in enumerate(segments[:k]) if not set(s.segment.outputs).isdisjoint(call.inputs)]
    readers = [i for i, s in enumerate(segments) if i > k and not set(s.segment.inputs).isdisjoint(call.outputs)]
    if len(makers) != 1 or not readers:
        return "what it reduces is not made by one kernel and read by another"
    before, after = segments[makers[0]], segments[readers[0]]
    if not all(s.scheduler == EXCHANGE or makes_kernels(s.scheduler) for s in (before, after)):
        return "what it reduces is not made by one kernel and read by another"
    if any(s.like is not None or s.renamed for s in (before, after)) or _has_copies(segments, (makers[0], readers[0])):
        return "it is a chunk's of a stream"
    made = {*before.segment.outputs, *call.outputs}
    between = [s for i, s in enumerate(segments) if makers[0] < i < readers[0] and i != k]
    if any(not made.isdisjoint(s.segment.inputs) for s in between):
        return "a segment between its kernels reads what they make"
    mesh = call.exprs[0].output.domain.mesh
    if mesh is None or set(mesh.ranks) != _all_ranks(plan):
        return "some ranks of the program are not on its mesh"
    rest = [s for s in segments if s not in (before, segments[k], after)]
    needed = {*plan.fusion.outputs, *(t for s in rest for t in s.segment.inputs)}
    known = next((p.exchange for p in before.kernels), None)
    if any(p.exchange is not None for p in after.kernels):
        return "the kernel that reads it exchanges something else"
    found = exchanged(before.segment, known, call, after.segment, needed)
    refusal = found if isinstance(found, str) else why_not(found, plan.device)
    if refusal is not None or isinstance(found, str):
        return f"no kernel exchanges it: {refusal}"
    planned = PlannedSegment(found.segment, EXCHANGE, (), scheduled(found, plan.device))
    out: list[PlannedSegment] = []
    for s in segments:
        if s is after:
            out.append(planned)
        elif s is not before and s is not segments[k]:
            out.append(s)
    return out


def _sent_within(plan: Plan, segments: Sequence[PlannedSegment], k: int) -> list[PlannedSegment] | str:
    """``segments`` with the gather ``k`` of summands inside of the kernel that adds them up, or why it is not."""
    call = segments[k].segment
    readers = [s for s in segments if not set(s.segment.inputs).isdisjoint(call.outputs)]
    if len(readers) != 1 or not makes_kernels(readers[0].scheduler):
        return "what it gathers is not read by one kernel"
    (after,) = readers
    mesh = call.exprs[0].output.domain.mesh
    if mesh is None or set(mesh.ranks) != _all_ranks(plan):
        return "some ranks of the program are not on its mesh"
    needed = {*plan.fusion.outputs, *(t for s in segments if s is not after for t in s.segment.inputs)}
    found = gathered(call, after.segment, needed)
    refusal = found if isinstance(found, str) else why_not(found, plan.device)
    if refusal is not None or isinstance(found, str):
        return f"no kernel exchanges it: {refusal}"
    planned = PlannedSegment(found.segment, EXCHANGE, (), scheduled(found, plan.device))
    return [planned if s is after else s for s in segments if s is not segments[k]]


def _all_ranks(plan: Plan) -> set[int]:
    return {rank for t in plan.fusion.tensors() if t.domain.mesh is not None for rank in t.domain.mesh.ranks}


def _with_readers(plan: Plan, segments: list[PlannedSegment]) -> list[PlannedSegment]:
    """``segments`` with kernels that read what one that exchanges makes inside of it, where one kernel does both."""
    k = 0
    while k < len(segments):
        joined = _with_next_reader(plan, segments, k) if segments[k].scheduler == EXCHANGE else None
        segments, k = (segments, k + 1) if joined is None else (joined, 0)
    return segments


def _with_next_reader(plan: Plan, segments: list[PlannedSegment], k: int) -> list[PlannedSegment] | None:
    """``segments`` with the first reader of segment ``k`` inside of it, at the reader's place."""
    own = segments[k]
    made = set(own.segment.outputs)
    after = next((s for s in segments[k + 1 :] if not made.isdisjoint(s.segment.inputs)), None)
    if after is None or not makes_kernels(after.scheduler) or after.like is not None or after.renamed:
        return None
    needed = {*plan.fusion.outputs, *(t for s in segments if s not in (own, after) for t in s.segment.inputs)}
    exprs = [*own.segment.exprs, *(e for e in after.segment.exprs if e not in own.segment.exprs)]
    segment = Segment.of(exprs, [t for t in (*own.segment.outputs, *after.segment.outputs) if t in needed])
    exchange = own.kernels[0].exchange
    assert exchange is not None, "it exchanges"
    found = Exchanged(segment, exchange)
    if why_not(found, plan.device) is not None:
        return None
    planned = PlannedSegment(segment, EXCHANGE, (), scheduled(found, plan.device))
    return [planned if s is after else s for s in segments if s is not own]


def _has_copies(segments: Sequence[PlannedSegment], of: Sequence[int]) -> bool:
    """Do other segments run the kernels of these?  They are known by their numbers."""
    return any(s.like is not None for s in segments) and bool(of)


def exchanging(plan: Plan) -> list[tuple[int, KernelPlan]]:
    """The kernels of ``plan`` whose ranks exchange, each with the number of its segment."""
    return [(k, p) for k, s in enumerate(plan.segments) for p in s.kernels if p.exchange is not None]
