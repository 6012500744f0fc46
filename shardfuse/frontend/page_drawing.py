"""Drawings of the page of a plan, as SVG: its graph, and what ran when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_BOX, _LANE, _GAP, _HEIGHT, _STEP = 168, 14, 22, 58, 104
_BAR, _LABEL, _WIDTH = 30, 104, 720


@dataclass(frozen=True)
class Node:
    """``kind``: input, output, kernel, communication or other.  ``lines``: at most three short ones."""

    key: str
    kind: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """``edges``: from, to, and the tensors on the way.  ``cuts``: pairs of nodes that might be one kernel."""

    nodes: tuple[Node, ...]
    edges: Mapping[tuple[str, str], str]
    cuts: Sequence[tuple[str, str]] = ()


def graph_svg(graph: Graph) -> str:
    """Nodes in layers, each below all that it reads; cuts are dashed."""
    layer = _layers(graph)
    last = max(layer.values(), default=0)
    rows: list[list[str]] = [[n.key for n in graph.nodes if layer[n.key] == k] for k in range(last + 1)]
    lanes: dict[tuple[str, str], list[str]] = {}
    for a, b in graph.edges:  # an edge goes by what lies between its ends in a lane of its own
        for k in range(layer[a] + 1, layer[b]):
            lane = f"lane {a} > {b} {k}"
            lanes.setdefault((a, b), []).append(lane)
            rows[k].append(lane)
    boxes = [n.key for n in graph.nodes]
    width = max((sum(map(_width_of(boxes), row)) + _GAP for row in rows), default=2 * _BOX)
    place: dict[str, tuple[float, float]] = {}
    for k, row in enumerate(rows):
        x = (width - sum(map(_width_of(boxes), row)) + _GAP) / 2
        for key in row:
            place[key] = (x, 14.0 + k * _STEP)
            x += _width_of(boxes)(key)
    height = 14 + last * _STEP + _HEIGHT + 14
    parts = [
        _edge(place[a], [place[lane] for lane in lanes.get((a, b), [])], place[b], names)
        for (a, b), names in graph.edges.items()
    ]
    parts += [_cut(place[a], place[b]) for a, b in graph.cuts]
    parts += [_node(node, *place[node.key]) for node in graph.nodes]
    return (
        f'<svg role="img" aria-label="graph of the fusion" width="{width:g}" height="{height}" '
        f'viewBox="0 0 {width:g} {height}">{_ARROW}{"".join(parts)}</svg>'
    )


def _layers(graph: Graph) -> dict[str, int]:
    """Of each node: one below all that it reads; inputs right above their first reader, outputs at the bottom."""
    layer: dict[str, int] = {}
    for node in graph.nodes:  # in an order in which they can run
        above = [layer[a] for a, b in graph.edges if b == node.key and a in layer]
        layer[node.key] = max(above, default=-1) + 1
    last = max(layer.values(), default=0)
    layer.update({n.key: last for n in graph.nodes if n.kind == "output"})
    for node in graph.nodes:
        below = [layer[b] for a, b in graph.edges if a == node.key]
        if node.kind == "input" and below:
            layer[node.key] = max(min(below) - 1, 0)
    return layer


def _width_of(boxes: Sequence[str]) -> Callable[[str], int]:
    return lambda key: (_BOX if key in boxes else _LANE) + _GAP


_ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>'
)


def _edge(a: tuple[float, float], lanes: Sequence[tuple[float, float]], b: tuple[float, float], names: str) -> str:
    x, y = a[0] + _BOX / 2, a[1] + _HEIGHT
    x1, y1, path = x, y, f"M{x:g} {y:g}"
    for to_x, to_y, length in (*((x + _LANE / 2, y, _HEIGHT) for x, y in lanes), (b[0] + _BOX / 2, b[1], 0)):
        bend = (to_y - y) / 2
        path += f"C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}"
        path += f"V{to_y + length:g}" if length else ""
        x, y = to_x, to_y + length
    x2, y2 = (lanes[0][0] + _LANE / 2, lanes[0][1]) if lanes else (x, y)
    text = f'<text class="edge-name" x="{(x1 + x2) / 2 + 5:g}" y="{(y1 + y2) / 2 + 4:g}">{escape(names)}</text>'
    return f'<path class="edge" d="{path}" marker-end="url(#tip)"/>{text}'


def _cut(a: tuple[float, float], b: tuple[float, float]) -> str:
    x1, y1, x2, y2 = a[0] + _BOX, a[1] + _HEIGHT / 2, b[0] + _BOX, b[1] + _HEIGHT / 2
    if y1 == y2:  # side by side: from the right edge of one to the left edge of the other
        return f'<path class="cut" d="M{min(x1, x2):g} {y1:g}L{max(x1, x2) - _BOX:g} {y2:g}"/>'
    out = max(x1, x2) + _GAP * 0.9
    return f'<path class="cut" d="M{x1:g} {y1:g}C{out:g} {y1:g} {out:g} {y2:g} {x2:g} {y2:g}"/>'


def _node(node: Node, x: float, y: float) -> str:
    first = y + (_HEIGHT - 16 * len(node.lines)) / 2 + 12
    text = "".join(
        f'<text class="{"title" if k == 0 else "line"}" x="{x + _BOX / 2:g}" y="{first + 16 * k:g}">'
        f"{escape(_short(line))}</text>"
        for k, line in enumerate(node.lines)
    )
    full = escape(" · ".join(node.lines))
    box = f'<rect class="{node.kind}" x="{x:g}" y="{y:g}" width="{_BOX}" height="{_HEIGHT}" rx="7"/>'
    return f"<g><title>{full}</title>{box}{text}</g>"


def _short(text: str, most: int = 24) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


@dataclass(frozen=True)
class Bar:
    """``start``, ``end``: microseconds."""

    row: str
    name: str
    kind: str
    start: float
    end: float


def bars_svg(bars: Sequence[Bar]) -> str:
    """A row for each stream, a bar for each span, and a scale in microseconds."""
    rows = list(dict.fromkeys(b.row for b in bars))
    first, last = min((b.start for b in bars), default=0.0), max((b.end for b in bars), default=1.0)
    scale = (_WIDTH - _LABEL - 8) / max(last - first, 1e-9)
    parts: list[str] = []
    for k, row in enumerate(rows):
        y = 8 + k * (_BAR + 10)
        parts.append(f'<text class="row" x="0" y="{y + 20}">{escape(row)}</text>')
        for b in (b for b in bars if b.row == row):
            x, width = _LABEL + (b.start - first) * scale, max((b.end - b.start) * scale, 1.5)
            title = f"<title>{escape(b.name)}: {b.end - b.start:.1f} us from {b.start - first:.1f}</title>"
            parts.append(
                f'<rect class="{b.kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3">{title}</rect>'
            )
            if width > 7 * len(b.name):
                parts.append(f'<text class="bar" x="{x + 6:.1f}" y="{y + 20}">{escape(b.name)}</text>')
    bottom = 8 + len(rows) * (_BAR + 10)
    for k in range(5):
        x = _LABEL + k / 4 * (_WIDTH - _LABEL - 8)
        anchor = "start" if k == 0 else "end" if k == 4 else "middle"
        text = f"{(last - first) * k / 4:.1f} us"
        parts.append(f'<text class="tick" style="text-anchor:{anchor}" x="{x:.0f}" y="{bottom + 12}">{text}</text>')
    height = bottom + 20
    return (
        f'<svg role="img" aria-label="what ran when" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">{"".join(parts)}</svg>'
    )
