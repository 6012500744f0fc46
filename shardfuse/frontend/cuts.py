"""Where a plan is cut: two segments with kernels that might be one, what they move as two and as one, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..analysis.communication_table import local_bytes
from ..compiler import Plan
from ..device import Device
from ..ir.digits import extent
from ..ir.expr import Expr, reads_of
from ..schedulers import ALONE, makes_kernels
from ..schedulers.choice import choose_scheduler
from ..segments.segment import Segment


@dataclass(frozen=True)
class Cut:
    """Between the segments ``first`` and ``second``.

    ``bytes``: what the two read and write on one rank, each input once; ``joined``: what one segment in their place
    would; ``reason``: why there is none.
    """

    first: int
    second: int
    bytes: int
    joined: int
    reason: str

    def __str__(self) -> str:
        return f"cut {self.first} | {self.second}: {self.bytes} bytes, as one {self.joined}: {self.reason}"


def moved_bytes(segment: Segment) -> int:
    """Inputs read and outputs written once, on one rank.

    Of an input that is read through windows alone, what they hold, or all of it where that is less.
    """
    windows = segment.windows.values()
    seen = {t: 0 for t in segment.inputs if t not in segment.loads and any(t in e.tensors for e in windows)}
    for e in windows:
        if e.tensors[0] in seen:
            seen[e.tensors[0]] += _window_bytes(e)
    whole = [local_bytes(t) for t in (*segment.inputs, *segment.outputs) if t not in seen]
    return sum(whole) + sum(min(n, local_bytes(t)) for t, n in seen.items())


def _window_bytes(window: Expr) -> int:
    """Of the elements that a window has, on one rank."""
    moved = local_bytes(window.output)
    for r in reads_of(window):
        moved = moved // extent(window.output.domain.logical[r.axis]) * (r.stop - r.start)
    return moved


def cuts_of(plan: Plan) -> tuple[Cut, ...]:
    """A cut for each two kernels' segments of which the second reads what the first does, or makes."""
    segments = [s.segment for s in plan.segments]
    with_kernels = [k for k, s in enumerate(plan.segments) if makes_kernels(s.scheduler)]
    pairs = [(a, b) for b in with_kernels for a in with_kernels if a < b and _meet(segments[a], segments[b])]
    return tuple(_cut(plan, segments, a, b) for a, b in pairs)


def _meet(first: Segment, second: Segment) -> bool:
    """Does the second read a result of the first, or a tensor of two axes or more that the first reads?"""
    made = any(t in first.outputs for t in second.inputs)
    return made or any(t in first.inputs and sum(map(bool, t.domain.logical)) > 1 for t in second.inputs)


def _cut(plan: Plan, segments: Sequence[Segment], a: int, b: int) -> Cut:
    position = {expr: k for k, expr in enumerate(plan.fusion.exprs)}
    exprs = dict.fromkeys((*segments[a].exprs, *segments[b].exprs))
    others = {t for k, s in enumerate(segments) if k not in (a, b) for t in s.inputs}
    outputs = [t for t in (*segments[a].outputs, *segments[b].outputs) if t in others or t in plan.fusion.outputs]
    one = Segment.of(sorted(exprs, key=position.__getitem__), outputs)
    return Cut(
        a,
        b,
        moved_bytes(segments[a]) + moved_bytes(segments[b]),
        moved_bytes(one),
        _reason(segments, one, a, b, plan.device),
    )


def _reason(segments: Sequence[Segment], one: Segment, a: int, b: int, device: Device) -> str:
    reached = {a}
    for k in range(a + 1, b):
        if any(t in segments[h].outputs for h in reached for t in segments[k].inputs):
            reached.add(k)
    between = [k for k in reached - {a} if any(t in segments[k].outputs for t in segments[b].inputs)]
    if between:
        return f"segment {between[0]} stands between"
    name, refusals = choose_scheduler(one, device)
    if name is None or name in ALONE:
        return refusals[-1][1] if refusals else f"a {name} segment holds nothing else"
    saves = moved_bytes(one) < moved_bytes(segments[a]) + moved_bytes(segments[b])
    return (
        f"{name} would take both, but the segmenter did not try these two together"
        if saves
        else "that moves no fewer bytes"
    )
