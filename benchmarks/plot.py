"""Bandwidth against size in ``docs/bandwidth_SUITE.svg``, a panel a workload: ``python benchmarks/plot.py FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.report import ROOT, Results, Row

COLOURS = {
    "shardfuse": "#d62728", "copy": "#888888", "eager": "#8c564b",
    "inductor": "#1f77b4", "inductor_max_autotune": "#17becf", "liger": "#2ca02c", "quack": "#9467bd",
}  # fmt: skip
WIDTH = 3


def plot(results: Results, directory: Path = ROOT / "docs") -> Path:
    """Writes the SVG and gives its path.  Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "shardfuse"  # the same picture is the same file
    from matplotlib import pyplot

    panels: dict[str, list[Row]] = {}
    for row in results.rows:
        panels.setdefault(row.workload, []).append(row)
    wide, deep = min(WIDTH, len(panels)), -(-len(panels) // WIDTH)
    figure, axes = pyplot.subplots(deep, wide, figsize=(5 * wide, 3.6 * deep), squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (workload, rows) in zip(axes.flat, panels.items(), strict=False):
        _draw(panel, workload, rows)
    figure.suptitle(f"{results.suite}: {results.machine}, {results.date}", fontsize=9)
    figure.tight_layout()
    path = directory / f"bandwidth_{results.suite}.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _draw(panel, workload: str, rows: list[Row]) -> None:
    for impl in dict.fromkeys(r.impl for r in rows):
        points = sorted(
            (r.bytes / 1e6, r.gb_per_s) for r in rows if r.impl == impl and r.gb_per_s is not None and r.counts
        )
        if points:
            width = 2.2 if impl == "shardfuse" else 1.0
            sizes, speeds = zip(*points, strict=True)
            panel.plot(sizes, speeds, marker="o", markersize=3, linewidth=width, label=impl, color=COLOURS.get(impl))
    panel.set_xscale("log")
    panel.set_ylim(bottom=0)
    panel.set_title(workload, fontsize=9)
    panel.set_xlabel("MB read and written", fontsize=8)
    panel.set_ylabel("GB/s", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=6)


def main(paths: list[str]) -> int:
    for path in paths:
        print(plot(Results.from_json(Path(path).read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
