"""A report as one HTML page that needs nothing else: graphs, regions, kernels against the roof, and why each is left.

The roof is a copy that moves as many bytes on an H200.  Expected times are those by which regions are taken; measured
ones are there where the report was asked to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..frontend.page import COPY_BANDWIDTH, Step, document, kernels_table, numbers_text, size_text, write_document
from ..frontend.page_drawing import Graph, Node, graph_svg
from .ledger import FROM_CACHE, RegionReport, Report
from .program_text import on_lines

_MOST_NODES = 120
"""Of a graph of more regions the first are drawn."""


def write_page(path: str | Path, report: Report) -> None:
    """Write the page of ``report``.  Raises ``PageError``."""
    write_document("report", path, page(report))


def page(report: Report) -> str:
    """The text of the page."""
    graphs = list(dict.fromkeys(r.of for r in report.regions))
    sections = [_head(report)]
    sections += [_graph([r for r in report.regions if r.of == g]) for g in graphs]
    sections += [_regions(report.regions), *map(_details, range(len(report.regions)), report.regions)]
    return document("Regions of torch.compile", sections)


def _head(report: Report) -> str:
    taken = [r for r in report.taken if r.us is not None and r.inductor_us is not None]
    numbers = [
        ("regions", str(len(report.regions))),
        ("taken", str(len(report.taken))),
        ("moved by those taken", size_text(sum(r.bytes or 0 for r in taken))),
        ("expected of them", f"{sum(r.us or 0 for r in taken):.1f} us"),
        ("of Inductor's kernels instead", f"{sum(r.inductor_us or 0 for r in taken):.1f} us"),
    ]
    return (
        "<h1>Regions of torch.compile</h1><p class=soft>What shardfuse looked at in the graphs of this process, at the "
        f"sizes of the call for which each was made. The roof is a copy on an H200, which moves "
        f"{COPY_BANDWIDTH / 1e12:g} TB/s.</p>{numbers_text(numbers)}"
        '<p class="key"><span><i style="background:var(--kernel)"></i>taken</span>'
        '<span><i style="background:var(--other)"></i>left to Inductor</span></p>'
    )


def _graph(regions: Sequence[RegionReport]) -> str:
    """Regions of one graph, each below those whose results it rests on; other ops stand between them."""
    shown = regions[:_MOST_NODES]
    nodes = [Node(str(r.number), "kernel" if r.taken else "other", _lines(r)) for r in shown]
    keys = dict.fromkeys(n.key for n in nodes)
    edges = {(str(k), str(r.number)): "" for r in shown for k in r.behind if str(k) in keys}
    left = f"<p class=soft>The first {_MOST_NODES} of {len(regions)} regions.</p>" if len(regions) > len(shown) else ""
    title = f"{regions[0].graph} graph {regions[0].of}" if regions[0].of != FROM_CACHE else "From torch's cache"
    return f"<h2>{escape(title)}</h2><div class=wide>{graph_svg(Graph(tuple(nodes), edges))}</div>{left}"


def _lines(r: RegionReport) -> tuple[str, ...]:
    cost = "" if r.us is None or r.inductor_us is None else f"{r.us:.1f} us, Inductor {r.inductor_us:.1f}"
    return f"{r.number}: {sum(n for _, n in r.ops)} ops", _named(r), cost


def _named(r: RegionReport) -> str:
    """What the region is around: the ops that are most telling of it, or its place in the caller's program."""
    return r.lines[-1].split(": ")[-1] if r.lines else ", ".join(name for name, _ in r.ops[:3])


def _regions(regions: Sequence[RegionReport]) -> str:
    is_measured = any(r.measured_us is not None for r in regions)
    rows = "".join(_row(k, r, is_measured=is_measured) for k, r in enumerate(regions))
    more = "<th class=number>measured</th><th class=number>Inductor</th>" if is_measured else ""
    head = (
        "<tr><th></th><th>region</th><th>graph</th><th class=number>bytes</th><th class=number>expected</th>"
        f"<th class=number>Inductor</th>{more}<th>share of the roof</th><th>why</th></tr>"
    )
    return f"<h2>Regions</h2><div class=wide><table>{head}{rows}</table></div>"


def _row(k: int, r: RegionReport, *, is_measured: bool) -> str:
    us = r.measured_us if r.measured_us is not None else r.us
    share = (r.bytes or 0) / COPY_BANDWIDTH * 1e6 / us if us else None
    width = 0.0 if share is None else min(share, 1.0)
    bar = "" if share is None else f'<div class=share><i style="width:{width:.0%}"></i></div>{share:.0%}'
    cells = [_us(r.us), _us(r.inductor_us), *((_us(r.measured_us), _us(r.measured_inductor_us)) if is_measured else ())]
    numbers = "".join(f"<td class=number>{c}</td>" for c in ("" if r.bytes is None else size_text(r.bytes), *cells))
    said = f"{'taken' if r.taken else 'left to Inductor'}: {r.why}"
    return (
        f"<tr><td>{k}</td><td><code>{escape(_named(r)[:60])}</code></td><td>{r.graph}</td>{numbers}<td>{bar}</td>"
        f"<td>{escape(said)}</td></tr>"
    )


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} us"


def _details(k: int, r: RegionReport) -> str:
    ops = ", ".join(f"{n} {name}" if n > 1 else name for name, n in r.ops)
    lines = f"<pre>{escape(chr(10).join(r.lines))}</pre>" if r.lines else ""
    steps = () if r.plan is None else r.plan.segments
    kernels = "" if not steps else kernels_table(
        [
            Step(i, s, "", "kernel" if s.kernels else "other", s.bytes / COPY_BANDWIDTH * 1e6, None)
            for i, s in enumerate(steps)
        ],
        is_on_cpu=False,
    )  # fmt: skip
    program = f"<pre>{escape(on_lines(r.program))}</pre>" if r.program else ""
    title = f"{k}: {'taken' if r.taken else 'left'}, {r.inputs} in, {r.outputs} out: {_named(r)[:80]}"
    return f"<details><summary>{escape(title)}</summary><p>{escape(ops)}</p>{lines}{kernels}{program}</details>"
