"""Results as a table, as JSON and as sections of ``docs/measured.md``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from math import exp, log
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measured.md"


@dataclass(frozen=True)
class Row:
    """One implementation at one case.

    us, low, high: microseconds, median and spread; ``None`` where it failed, which ``note`` then says.
    bytes: each input read once, each output written once.  errors: of each output against float64.
    kernels: launches that the profiler saw; planned: of shardfuse's plan.
    """

    workload: str
    case: str
    impl: str
    bytes: int
    us: float | None = None
    low: float | None = None
    high: float | None = None
    errors: tuple[float, ...] = ()
    kernels: int | None = None
    planned: int | None = None
    note: str = ""

    @property
    def gb_per_s(self) -> float | None:
        return self.bytes / self.us / 1e3 if self.us and self.bytes else None


@dataclass(frozen=True)
class Results:
    """A run of a suite on one machine."""

    suite: str
    date: str
    machine: str
    command: str
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()

    @staticmethod
    def now(suite: str, machine: str, command: str, rows: Sequence[Row], left_out: Sequence[str]) -> Results:
        return Results(suite, date.today().isoformat(), machine, command, tuple(rows), tuple(left_out))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Results:
        found: dict[str, Any] = json.loads(text)
        rows = tuple(Row(**{**row, "errors": tuple(row["errors"])}) for row in found.pop("rows"))
        return Results(**{**found, "left_out": tuple(found["left_out"])}, rows=rows)


HEADERS = ("case", "implementation", "us", "GB/s", "of copy", "shardfuse is", "kernels", "error")


def table(results: Results) -> list[tuple[str, list[tuple[str, ...]]]]:
    """For each workload its rows as text, in the order of ``HEADERS``."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in results.rows:
        found.setdefault(row.workload, {}).setdefault(row.case, []).append(row)
    return [(w, [_cells(row, rows) for rows in cases.values() for row in rows]) for w, cases in found.items()]


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    by = {r.impl: r for r in rows}
    own, copy = by.get("shardfuse"), by.get("copy")
    error = f"{max(row.errors):.1e}" if row.errors else ""
    if row.us is None:
        return row.case, row.impl, row.note, "", "", "", "", error
    share = f"{copy.us / row.us:.2f}" if copy is not None and copy.us else ""
    faster = f"{row.us / own.us:.2f} x" if own is not None and own.us and row is not own else ""
    kernels = next((str(n) for n in (row.kernels, row.planned) if n is not None), "")
    if row.kernels is not None and row.planned not in (None, row.kernels):
        kernels = f"{row.planned} planned, {row.kernels} seen"
    speed = "" if row.gb_per_s is None else f"{row.gb_per_s:.0f}"
    return row.case, row.impl, f"{row.us:.1f}", speed, share, faster, kernels, f"{error} {row.note}".strip()


def means(results: Results) -> list[str]:
    """Geometric means, over the cases of a workload, of how much faster shardfuse is than each peer."""
    ratios: dict[tuple[str, str], list[float]] = {}
    own = {(r.workload, r.case): r.us for r in results.rows if r.impl == "shardfuse" and r.us}
    for r in results.rows:
        us = own.get((r.workload, r.case))
        if us and r.us and r.impl != "shardfuse":
            ratios.setdefault((r.workload, r.impl), []).append(r.us / us)
    lines: dict[str, list[str]] = {}
    for (workload, impl), values in ratios.items():
        mean = exp(sum(map(log, values)) / len(values))
        lines.setdefault(workload, []).append(f"{impl} {mean:.2f} (least {min(values):.2f})")
    return [f"{workload}: {', '.join(parts)}" for workload, parts in lines.items()]


def as_text(results: Results) -> str:
    """For a terminal."""
    lines = [f"{results.suite} · {results.date} · {results.machine}", *results.left_out]
    for workload, rows in table(results):
        lines += ["", workload, *columns([HEADERS, *rows])]
    lines += ["", "times as fast as, geometric means:", *means(results)]
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_markdown(results: Results) -> str:
    """A section of ``docs/measured.md``."""
    lines = [f"## {results.suite}", "", f"{results.date}, {results.machine}; `{results.command}`."]
    lines += [f"{line}." for line in results.left_out]
    if _has_plot(results):
        lines += ["", f"![GB/s against size](bandwidth_{results.suite}.svg)"]
    for workload, rows in table(results):
        lines += ["", f"### {workload}", "", f"| {' | '.join(HEADERS)} |", "|---" * len(HEADERS) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    summary = means(results)
    if summary:
        lines += ["", "Times as fast as each, geometric mean over the cases:", "", *(f"- {line}" for line in summary)]
    return "\n".join(lines) + "\n"


def _has_plot(results: Results) -> bool:
    return any(r.bytes for r in results.rows)


def write_section(results: Results, path: Path = MEASURED) -> None:
    """Put the section in place of the suite's old one, or at the end."""
    sections: list[list[str]] = [[]]
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            sections.append([])
        sections[-1].append(line)
    section = as_markdown(results).splitlines()
    at = next((k for k, s in enumerate(sections) if s and s[0] == section[0]), None)
    if at is None:
        sections.append(section)
    else:
        sections[at] = section
    path.write_text("\n\n".join("\n".join(s).strip() for s in sections if any(s)) + "\n")
