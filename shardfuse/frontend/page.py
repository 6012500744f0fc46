"""A plan as one HTML page that needs nothing else: graph, cuts, kernels against the roof, meshes, and a timeline.

The roof of a kernel is a copy that moves as many bytes: `COPY_BANDWIDTH` of an H200.  Expected times are those of the
roof, and for collectives what the planner counts on; measured ones are of a `Timeline` of the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..analysis.chain import h200_nodes
from ..analysis.communication_table import Collective, Communication
from ..compiler import Plan
from ..errors import PageError
from ..executor.timeline import HOST, Timeline
from ..ir.digits import extent
from ..ir.expr import BoundTensor
from ..mesh import DeviceMesh
from .explain import Explanation, SegmentExplanation, collectives_of
from .holdings import held_text
from .page_drawing import Bar, Graph, Node, bars_svg, graph_svg
from .page_style import STYLE

COPY_BANDWIDTH = h200_nodes(1).memory
"""Bytes that an H200 reads and writes in a second when it copies."""
_MOST_RANKS = 64
"""Of a larger mesh the first ranks are shown."""
_RECEIVED = {Collective.ALL_REDUCE: 2.0, Collective.BROADCAST: 0.0, Collective.SEND: 0.0}


@dataclass(frozen=True)
class Step:
    """A segment with its times, in microseconds; ``measured`` is ``None`` where no timeline has it."""

    number: int
    explained: SegmentExplanation
    outputs: str
    kind: str
    expected: float
    measured: float | None


def write_page(path: str | Path, plan: Plan, explained: Explanation, timeline: Timeline | None = None) -> None:
    """Write the page of ``plan``; ``timeline``: of a run of it.  Raises ``PageError``."""
    write_document("explain", path, page(plan, explained, timeline))


def page(plan: Plan, explained: Explanation, timeline: Timeline | None = None) -> str:
    """The text of the page, the same on every rank but for ``timeline``."""
    steps = _steps(plan, explained, timeline)
    sections = (
        _head(explained, steps),
        _graph(plan, explained, steps),
        _cuts(explained),
        kernels_table(steps, is_on_cpu=timeline is not None and _is_on_cpu(timeline)),
        _collectives(explained.collectives, plan),
        _meshes(plan),
        _timeline(steps, timeline),
        _segments(steps),
    )
    return document("Plan of a fusion", sections)


def document(title: str, sections: Sequence[str]) -> str:
    """A page of its own, which asks nothing of a network."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n{''.join(sections)}</body></html>\n"
    )


def write_document(function: str, path: str | Path, text: str) -> None:
    """Write what the argument ``html`` of ``function`` asks for.  Raises ``PageError``."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PageError(function, str(path), error) from error


def numbers_text(numbers: Sequence[tuple[str, str]]) -> str:
    """Names and their figures, side by side."""
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in numbers)
    return f"<div class=numbers>{cells}</div>"


def _steps(plan: Plan, explained: Explanation, timeline: Timeline | None) -> list[Step]:
    steps: list[Step] = []
    for k, (planned, told) in enumerate(zip(plan.segments, explained.segments, strict=True)):
        outputs = ", ".join(map(str, planned.segment.outputs))
        spans = [
            s.end - s.start
            for s in (timeline.spans if timeline is not None else ())
            if s.name in _names(told) or s.name.endswith(f" {outputs}")
        ]
        if told.scheduler == "communication":
            kind, expected = "communication", sum(_communication_us(c, plan) for c in collectives_of(planned))
        else:
            kind, expected = "kernel" if told.kernels else "other", told.bytes / COPY_BANDWIDTH * 1e6
        steps.append(Step(k, told, outputs, kind, expected, sum(spans) if spans else None))
    return steps


def _names(told: SegmentExplanation) -> tuple[str, ...]:
    """Of all launches of a segment: its kernels, and the stages of those that take several launches."""
    return (*told.kernels, *(s.kernel for s in told.sizes))


def _head(explained: Explanation, steps: Sequence[Step]) -> str:
    expected = sum(s.expected for s in steps)
    measured = [s.measured for s in steps if s.measured is not None]
    numbers = [
        ("segments", str(len(explained.segments))),
        ("kernels", str(explained.kernels)),
        ("collectives", str(len(explained.collectives))),
        ("moved in memory, on one rank", size_text(explained.bytes)),
        ("expected", f"{expected:.1f} us"),
    ]
    if measured:
        numbers.append(("measured", f"{sum(measured):.1f} us"))
    roof = f"{COPY_BANDWIDTH / 1e12:g} TB/s"
    return (
        f"<h1>Plan of a fusion</h1><p class=soft>The roof is a copy on an H200, which moves {roof}: "
        f"expected times are those of copies of as many bytes.</p>{numbers_text(numbers)}"
    )


def _graph(plan: Plan, explained: Explanation, steps: Sequence[Step]) -> str:
    inputs = [v for v in plan.fusion.inputs if isinstance(v, BoundTensor)]
    made: dict[BoundTensor, str] = {t: f"in {t}" for t in inputs}
    nodes = [Node(f"in {t}", "input", (f"{t}", f"{t.dtype.name}", _shape(t))) for t in inputs]
    edges: dict[tuple[str, str], list[str]] = {}
    for step, planned in zip(steps, plan.segments, strict=True):
        key = f"segment {step.number}"
        name = step.explained.kernels[0] if step.explained.kernels else step.outputs
        nodes.append(Node(key, step.kind, (f"{step.number}: {step.explained.scheduler}", name, _cost(step))))
        for t in planned.segment.inputs:
            if t in made:
                edges.setdefault((made[t], key), []).append(str(t))
        made.update(dict.fromkeys(planned.segment.outputs, key))
    for t in plan.fusion.outputs:
        nodes.append(Node(f"out {t}", "output", (f"output {t}", f"{t.dtype.name}", _shape(t))))
        if t in made:
            edges.setdefault((made[t], f"out {t}"), []).append(str(t))
    cuts = [(f"segment {c.first}", f"segment {c.second}") for c in explained.cuts]
    drawn = graph_svg(Graph(tuple(nodes), {k: ", ".join(names) for k, names in edges.items()}, cuts))
    key = "".join(
        f'<span><i style="background:var(--{colour})"></i>{name}</span>'
        for colour, name in (
            ("io", "inputs and outputs"),
            ("kernel", "a kernel"),
            ("communication", "a collective"),
            ("other", "views and calls of torch"),
        )
    )
    dashed = " A dashed line is a cut: two kernels that might have been one." if cuts else ""
    text = f"<p class=key>{key}</p><p class=soft>Shapes are unsharded.{dashed}</p>"
    return f"<h2>Graph</h2>{text}<div class=wide>{drawn}</div>"


def _cuts(explained: Explanation) -> str:
    if not explained.cuts:
        return "<h2>Cuts</h2><p>None: no two kernels read the same tensor, or one another's results.</p>"
    rows = "".join(
        f"<tr><td>{c.first} and {c.second}</td><td class=number>{size_text(c.bytes)}</td>"
        f"<td class=number>{size_text(c.joined)}</td><td>{escape(c.reason)}</td></tr>"
        for c in explained.cuts
    )
    head = (
        "<tr><th>segments</th><th class=number>move</th><th class=number>as one</th><th>why they are not one</th></tr>"
    )
    return f"<h2>Cuts</h2><div class=wide><table>{head}{rows}</table></div>"


def kernels_table(steps: Sequence[Step], *, is_on_cpu: bool) -> str:
    """A row for each segment that moves bytes, with what a copy of as many takes, without a launch; with a timeline
    measured times, else lengths against the longest."""
    moving = [s for s in steps if s.kind != "communication" and s.explained.bytes]
    is_measured = any(s.measured is not None for s in steps)
    most = max((s.expected for s in moving), default=0.0)
    rows: list[str] = []
    for s in moving:
        share, text = None, ""
        if not is_measured:
            share = s.expected / most
        elif is_on_cpu:
            text = "the roof is a GPU's"
        elif s.measured:
            share = s.expected / s.measured
            text = f"{share:.0%} of the roof"
        bar = "" if share is None else f'<div class=share><i style="width:{min(share, 1):.0%}"></i></div>'
        name = ", ".join(s.explained.kernels) or s.outputs
        us = "–" if s.measured is None else f"{s.measured:.1f} us"
        rows.append(
            f"<tr><td>{s.number}</td><td><code>{escape(name)}</code></td>"
            f"<td class=number>{size_text(s.explained.bytes)}</td><td class=number>{s.expected:.1f} us</td>"
            f"{f'<td class=number>{us}</td>' if is_measured else ''}<td>{bar}{text}</td></tr>"
        )
    head = (
        "<tr><th></th><th>kernel</th><th class=number>bytes</th><th class=number>a copy takes</th>"
        f"{'<th class=number>measured</th><th>share</th>' if is_measured else '<th>against the longest</th>'}</tr>"
    )
    return f"<h2>Kernels</h2><div class=wide><table>{head}{''.join(rows)}</table></div>"


def _collectives(collectives: Sequence[Communication], plan: Plan) -> str:
    if not collectives:
        return "<h2>Collectives</h2><p>None.</p>"
    rows = "".join(
        f"<tr><td>{escape(c.kind)}</td><td>{escape(', '.join(map(str, c.mesh_dims)) or 'between meshes')}</td>"
        f"<td class=number>{c.team}</td><td class=number>{size_text(c.bytes)}</td>"
        f"<td class=number>{_communication_us(c, plan):.1f} us</td></tr>"
        for c in collectives
    )
    head = (
        "<tr><th>kind</th><th>over</th><th class=number>ranks</th><th class=number>bytes</th>"
        "<th class=number>expected</th></tr>"
    )
    return f"<h2>Collectives</h2><div class=wide><table>{head}{rows}</table></div>"


def _communication_us(c: Communication, plan: Plan) -> float:
    """As the planner counts: a latency, and what a rank receives over its link."""
    share = (c.team - 1) / c.team if c.team else 0.0
    received = c.bytes * (share * _RECEIVED.get(c.kind, 1.0) or 1.0)
    return h200_nodes(plan.fusion.ranks_per_node).seconds(range(c.team), received, 0.0) * 1e6


def _meshes(plan: Plan) -> str:
    """A table for each mesh: a row a rank, a column a tensor that stays or comes there."""
    ends = dict.fromkeys((*plan.fusion.inputs, *plan.fusion.outputs))
    tensors = [t for t in ends if isinstance(t, BoundTensor) and t.domain.mesh is not None]
    if not tensors:
        return "<h2>Mesh</h2><p>None: every rank that runs this has all of each tensor.</p>"
    meshes = dict.fromkeys(t.domain.mesh for t in tensors if t.domain.mesh is not None)
    return "<h2>Mesh: who holds what</h2>" + "".join(
        _mesh(m, [t for t in tensors if t.domain.mesh == m]) for m in meshes
    )


def _mesh(mesh: DeviceMesh, tensors: Sequence[BoundTensor]) -> str:
    names = "".join(f"<th><code>{escape(str(t))}</code> {_shape(t)}</th>" for t in tensors)
    rows = [f"<tr><th>rank</th><th>at {escape(str(list(mesh.shape)))}</th>{names}</tr>"]
    for rank in mesh.ranks[:_MOST_RANKS]:
        cells = "".join(f"<td><code>{escape(_held(t, rank))}</code></td>" for t in tensors)
        rows.append(f"<tr><td>{rank}</td><td><code>{escape(str(mesh.coordinate(rank)))}</code></td>{cells}</tr>")
    left = f"<p class=soft>The first {_MOST_RANKS} of {mesh.size} ranks.</p>" if mesh.size > _MOST_RANKS else ""
    text = "<caption>Unsharded indices that each rank has, start:stop for each axis.</caption>"
    return f"<div class=wide><table>{text}{''.join(rows)}</table></div>{left}"


def _held(tensor: BoundTensor, rank: int) -> str:
    parts = [held_text(tensor.domain, dim, rank) for dim in range(tensor.ndim)]
    return "nothing" if "nothing" in parts else f"[{', '.join(parts)}]"


def _timeline(steps: Sequence[Step], timeline: Timeline | None) -> str:
    if timeline is not None:
        kinds = {name: s.kind for s in steps for name in _names(s.explained)}
        kinds.update({s.outputs: s.kind for s in steps})
        bars = [Bar(s.stream, s.name, _kind(s.name, kinds), s.start, s.end) for s in timeline.spans]
        both = "" if _is_on_cpu(timeline) else f", {timeline.overlapped():.1f} us of them on both streams"
        where = "the CPU" if _is_on_cpu(timeline) else "the GPU"
        text = f"Measured on {where} of rank {timeline.rank}: {timeline.us:.1f} us{both}."
    else:
        bars, now = list[Bar](), 0.0
        for s in steps:
            if s.expected:
                row = "collectives" if s.kind == "communication" else "kernels"
                name = s.explained.kernels[0] if s.explained.kernels else f"{s.explained.scheduler} {s.outputs}"
                bars.append(Bar(row, name, s.kind, now, now + s.expected))
                now += s.expected
        text = "Expected, one step after the other; pass timeline=fd.timeline(inputs) for what was measured."
    return f"<h2>Timeline</h2><p class=soft>{escape(text)}</p><div class=wide>{bars_svg(bars)}</div>"


def _kind(name: str, kinds: Mapping[str, str]) -> str:
    """By the name of a kernel, or by the outputs that the name of anything else ends in."""
    found = [kind for end, kind in kinds.items() if name == end or name.endswith(f" {end}")]
    return found[0] if found else "other"


def _is_on_cpu(timeline: Timeline) -> bool:
    return any(s.stream == HOST for s in timeline.spans)


def _segments(steps: Sequence[Step]) -> str:
    parts = ["<h2>Segments</h2>"]
    for s in steps:
        sizes = "\n".join(map(str, (*s.explained.schedule_lines(), *s.explained.sizes)))
        refused = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(why)}</td></tr>"
            for name, why in s.explained.refusals[: s.explained.asked]
        )
        table = (
            f"<table><tr><th>scheduler</th><th>why it does not take it</th></tr>{refused}</table>" if refused else ""
        )
        parts.append(
            f"<details><summary>{s.number}: {escape(s.explained.scheduler)} {escape(', '.join(s.explained.kernels))}"
            f"</summary><pre>{escape(s.explained.text)}</pre>"
            + (f"<pre>{escape(sizes)}</pre>" if sizes else "")
            + f"{table}</details>"
        )
    return "".join(parts)


def _cost(step: Step) -> str:
    if step.kind == "communication":
        return f"{step.expected:.1f} us expected"
    return f"{size_text(step.explained.bytes)}, {step.expected:.1f} us" if step.explained.bytes else "nothing runs"


def _shape(tensor: BoundTensor) -> str:
    return str([extent(axis) for axis in tensor.domain.logical])


def size_text(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
