"""All checks in order, and the report that they come to."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from .devices import AREA as GPUS
from .devices import gpus
from .finding import Finding, checked
from .processes import self_tests
from .surroundings import caches, environment, network
from .trials import AREA as SELF_TESTS
from .versions import compilers, launchers, versions

CHECKS: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
    ("versions", versions),
    (GPUS, gpus),
    ("compilers", compilers),
    ("launchers", launchers),
    ("network", network),
    ("caches", caches),
    ("environment", environment),
)


def run_doctor(arguments: Sequence[str]) -> int:
    """Print the report.  The exit code is 1 where a fault was found, else 0."""
    parser = argparse.ArgumentParser(prog="python -m shardfuse doctor", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--no-self-tests", action="store_true", help="look, and run nothing")
    parser.add_argument("--seconds", type=_seconds, default=120.0, help="for each self-test to end in (120)")
    asked = parser.parse_args(arguments)
    found = [finding for area, check in CHECKS for finding in checked(area, check)]
    if not asked.no_self_tests:
        found += checked(SELF_TESTS, lambda: self_tests(asked.seconds))
    has_fault = any(finding.status == "fault" for finding in found)
    print(as_json(found) if asked.json else as_text(found))
    return 1 if has_fault else 0


_DESCRIPTION = """Looks at versions, GPUs and their links, compilers, launchers, folders and environment variables, and
tries a small fusion each way that this machine can run one. A warning costs time or a feature; a fault keeps programs
from running, and makes the exit code 1. Of environment variables that shardfuse does not read no value is printed."""


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number of seconds")
    return seconds


def as_json(found: Sequence[Finding]) -> str:
    """``{"ok": ..., "findings": [{"area", "name", "status", "found", "remedy"}, ...]}``"""
    is_ok = all(finding.status != "fault" for finding in found)
    return json.dumps({"ok": is_ok, "findings": [asdict(finding) for finding in found]}, indent=2)


def as_text(found: Sequence[Finding]) -> str:
    """A line for each finding below its area's name, with the remedy on a line of its own, and the counts."""
    lines: list[str] = []
    width = max((len(finding.name) for finding in found), default=0)
    area = None
    for finding in found:
        if finding.area != area:
            area = finding.area
            lines += ["", area] if lines else [area]
        first, *rest = finding.found.splitlines() or [""]
        lines.append(f"  {finding.status:<8} {finding.name:<{width}}  {first}")
        lines += [f"{'':<{width + 13}}{line}" for line in rest]
        if finding.remedy:
            lines += [f"{'':<{width + 13}}-> {line}" for line in finding.remedy.splitlines()]
    counts = Counter(finding.status for finding in found)
    return "\n".join([*lines, "", f"{counts['ok']} ok, {counts['warning']} warnings, {counts['fault']} faults"])
