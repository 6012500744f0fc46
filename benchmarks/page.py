"""The pages of figures in ``docs/``, of ``benchmarks/results/*.json``: ``python benchmarks/page.py [--check]``.

What people write on a page stays; between ``<!-- SUITE -->`` and ``<!-- end of SUITE -->`` stands what this makes of
the results, and a suite that has no such place yet gets one at the end.  Suites that run on ranks have a page of their
own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.promise_table import SUITES as PROMISE_SUITES
from benchmarks.promise_table import promise_section
from benchmarks.report import MANY, ROOT, Results, Row, has_plot, mean, ratios

MEASURED, ON_RANKS = ROOT / "docs" / "measured.md", ROOT / "docs" / "measured_on_ranks.md"
PROMISES = ROOT / "docs" / "howto" / "keep_bits.md"
RANK_SUITES = ("reshard", "calls", "collectives", "exchange", "images", "losses", "train")
RESULTS = ROOT / "benchmarks" / "results"
OWN = "shardfuse"
SHORT_OF_COPY, SHORT_OF_PEERS = 0.95, 0.98
"""Ratios that fall short are below these; by 2 % times differ from run to run."""


def save(results: Results, directory: Path) -> Path:
    path = directory / f"{results.suite}.json"
    path.write_text(results.to_json())
    return path


LISTED = 15
"""Workloads that fall short, the least first, of a suite that has many; the results have all."""
FUNCTION = f"{OWN}, functional."
"""Begins the name of a module's function, which is measured beside it."""


def load(directory: Path) -> list[Results]:
    return [Results.from_json(path.read_text()) for path in sorted(directory.glob("*.json"))]


def section(results: Results) -> str:
    """A workload a line: means over its cases, what falls short, what failed or is wrong.  Of many, one paragraph."""
    code = f", commit {results.commit}" if results.commit else ""
    read = f"python benchmarks/run.py {results.suite} --read benchmarks/results/{results.suite}.json"
    said = [f"{results.date}, {results.machine}{code}; `{results.command}`.", *(f"{s}." for s in results.left_out)]
    plot = [f"![GB/s against size](bandwidth_{results.suite}.svg)"] if has_plot(results) else []
    head = " ".join([*said, f"Every row: `{read}`.", *plot])
    peers = list(dict.fromkeys(r.impl for r in results.rows if r.impl != OWN and not r.impl.startswith("copy of ")))
    shown = sorted((p for p in peers if any(r.impl == p and r.counts for r in results.rows)), key=lambda p: p != "copy")
    workloads = list(dict.fromkeys(r.workload for r in results.rows))
    notes = _notes(results.rows)
    wrong = [f"Failed or wrong: {'; '.join(notes)}."] if notes else []
    if len(workloads) > MANY:
        return " ".join([head, _by_peer(results, shown), *wrong])
    return "\n".join([head, "", *_by_workload(results, workloads, shown), *(["", *wrong] if wrong else [])])


def _by_workload(results: Results, workloads: Sequence[str], shown: Sequence[str]) -> list[str]:
    heads = ["workload", "cases", *("of copy" if p == "copy" else f"x {p}" for p in shown), "falls short at"]
    has_errors = any(r.roundings is not None for r in results.rows)
    heads += ["largest error, roundings"] if has_errors else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for workload in workloads:
        rows = [r for r in results.rows if r.workload == workload]
        found, slow = (ratios(results, slow=s).get(workload, {}) for s in (False, True))
        cells = [_summary(rows, p, found.get(p, {}), slow.get(p, {})) for p in shown]
        errors = [_errors(rows, [OWN, *shown])] if has_errors else []
        lines.append(f"| {workload} | {_cases(rows)} | {' | '.join([*cells, _short(found), *errors])} |")
    return lines


def _by_peer(results: Results, shown: Sequence[str]) -> str:
    """The mean over all workloads, and the workloads that fall short."""
    sentences: list[str] = []
    ways = [p for p in shown if p.startswith(FUNCTION)]
    if ways:
        of = [r for peers in ratios(results).values() for w in ways for r in peers.get(w, {}).values()]
        sentences.append(f"**x the function** of `shardfuse.nn.functional`: {mean(of)}.")
    for peer in (p for p in shown if p not in ways):
        found = {w: cases for w, peers in ratios(results).items() if (cases := peers.get(peer))}
        by_least = sorted(found, key=lambda w: min(found[w].values()))
        short = [f"{w} {said}" for w in by_least if (said := _short_of(peer, ratios(results)[w]))]
        short[LISTED:] = [f"and in {len(short) - LISTED} more workloads"] if len(short) > LISTED else []
        ratio = mean([r for cases in found.values() for r in cases.values()])
        below = f"; falls short: {'; '.join(short)}" if short else ""
        sentences.append(f"**{'Of copy' if peer == 'copy' else f'x {peer}'}**, {len(found)} workloads: {ratio}{below}.")
    return " ".join(sentences)


def _short_of(peer: str, found: dict[str, dict[str, float]]) -> str:
    return _short({p: cases for p, cases in found.items() if p == peer or p.startswith("copy of ")})


def _cases(rows: Sequence[Row]) -> str:
    """How many; of one case the time."""
    own = [r for r in rows if r.impl == OWN]
    if len(own) == 1 and own[0].us is not None:
        return f"{own[0].case}, {_time(own[0].us)}"
    return str(len({r.case for r in rows}))


def _summary(rows: Sequence[Row], peer: str, found: dict[str, float], slow: dict[str, float]) -> str:
    """Both numbers of the ratio where there is one case, else the mean; and of 99th percentiles, where there are."""
    if not found:
        return ""
    said = f"; 99th: {mean(slow.values())}" if slow else ""
    if len(found) > 1:
        return mean(found.values()) + said
    (us,) = (r.us for r in rows if r.impl == peer and r.case in found)
    return f"{next(iter(found.values())):.2f} ({_time(us or 0)}){said}"


def _errors(rows: Sequence[Row], impls: Sequence[str]) -> str:
    """Of each implementation, over all cases."""
    worst = {
        i: max((r.roundings for r in rows if r.impl == i and r.roundings is not None), default=None) for i in impls
    }
    return ", ".join(f"{impl} {found:.2f}" for impl, found in worst.items() if found is not None)


def _time(us: float) -> str:
    return f"{us / 1e3:.0f} ms" if us >= 1e5 else f"{us / 1e3:.1f} ms" if us >= 1e4 else f"{us:.1f} us"


def _short(found: dict[str, dict[str, float]]) -> str:
    """Case by case.  Where a copy of such words as rows keep aligned was measured, that is the roof.

    What is a part of the work, a collective alone, is never reached.
    """
    narrow = {
        case: ratio for peer, cases in found.items() if peer.startswith("copy of ") for case, ratio in cases.items()
    }
    said: list[str] = []
    for peer, cases in found.items():
        for case, ratio in cases.items():
            least = SHORT_OF_COPY if peer == "copy" else SHORT_OF_PEERS
            ratio = narrow.get(case, ratio) if peer == "copy" else ratio
            is_floor = peer.startswith("copy of ") or peer.endswith(" alone")
            if round(ratio, 2) < least and not is_floor:
                said.append(f"{_shortened(case, cases)} {ratio:.2f} {'of' if peer == 'copy' else 'x'} {peer}")
    return "; ".join(said)


def _shortened(case: str, cases: Iterable[str]) -> str:
    """Its sizes, where these are enough to tell it from the others."""
    sizes = case.split(":")[0]
    return sizes if [c.split(":")[0] for c in cases].count(sizes) == 1 else case


def _notes(rows: Sequence[Row]) -> list[str]:
    """What failed or is wrong; cases of one workload with the same kind of message are one."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.note and not row.impl.startswith("copy"):
            found.setdefault((row.workload, row.impl, row.note[:12]), []).append(row)
    return [
        f"{workload}, {impl} at {', '.join(r.case for r in of)}: {of[0].note[:160].rstrip(':. ')}"
        for (workload, impl, _), of in found.items()
    ]


def page(text: str, results: Sequence[Results]) -> str:
    """``text`` with every suite's section as its results say."""
    for r in results:
        begin, end = f"<!-- {r.suite} -->", f"<!-- end of {r.suite} -->"
        if begin not in text:
            text = f"{text.rstrip()}\n## {r.suite}\n{begin}\n{end}\n"
        before, _, rest = text.partition(begin)
        made = promise_section(r) if r.suite in PROMISE_SUITES else section(r)
        text = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    return text


def _page_of(results: Results) -> Path:
    return ON_RANKS if results.suite in RANK_SUITES else PROMISES if results.suite in PROMISE_SUITES else MEASURED


def main(arguments: Sequence[str]) -> int:
    """``--check``: code 1 where a page is not what the results make it."""
    code = 0
    for path in (MEASURED, ON_RANKS, PROMISES):
        old = path.read_text()
        new = page(old, [r for r in load(RESULTS) if _page_of(r) == path])
        if "--check" not in arguments:
            path.write_text(new)
        elif new != old:
            print(f"{path} is not what {RESULTS} makes it: python benchmarks/page.py", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
