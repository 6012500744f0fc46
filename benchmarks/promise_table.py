"""What promises cost, as a table of ``docs/howto/keep_bits.md`` that ``page.py`` writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .promises import OWN, PROMISED
from .report import Results, Row, mean

RANKS = "promises_ranks"
SUITES = ("promises", RANKS)
LIMIT = 1.15
"""Of the time without the promise: cases beyond it are listed."""
IN_GRAPH = ", in a graph"
TITLES = {
    "rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    "add_norm": "residual + RMSNorm",
    "softmax": "softmax",
    "cross_entropy": "cross entropy with its gradient",
    "rms_norm_backward": "gradients of RMSNorm and of its weight",
    "layer_norm_backward": "gradients of LayerNorm, of its weight and bias",
    "softmax_backward": "gradient of softmax",
}


def promise_section(results: Results) -> str:
    """Paragraph and table: by fusion and number of rows, the time over that without, at each length of a row."""
    calls, graphs = _costs(results.rows, ""), _costs(results.rows, IN_GRAPH)
    code = f", commit {results.commit}" if results.commit else ""
    promised = "ranks" if results.suite == RANKS else "batch"
    head = [
        f'{results.date}, {results.machine}{code}; `{results.command}`, bfloat16, `invariant="{promised}"`.',
        *([_bits(results.rows)] if promised == "batch" else []),
        f"The mean over {len(calls)} cases is {mean(calls.values())} in calls, of which each has its code and data "
        f"from memory, and {mean(graphs.values())} in CUDA graphs of ten calls, which have both in caches.",
        *(f"Left out: {text}." for text in results.left_out),
        _beyond(calls, graphs) if promised == "batch" else _counted_beyond(calls, graphs),
    ]
    rows = sorted({rows for _, rows, _ in calls})
    table = ["| fusion, elements of a row | " + " | ".join(_counted(rows)) + " |", "|---" * (1 + len(rows)) + "|"]
    for name, title in TITLES.items():
        widths = sorted({n for own, _, n in calls if own == name})
        if not widths:
            continue
        cells = [", ".join(f"{calls[name, r, n]:.2f}" for n in widths if (name, r, n) in calls) for r in rows]
        table.append(f"| {title}, {', '.join(map(str, widths))} | {' | '.join(cells)} |")
    return "\n".join([" ".join(head), "", *table])


def _costs(rows: Iterable[Row], suffix: str) -> dict[tuple[str, int, int], float]:
    """By fusion, rows and elements of a row."""
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        name, _, kind = row.workload.partition(IN_GRAPH)
        if row.counts and row.us and (IN_GRAPH if row.workload != name else "") == suffix and not kind:
            count, n = map(int, row.case.split(":")[0].split("x"))
            found.setdefault((name, count, n), {})[row.impl] = row.us
    return {key: us[PROMISED] / us[OWN] for key, us in found.items() if us.keys() >= {OWN, PROMISED}}


def _bits(rows: Sequence[Row]) -> str:
    wrong = [f"{r.workload} {r.case}" for r in rows if r.note.startswith("WRONG")]
    return f"Other bits than promised: {'; '.join(wrong)}." if wrong else "In all cases the bits were as promised."


def _beyond(calls: dict[tuple[str, int, int], float], graphs: dict[tuple[str, int, int], float]) -> str:
    found = [
        f"{TITLES[name]} of {rows} x {n} {us:.2f} x ({graphs[name, rows, n]:.2f} x)"
        for (name, rows, n), us in calls.items()
        if max(us, graphs[name, rows, n]) > LIMIT
    ]
    both = sum(min(us, graphs[key]) > LIMIT for key, us in calls.items())
    if not found:
        return f"None takes more than {LIMIT} x."
    return f"More than {LIMIT} x take, in calls (in graphs): {'; '.join(found)}; {both or 'none'} in both."


def _counted_beyond(calls: dict[tuple[str, int, int], float], graphs: dict[tuple[str, int, int], float]) -> str:
    """By fusion, where they are many."""
    found: dict[str, list[float]] = {}
    for key, us in calls.items():
        if min(us, graphs[key]) > LIMIT:
            found.setdefault(TITLES[key[0]], []).append(max(us, graphs[key]))
    told = [f"{len(us)} of {title} (up to {max(us):.2f} x)" for title, us in found.items()]
    return f"More than {LIMIT} x in both take {sum(map(len, found.values()))} cases: {'; '.join(told)}."


def _counted(rows: Sequence[int]) -> list[str]:
    return [f"{n} row" if n == 1 else str(n) for n in rows]
