"""in_kernel_sums: all-reduces inside of the kernel that makes their summands and reads their sums."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from .analysis.communication_table import local_bytes
from .compiler import Plan, PlannedSegment
from .device import Device
from .ir.expr import BoundTensor, Expr
from .ir.op import Reduce
from .schedulers import kernels_of, makes_kernels
from .schedulers.choice import choose_scheduler
from .schedulers.exchange_forms import Form, exchanged_form, why_not_by_default
from .schedulers.plan import RankExchange
from .schedulers.rank_exchange import Exchanged, exchanged, scheduled, why_not, why_not_given
from .segments.segment import Segment, leading_to, segment_of

_READ_TWICE = 16 * 2**20
"""Bytes that are in L2 when a second kernel reads them: the column sums of a norm's backward are such a one."""
EXCHANGE = "exchange"
"""The scheduler of a segment whose ranks exchange words inside of its kernel."""


def reduced_within(
    plan: Plan, segments: Sequence[PlannedSegment], k: int, *, is_by_default: bool, has_loops: bool
) -> list[PlannedSegment] | str:
    """``segments`` with the all-reduce ``k`` inside of a kernel, or why it is not."""
    call = segments[k].segment
    makers = [i for i, s in enumerate(segments[:k]) if not set(s.segment.outputs).isdisjoint(call.inputs)]
    readers = [i for i, s in enumerate(segments) if i > k and not set(s.segment.inputs).isdisjoint(call.outputs)]
    if len(makers) != 1 or not readers:
        return "what it reduces is not made by one kernel and read by another"
    before, after = segments[makers[0]], segments[readers[0]]
    if not all(s.scheduler == EXCHANGE or makes_kernels(s.scheduler) for s in (before, after)):
        return "what it reduces is not made by one kernel and read by another"
    if any(s.like is not None for s in segments):  # they are known by their numbers
        return "it is a chunk's of a stream"
    made = {*before.segment.outputs, *call.outputs}
    between = [s for i, s in enumerate(segments) if makers[0] < i < readers[0] and i != k]
    if any(not made.isdisjoint(s.segment.inputs) for s in between):
        return "a segment between its kernels reads what they make"
    mesh = call.exprs[0].output.domain.mesh
    if mesh is None or set(mesh.ranks) != all_ranks(plan):
        return "some ranks of the program are not on its mesh"
    needed = needed_elsewhere(plan, segments, (before, segments[k], after))
    known = next((p.exchange for p in before.kernels), None)
    if any(p.exchange is not None for p in after.kernels):
        return "the kernel that reads it exchanges something else"
    refusal: str | None = None
    others = list[dict[int, list[PlannedSegment]]]()
    for own, reader, beside, behind in _ways(before.segment, call, after.segment, known, plan.device):
        read = {*needed, *(t for s in behind for t in s.segment.inputs)}
        found, why = _asked(exchanged(own, known, call, reader, read), plan.device)
        if why is None and not isinstance(found, str):
            planned = PlannedSegment(found.segment, EXCHANGE, (), scheduled(found, plan.device))
            instead = {makers[0]: beside, k: [], readers[0]: [planned, *behind]}
            why = _why_not_so(planned, segments, beside, has_loops=has_loops, is_by_default=is_by_default)
            if why is None and not reads_again(planned) and not _make_summands(beside, segments):
                return _with(segments, instead)
            others += [] if why is not None else [instead]
        refusal = refusal or why
    return _with(segments, others[0]) if others else f"no kernel exchanges it: {refusal}"


def _make_summands(made: Sequence[PlannedSegment], segments: Sequence[PlannedSegment]) -> bool:
    """Does one of those that are ``made`` make summands of a collective?  A kernel that has it too may spare that."""
    sums = [s.segment for s in segments if s.scheduler == "communication" and isinstance(s.segment.exprs[0].op, Reduce)]
    return any(not set(m.segment.outputs).isdisjoint(s.inputs) for m in made for s in sums)


def reads_again(planned: PlannedSegment) -> bool:
    """Does a kernel that exchanges read rows again that no program holds?"""
    return any(exchanged_form(p) is Form.LONG for p in planned.kernels)


def _with(segments: Sequence[PlannedSegment], instead: dict[int, list[PlannedSegment]]) -> list[PlannedSegment]:
    """``segments``, with those that are ``instead`` of one with such a number."""
    return [new for i, s in enumerate(segments) for new in instead.get(i, [s])]


def _why_not_so(
    planned: PlannedSegment,
    segments: Sequence[PlannedSegment],
    beside: Sequence[PlannedSegment],
    *,
    has_loops: bool,
    is_by_default: bool,
) -> str | None:
    """Why ``planned``, and ``beside``, the kernels of the rest, are not taken."""
    why = _why_no_loop(planned, segments, beside, has_loops=has_loops)
    given = (why_not_given(p.segment, p.rank_exchange) for p in planned.kernels)
    asked = map(why_not_by_default, planned.kernels) if is_by_default else ()
    return why or next(filter(None, (*given, *asked)), None)


def _why_no_loop(
    planned: PlannedSegment, segments: Sequence[PlannedSegment], beside: Sequence[PlannedSegment], *, has_loops: bool
) -> str | None:
    """Why two kernels and a collective are no slower than ``planned``, where that reads rows again in each phase.

    With another kernel for the rest the gradient of a group norm of 2 x 640 x 64 x 64, sharded by rows, took 32 us,
    with a collective between two kernels 25 (2 x H200, in a graph).  Behind a collective there are as many kernels.
    """
    if not reads_again(planned):
        return None
    if not has_loops:
        return "no program holds its rows, and no one kernel has all that is reduced of them"
    if beside:
        return "no program holds its rows, which another kernel would read once more"
    collectives = [s.segment for s in segments if s.scheduler == "communication"]
    sums = {t for s in collectives if isinstance(s.exprs[0].op, Reduce) for t in s.outputs}
    given = next((t for t in planned.segment.inputs if t in sums), None)
    return f"no program holds its rows, and a collective comes before it, for {given}" if given is not None else None


def is_half_exchanged(segments: Sequence[PlannedSegment], halves: Container[BoundTensor]) -> bool:
    """Is a collective left where a kernel exchanges as it reads its rows again: of what that makes, or of others of the
    sums that one collective had?

    Then there are as many launches as without, and one that is slower.  halves: those sums.
    """
    loops = [s for s in segments if s.scheduler == EXCHANGE and reads_again(s)]
    own = (t for s in loops for p in s.kernels for t in p.rank_exchange.statistics)
    return _make_summands(loops, segments) or any(t in halves for t in own)


def _ways(
    before: Segment, call: Segment, after: Segment, known: RankExchange | None, device: Device
) -> Iterator[tuple[Segment, Segment, list[PlannedSegment], list[PlannedSegment]]]:
    """What one kernel may do of ``before`` and ``after``, and segments of the rest of either; at first all of both."""
    yield before, after, [], []
    own, rest = _parted(before, call, device) if known is None else (before, None)
    if rest is not None:
        yield own, after, [rest], []
    own, rest = _of_rows(after, call, device)
    if rest is not None:
        yield before, own, [], [rest]


def _asked(found: Exchanged | str, device: Device) -> tuple[Exchanged | str, str | None]:
    """What was found, with why no kernel does it."""
    return found, found if isinstance(found, str) else why_not(found, device)


def _parted(before: Segment, call: Segment, device: Device) -> tuple[Segment, PlannedSegment | None]:
    """What makes the arguments of ``call``, and what makes the rest, where reading the inputs twice is cheap."""
    others = [t for t in before.outputs if t not in call.inputs]
    if not others or sum(map(local_bytes, before.inputs)) > _READ_TWICE:
        return before, None
    exprs = leading_to(before.exprs, others)
    rest = Segment.of(exprs, others)
    name, refusals = choose_scheduler(rest, device)
    if name is None or not makes_kernels(name):
        return before, None
    own = segment_of(before.exprs, call.inputs)
    return own, PlannedSegment(rest, name, refusals, kernels_of(name, rest, device))


def _of_rows(after: Segment, call: Segment, device: Device) -> tuple[Segment, PlannedSegment | None]:
    """What of ``after`` is made of each row that ``call`` has a number for, and what adds such numbers up.

    A loss that is the mean of rows is one: the kernel that exchanges has a row at a time, and another reads what few
    numbers it has made of them.
    """
    rows = max(t.domain.local_elements for t in call.outputs)
    late: list[Expr] = []
    for e in after.exprs:
        made = {t for x in late for t in x.outputs}
        if isinstance(e.op, Reduce) or not made.isdisjoint(e.tensors):
            late.append(e)
    rest = Segment.of(late, after.outputs)
    if not late or any(t.domain.local_elements > rows for t in rest.inputs):
        return after, None
    name, refusals = choose_scheduler(rest, device)
    if name is None or not makes_kernels(name):
        return after, None
    behind = {t for e in late for t in e.outputs}
    own = segment_of(after.exprs, [t for t in (*after.outputs, *rest.inputs) if t in after.maker and t not in behind])
    return own, PlannedSegment(rest, name, refusals, kernels_of(name, rest, device))


def needed_elsewhere(plan: Plan, segments: Sequence[PlannedSegment], but: Sequence[PlannedSegment]) -> set[BoundTensor]:
    """What other segments than these read, and callers."""
    rest = [s for s in segments if all(s is not own for own in but)]
    return {*plan.fusion.outputs, *(t for s in rest for t in s.segment.inputs)}


def all_ranks(plan: Plan) -> set[int]:
    return {rank for t in plan.fusion.tensors() if t.domain.mesh is not None for rank in t.domain.mesh.ranks}
