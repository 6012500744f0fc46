"""The suite ``modules``, tiny, on the CPU: every module and function is run, and is right against float64."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .report import Row, columns
from .suite import run_tables
from .workload import Case, Compared

CPU = torch.device("cpu")


def dry_modules(workloads: Iterable[Compared]) -> int:
    """Prints a line for each; code 1 where one is wrong."""
    rows = run_dry(workloads)
    lines = [("workload", "case", "implementation", "error", "wrong")]
    lines += [(r.workload, r.case, r.impl, f"{max(r.errors, default=0.0):.1e}", r.note) for r in rows]
    print("\n".join(columns(lines)))
    return 1 if any(r.note for r in rows) else 0


def run_dry(workloads: Iterable[Compared]) -> list[Row]:
    """The first tiny case of each."""
    work = [(w, Case.parse(w.tiny[0])) for w in workloads]
    return [row for rows in run_tables(work, (), 0.0, CPU) for row in rows]
