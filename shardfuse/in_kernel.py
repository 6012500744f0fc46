"""in_kernel: a plan whose collectives are inside of the kernels that make and read what is sent.

For each all-reduce, in order: the segment that makes its partial results, itself, and the first segment that reads what
comes are one segment (``schedulers/rank_exchange.py``), where no segment between them needs what they make.  Of what
makes or reads it, a part that no such kernel does may be a segment of its own, before or behind.  A gather of partial
sums is one with the segment that adds them up (``schedulers/rank_gather.py``), and so are a reduce-scatter, the segment
that reads it, and the gather of what that makes (``schedulers/rank_scatter.py``).  Where they are not one, the plan
says why, and the collective stays.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial

from .analysis.chain import ONE_STEP_BYTES
from .analysis.communication_table import Collective, communication_of, local_bytes
from .compiler import Plan, PlannedSegment
from .in_kernel_sums import EXCHANGE, all_ranks, is_half_exchanged, needed_elsewhere, reads_again, reduced_within
from .ir.expr import BoundTensor, Expr
from .ir.op import Reduce
from .mesh import DeviceMesh, ParallelType
from .schedulers import makes_kernels
from .schedulers.exchange_forms import HAVE_RUN, Form, why_not_by_default
from .schedulers.features import features_or_refusal
from .schedulers.plan import KernelPlan
from .schedulers.rank_exchange import Exchanged, in_two_steps, scheduled, why_not, why_not_given
from .schedulers.rank_gather import gathered
from .schedulers.rank_scatter import Scattered, made_and_gathered, scattered
from .segments.segment import Segment

WhyApart = Callable[[DeviceMesh, ParallelType], str | None]
"""Why ranks along a dimension of a mesh cannot exchange words; ``None`` where they can."""


def with_exchanges(
    plan: Plan,
    why_none: str | None = None,
    why_apart: WhyApart = lambda mesh, parallel_type: None,
    *,
    is_by_default: bool = False,
    are_parted: bool = True,
    has_loops: bool = True,
) -> Plan:
    """``plan`` with kernels that exchange; ``plan.in_kernel`` says of each all-reduce where it is, or why not.

    why_none: why no kernel exchanges anything here; "" where that goes without saying.  is_by_default: the caller
    has not asked for kernels, so that they are of forms which have run over GPUs.  are_parted: may an all-reduce of
    what several kernels make be one of each?  has_loops: may a kernel that exchanges read its rows in each phase?
    """
    if not any(s.scheduler == "communication" for s in plan.segments):
        return plan
    if why_none is not None:
        return replace(plan, in_kernel=(f"none: {why_none}",) if why_none else ())
    segments, said, halves = _views_last(plan.segments), list[str](), set[BoundTensor]()
    for whole in [s for s in plan.segments if s.scheduler == "communication"]:
        parts = _by_maker(segments, whole) if are_parted else [whole]
        segments = [part for s in segments for part in (parts if s is whole else [s])]
        left = list[PlannedSegment]()
        for call in parts:
            name = ", ".join(str(t) for t in call.segment.outputs)
            k = next((i for i, s in enumerate(segments) if s is call), None)
            if k is None:  # the gather of what a kernel makes of its part of a sum
                said.append(f"{name}: exchanged inside of a kernel")
                continue
            apart = [why_apart(mesh, dim) for mesh, dim in _lines(call.segment)]
            found = next((why for why in apart if why is not None), None) or _joined(
                plan, segments, k, is_by_default=is_by_default, has_loops=has_loops
            )
            found = _not_yet(found, segments) or found if is_by_default else found
            said.append(f"{name}: {found if isinstance(found, str) else 'exchanged inside of a kernel'}")
            if isinstance(found, str):
                left.append(call)
            else:
                segments = _with_readers(plan, found)
        halves.update(whole.segment.outputs if 0 < len(left) < len(parts) else ())
        segments = _together_again(segments, whole, left)
    if not any(s.scheduler == EXCHANGE for s in segments):
        return replace(plan, in_kernel=tuple(said))
    again = partial(with_exchanges, plan, why_none, why_apart, is_by_default=is_by_default)
    if has_loops and is_half_exchanged(segments, halves):
        return again(are_parted=are_parted, has_loops=False)
    why = _why_not_these(segments, is_by_default=is_by_default)
    if why is not None and are_parted:
        return again(are_parted=False, has_loops=has_loops)
    if why is not None:
        return replace(plan, in_kernel=(f"none: {why}",))
    text = "\n\n".join(f"{s.scheduler}:\n{s.segment}" for s in segments)
    trace = (*plan.trace, ("segments, with exchanges in kernels", text))
    return replace(plan, segments=tuple(segments), trace=trace, in_kernel=tuple(said), apart=plan)


def _why_not_these(segments: Sequence[PlannedSegment], *, is_by_default: bool) -> str | None:
    """Why kernels that exchange are none, for what all of them make or by their forms."""
    for segment in segments:
        asked = [p for p in segment.kernels if p.exchange is not None]
        found = [why_not_given(p.segment, p.rank_exchange) for p in asked]
        found += map(why_not_by_default, asked) if is_by_default else []
        why = next((why for why in found if why is not None), None)
        if why is not None:
            return why
    return None


def _by_maker(segments: Sequence[PlannedSegment], call: PlannedSegment) -> list[PlannedSegment]:
    """``call`` as all-reduces of what one segment makes each: alone a kernel may have it, together none has."""
    makers: dict[int, list[Expr]] = {}
    for e in call.segment.exprs:
        made = (i for i, s in enumerate(segments) if e.tensors[0] in s.segment.outputs)
        makers.setdefault(next(made, -1), []).append(e)
    if len(makers) < 2 or call.like is not None or not all(isinstance(e.op, Reduce) for e in call.segment.exprs):
        return [call]
    return [replace(call, segment=Segment.of(own, [t for e in own for t in e.outputs])) for own in makers.values()]


def _together_again(
    segments: Sequence[PlannedSegment], whole: PlannedSegment, left: Sequence[PlannedSegment]
) -> list[PlannedSegment]:
    """``segments`` with those parts of ``whole`` that are left as one collective, where the first of them is."""
    exprs = [e for e in whole.segment.exprs if any(e in part.segment.exprs for part in left)]
    if exprs == list(whole.segment.exprs):
        again = whole
    else:
        again = replace(whole, segment=Segment.of(exprs, [t for e in exprs for t in e.outputs]))
    return [again if left and s is left[0] else s for s in segments if all(s is not part for part in left[1:])]


def _views_last(segments: Sequence[PlannedSegment]) -> list[PlannedSegment]:
    """``segments`` with those that only view what others make where one first reads them, or at the end.

    A view of a statistic, which is an output of the program, would stand between the kernels that become one.
    """
    if any(s.like is not None for s in segments):  # they are known by their numbers
        return list(segments)
    views, found = [s for s in segments if s.scheduler == "no_op"], list[PlannedSegment]()

    def put(segment: PlannedSegment) -> None:
        for view in [v for v in views if not set(v.segment.outputs).isdisjoint(segment.segment.inputs)]:
            if view in views:  # one that an earlier of them reads has been put
                views.remove(view)
                put(view)
        found.append(segment)

    for segment in segments:
        if segment.scheduler != "no_op":
            put(segment)
    while views:
        put(views.pop(0))
    return found


def _not_yet(found: list[PlannedSegment] | str, before: Sequence[PlannedSegment]) -> str | None:
    """Why a gather that was joined is not, by default: its collective stays, and other kernels exchange."""
    if isinstance(found, str):
        return None
    made = [p for s in found if all(s is not other for other in before) for p in s.kernels]
    asked = [p for p in made if p.exchange is not None and p.exchange.gathered is not None]
    return next((why for why in map(why_not_by_default, asked) if why is not None), None)


def _lines(call: Segment) -> list[tuple[DeviceMesh, ParallelType]]:
    """Over which dimensions of which meshes it communicates."""
    found = [(e.output.domain.mesh, communication_of(e)) for e in call.exprs]
    return [(mesh, c.mesh_dim) for mesh, c in found if mesh is not None and c is not None and c.mesh_dim is not None]


def _joined(
    plan: Plan, segments: Sequence[PlannedSegment], k: int, *, is_by_default: bool, has_loops: bool
) -> list[PlannedSegment] | str:
    """``segments`` with the collective ``k`` inside of a kernel, or why it is not."""
    exprs = segments[k].segment.exprs
    kinds = {c.kind for c in map(communication_of, exprs) if c is not None}
    if not kinds.isdisjoint((Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)):
        return _scattered_within(plan, segments, k)
    if isinstance(exprs[0].op, Reduce):
        return reduced_within(plan, segments, k, is_by_default=is_by_default, has_loops=has_loops)
    found = _sent_within(plan, segments, k, is_by_default=is_by_default)
    return found if not isinstance(found, str) else _made_within(plan, segments, k) or found


def _sent_within(
    plan: Plan, segments: Sequence[PlannedSegment], k: int, *, is_by_default: bool
) -> list[PlannedSegment] | str:
    """``segments`` with the gather ``k`` of summands inside of the kernel that adds them up, or why it is not."""
    call = segments[k].segment
    places = [i for i, s in enumerate(segments) if not set(s.segment.inputs).isdisjoint(call.outputs)]
    readers = [segments[i] for i in places]
    if not readers or not all(makes_kernels(s.scheduler) for s in readers):
        return "what it gathers is not read by kernels"
    if any(s.like is not None for s in segments):  # they are known by their numbers
        return "it is a chunk's of a stream"
    mesh = call.exprs[0].output.domain.mesh
    if mesh is None or set(mesh.ranks) != all_ranks(plan):
        return "some ranks of the program are not on its mesh"
    made = {t for s in readers[:-1] for t in s.segment.outputs}
    between = [segments[i] for i in range(places[0], places[-1]) if i not in places]
    if any(not made.isdisjoint(s.segment.inputs) for s in between):
        return "a segment between its kernels reads what they make"
    needed = needed_elsewhere(plan, segments, readers)
    found = gathered(call, _together([s.segment for s in readers], needed), needed)
    if not isinstance(found, str) and may_pass_on(is_by_default=is_by_default):
        found = in_two_steps(found, plan.device)
    refusal = found if isinstance(found, str) else _why_not_by_all(plan, found) or why_not(found, plan.device)
    if refusal is not None or isinstance(found, str):
        return f"no kernel exchanges it: {refusal}"
    planned = PlannedSegment(found.segment, EXCHANGE, (), scheduled(found, plan.device))
    if segments[k].is_beside and any(p.exchange is not None and p.exchange.is_in_rows for p in planned.kernels):
        return "it runs beside other kernels, as a collective does"
    return [planned if i == places[-1] else s for i, s in enumerate(segments) if i not in (k, *places[:-1])]


def _why_not_by_all(plan: Plan, found: Exchanged) -> str | None:
    """Why each rank does not add up all summands, of a plan that gathers them for ranks to pass on their sums."""
    exchange = found.exchange
    if not plan.fusion.passes_sums or exchange.passed is not None or exchange.sent is None:
        return None
    more = (exchange.ranks - 2) * local_bytes(exchange.sent)
    return None if more <= ONE_STEP_BYTES else f"of {exchange.sent} {more} bytes more are sent than in two steps"


def may_pass_on(*, is_by_default: bool) -> bool:
    """May ranks pass on inside of a kernel what each has added up?"""
    return Form.PASSED in HAVE_RUN or not is_by_default


def _together(segments: Sequence[Segment], needed: Container[BoundTensor]) -> Segment:
    """What all of ``segments`` do, each what those before it do not, for what is ``needed`` outside of them.

    A row may be of too many bytes for one kernel that reads all summands of it, and not for one that sends its own.
    """
    exprs = list(dict.fromkeys(e for s in segments for e in s.exprs))
    return Segment.of(exprs, [t for t in dict.fromkeys(t for s in segments for t in s.outputs) if t in needed])


def _scattered_within(plan: Plan, segments: Sequence[PlannedSegment], k: int) -> list[PlannedSegment] | str:
    """``segments`` with the reduce-scatter ``k``, its reader and the gather of what that makes as one kernel's."""
    call = segments[k]
    readers = [s for s in segments if not set(s.segment.inputs).isdisjoint(call.segment.outputs)]
    if len(readers) != 1 or not makes_kernels(readers[0].scheduler):
        return "what it adds up is not read by one kernel"
    (own,) = readers
    made = set(own.segment.outputs)
    gathers = [s for s in segments if s.scheduler == "communication" and not made.isdisjoint(s.segment.inputs)]
    gathers = [s for s in gathers if not any(isinstance(e.op, Reduce) for e in s.segment.exprs)]
    if len(gathers) != 1:
        return "what its reader makes is not gathered, by one call"
    (after,) = gathers
    together = (call, own, after)
    found = scattered(call.segment, own.segment, after.segment, needed_elsewhere(plan, segments, together))
    return _with_gather(plan, segments, together, found)


def _with_gather(
    plan: Plan, segments: Sequence[PlannedSegment], together: Sequence[PlannedSegment], joined: Scattered | str
) -> list[PlannedSegment] | str:
    """``segments`` with ``joined`` in place of those that it is made of, of which the last is a gather, or why not."""
    if any(s.like is not None for s in segments):  # they are known by their numbers
        return "it is a chunk's of a stream"
    if any(s.is_beside for s in together):
        return "it runs beside other kernels, as a collective does"
    mesh = together[-1].segment.exprs[0].output.domain.mesh
    if mesh is None or set(mesh.ranks) != all_ranks(plan):
        return "some ranks of the program are not on its mesh"
    refusal = joined if isinstance(joined, str) else why_not(joined.found, plan.device)
    if refusal is not None or isinstance(joined, str):
        return f"no kernel exchanges it: {refusal}"
    exprs = [e for s in together for e in s.segment.exprs]
    outputs = [joined.given.get(t, t) for t in joined.found.segment.outputs]
    kernels = scheduled(joined.found, plan.device)
    planned = PlannedSegment(Segment.of(exprs, outputs), EXCHANGE, (), kernels, renamed=joined.given)
    own = next(s for s in together if s.scheduler != "communication")
    return [planned if s is own else s for s in segments if s is own or all(s is not t for t in together)]


def _made_within(plan: Plan, segments: Sequence[PlannedSegment], k: int) -> list[PlannedSegment] | str | None:
    """``segments`` with the gather ``k`` inside of the kernel that makes what is gathered, or why it is not.

    ``None`` where no one kernel makes it.
    """
    call = segments[k]
    makers = [s for s in segments if not set(s.segment.outputs).isdisjoint(call.segment.inputs)]
    if len(makers) != 1 or not makes_kernels(makers[0].scheduler):
        return None
    (own,) = makers
    space = features_or_refusal(own.segment, plan.device)
    if isinstance(space, str) or space.phases < 2:  # a norm does, whose rows are held anyway
        return space if isinstance(space, str) else "it reduces no rows"
    found = made_and_gathered(own.segment, call.segment, needed_elsewhere(plan, segments, (own, call)))
    return _with_gather(plan, segments, (own, call), found)


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
    if after is None or not makes_kernels(after.scheduler):
        return None
    needed = needed_elsewhere(plan, segments, (own, after))
    segment = _together([own.segment, after.segment], needed)
    exchange = own.kernels[0].exchange
    assert exchange is not None, "it exchanges"
    found = Exchanged(segment, replace(exchange, passed=None))
    if exchange.passed is not None:
        found = in_two_steps(found, plan.device)
    if why_not(found, plan.device) is not None:
        return None
    planned = PlannedSegment(segment, EXCHANGE, (), scheduled(found, plan.device))
    if reads_again(planned) and not reads_again(own):
        return None
    return [planned if s is after else s for s in segments if s is not own]


def exchanging(plan: Plan) -> list[tuple[int, KernelPlan]]:
    """The kernels of ``plan`` whose ranks exchange, each with the number of its segment."""
    return [(k, p) for k, s in enumerate(plan.segments) for p in s.kernels if p.exchange is not None]
