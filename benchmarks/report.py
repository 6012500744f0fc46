"""Results as a table and as JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MANY = 32
"""Workloads beyond which a suite has one paragraph, with a sentence for each peer, and neither table nor plot."""


@dataclass(frozen=True)
class Row:
    """One implementation at one case.

    us, low, high: microseconds, median and spread; ``None`` where it failed or is wrong, which ``note`` then says.
    bytes: each input read once, each output written once.  errors: of each output against float64, as one norm.
    kernels: launches that the profiler saw; planned: of shardfuse's plan.  said: what else is to be told.
    p99: microseconds that 99 of 100 calls do not exceed.  roundings: the largest error of an element, in roundings of
    its dtype.  None where they were not measured.
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
    said: str = ""
    p99: float | None = None
    roundings: float | None = None

    @property
    def counts(self) -> bool:
        """Does its time say anything?  That of a wrong result, or of another than the one asked for, does not."""
        return bool(self.us) and not self.note.startswith(("WRONG", "OTHER"))

    @property
    def gb_per_s(self) -> float | None:
        return self.bytes / self.us / 1e3 if self.us and self.bytes else None


@dataclass(frozen=True)
class Results:
    """A run of a suite on one machine.

    command: the whole command line.  commit: of the code; empty where git did not say.  left_out: sentences on what is
    not in it, or on how it was measured.
    """

    suite: str
    date: str
    machine: str
    command: str
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    commit: str = ""

    @staticmethod
    def now(suite: str, machine: str, command: str, rows: Sequence[Row], left_out: Sequence[str]) -> Results:
        return Results(suite, date.today().isoformat(), machine, command, tuple(rows), tuple(left_out), commit())

    def to_json(self) -> str:
        """A row a line; what a row says by default is left out."""
        found = asdict(self)
        rows = [{k: v for k, v in row.items() if v != _DEFAULTS.get(k, _DEFAULTS)} for row in found.pop("rows")]
        head = json.dumps(found, indent=1).removesuffix("\n}")
        return f'{head},\n "rows": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]\n}\n"

    @staticmethod
    def from_json(text: str) -> Results:
        found: dict[str, Any] = json.loads(text)
        rows = tuple(Row(**{**row, "errors": tuple(row.get("errors", ()))}) for row in found.pop("rows"))
        return Results(**{**found, "left_out": tuple(found["left_out"])}, rows=rows)


_DEFAULTS = {
    "us": None,
    "low": None,
    "high": None,
    "errors": (),
    "kernels": None,
    "planned": None,
    "note": "",
    "said": "",
    "p99": None,
    "roundings": None,
}


@cache
def commit() -> str:
    """Of the checkout that is measured, with ``+`` where files differ; empty without git."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def has_plot(results: Results) -> bool:
    """Is there a workload of several sizes, and bytes to speak of?  A case in words has no size."""
    sizes = {(r.workload, r.case) for r in results.rows if r.bytes and " " not in r.case}
    workloads = {workload for workload, _ in sizes}
    return len(workloads) < len(sizes) and len(workloads) <= MANY


HEADERS = ("case", "implementation", "us", "99th", "GB/s", "of copy", "shardfuse is", "kernels", "roundings", "error")


ALWAYS = ("case", "implementation", "us")
"""Columns that are shown whatever rows say; the others where one says something in them."""


def table(results: Results) -> tuple[list[str], list[tuple[str, list[tuple[str, ...]]]]]:
    """The headers, and for each workload its rows as text, in their order."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in results.rows:
        found.setdefault(row.workload, {}).setdefault(row.case, []).append(row)
    texts = {w: [_cells(row, rows) for rows in cases.values() for row in rows] for w, cases in found.items()}
    shown = [h for h in HEADERS if h in ALWAYS or any(cells[h] for rows in texts.values() for cells in rows)]
    return shown, [(w, [tuple(cells[h] for h in shown) for cells in rows]) for w, rows in texts.items()]


def _cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """By header."""
    by = {r.impl: r for r in rows}
    own, copy = (r if r is not None and r.counts else None for r in (by.get("shardfuse"), by.get("copy")))
    cells = dict.fromkeys(HEADERS, "") | {"case": row.case, "implementation": row.impl}
    cells["error"] = f"{max(row.errors):.1e}" if row.errors else ""
    cells["roundings"] = "" if row.roundings is None else f"{row.roundings:.2f}"
    if row.us is None:
        return cells | {"us": row.note}
    kernels = next((str(n) for n in (row.kernels, row.planned) if n is not None), "")
    if row.kernels is not None and row.planned not in (None, row.kernels):
        kernels = f"{row.planned} planned, {row.kernels} seen"
    return cells | {
        "us": f"{row.us:.1f}",
        "99th": "" if row.p99 is None else f"{row.p99:.1f}",
        "GB/s": "" if row.gb_per_s is None else f"{row.gb_per_s:.0f}",
        "of copy": f"{copy.us / row.us:.2f}" if copy is not None and copy.us and row.counts else "",
        "shardfuse is": f"{row.us / own.us:.2f} x" if own and own.us and row is not own and row.counts else "",
        "kernels": kernels,
        "error": f"{cells['error']} {row.note} {row.said}".strip(),
    }


def ratios(results: Results, *, slow: bool = False) -> dict[str, dict[str, dict[str, float]]]:
    """By workload, peer and case how many times as fast as the peer shardfuse is; of right results only.

    slow: of 99th percentiles, where there are any.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    times = {(r.workload, r.case, r.impl): r.p99 if slow else r.us for r in results.rows if r.counts}
    for (workload, case, impl), theirs in times.items():
        us = times.get((workload, case, "shardfuse"))
        if us and theirs and impl != "shardfuse":
            found.setdefault(workload, {}).setdefault(impl, {})[case] = theirs / us
    return found


def mean(values: Collection[float]) -> str:
    """The geometric mean, and the least."""
    return f"{exp(sum(map(log, values)) / len(values)):.2f} (least {min(values):.2f})"


def means(results: Results) -> list[str]:
    """Over the cases of a workload, of how much faster shardfuse is than each peer."""
    return [
        f"{workload}: {', '.join(f'{impl} {mean(cases.values())}' for impl, cases in peers.items())}"
        for workload, peers in ratios(results).items()
    ]


def as_text(results: Results) -> str:
    """For a terminal."""
    lines = [f"{results.suite} · {results.date} · {results.machine}", *results.left_out]
    headers, workloads = table(results)
    for workload, rows in workloads:
        lines += ["", workload, *columns([headers, *rows])]
    lines += ["", "times as fast as, geometric means:", *means(results)]
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
