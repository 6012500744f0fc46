"""Changes of code at random, each run against quick tests that execute its line: for `scripts/mutate.py`.

1. `covered_lines.py` runs the tests of `COVERING` once and writes down which lines each executes.
2. Of each group of files some changes are drawn (`syntax_faults.py`).
3. For each change tests are chosen: one file of tests after another gives the shortest of those that it has left, in
   turns with those of whose lines most are of the changed file, until they take ``seconds`` together. pytest runs them
   on a copy of the tree that has the change, and stops at the first that fails. It runs in a forked process, to which
   torch is imported already.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from equivalent_changes import EQUIVALENT
from planted_faults import COVERING
from syntax_faults import Change, changes

ROOT = Path(__file__).resolve().parents[1]
SECONDS, FEWEST = 40.0, 4
"""Of tests for one change, as the run with tracing took them; so many tests at least."""
PATIENCE = 600
"""Seconds beyond which a run counts as hung, and as caught."""
IMPORTED = (
    "pytest", "hypothesis", "numpy", "torch", "torch.distributed.tensor", "torch._dynamo",
    "torch.testing._internal.distributed.multi_threaded_pg", "triton",
)  # fmt: skip
Lines = dict[str, list[int]]
Executed = dict[str, tuple[float, Lines]]
"""Of each test its seconds, and of each file the lines that it executes."""


@dataclass(frozen=True)
class Sample:
    """``count`` changes of each of ``groups`` (files, folders, a line as FILE:LINE), by tests that take ``seconds``.

    map: where it is kept which test executes which line.
    """

    groups: Sequence[Sequence[str]]
    count: int
    seed: int
    map: Path
    seconds: float = SECONDS


@dataclass(frozen=True)
class Planted:
    """A change of ``file``, and the tests for it."""

    file: str
    change: Change
    tests: tuple[str, ...]
    reason: str | None

    def __str__(self) -> str:
        return f"{self.file}:{self.change.line}: {self.change.said}"


def check_sample(sample: Sample, trees: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Of each change its name and a verdict; as many run at once as there are ``trees``, copies of this one."""
    executed = executed_lines(sample.map)
    drawn = [planted for group in sample.groups for planted in _draw(group, sample, executed)]
    for name in IMPORTED:
        importlib.import_module(name)
    waiting = [p for p in drawn if p.reason is None and p.tests]
    for planted in drawn:
        if planted.reason is not None:
            yield f"{planted}: {planted.reason}", "equivalent"
        elif not planted.tests:
            yield str(planted), "NOT EXECUTED"
    running: dict[Path, Forked] = {}
    while waiting or running:
        for tree in trees:
            if tree not in running and waiting:
                running[tree] = Forked(waiting.pop(0), tree)
        for tree, forked in list(running.items()):
            said = forked.verdict()
            if said is not None:
                del running[tree]
                yield str(forked.planted), said
        time.sleep(0.05)


def _draw(group: Sequence[str], sample: Sample, executed: Executed) -> list[Planted]:
    found = [
        (name, change)
        for given, _, line in (one.partition(":") for one in group)
        for name in _files(given)
        for change in changes((ROOT / name).read_text())
        if not line or change.line == int(line)
    ]
    taken = random.Random(sample.seed).sample(found, min(sample.count, len(found)))
    return [
        Planted(name, change, chosen_tests(name, change, executed, sample.seconds), equivalent(name, change))
        for name, change in sorted(taken, key=lambda one: (one[0], one[1].lines, one[1].said))
    ]


def _files(given: str) -> list[str]:
    path = ROOT / given
    return [given] if path.is_file() else sorted(str(p.relative_to(ROOT)) for p in path.rglob("*.py"))


def equivalent(file: str, change: Change) -> str | None:
    """Why the change is none of behaviour, where somebody found so."""
    line = (ROOT / file).read_text().splitlines()[change.line - 1].strip()
    return EQUIVALENT.get((file, line, change.said))


def chosen_tests(file: str, change: Change, executed: Executed, seconds: float) -> tuple[str, ...]:
    """Tests that execute the changed line; for one that runs at import those that execute most of the file."""
    for wanted in (set(range(change.lines[0], change.lines[1] + 1)), {change.statement}):
        found = {test for test, (_, lines) in executed.items() if wanted & set(lines.get(file, ()))}
        if found:
            return _some_of(found, file, executed, seconds)
    if not _is_at_import(file, change):
        return ()
    most = sorted(executed, key=lambda test: -len(executed[test][1].get(file, ())))
    return _some_of({test for test in most[:12] if file in executed[test][1]}, file, executed, seconds)


def _is_at_import(file: str, change: Change) -> bool:
    line = (ROOT / file).read_text().splitlines()[change.statement - 1]
    return not line.startswith("        ") and not line.startswith("    return")


def _some_of(tests: set[str], file: str, executed: Executed, most: float) -> tuple[str, ...]:
    """In turns the quickest of each file of tests, and those of whose lines most are of ``file``."""
    by_file: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda name: executed[name][0]):
        by_file.setdefault(test.split("::")[0], []).append(test)
    quickest = [test for k in range(len(tests)) for mine in by_file.values() for test in mine[k : k + 1]]
    share = {name: len(executed[name][1][file]) / sum(map(len, executed[name][1].values())) for name in tests}
    closest = sorted(tests, key=lambda name: (-share[name], executed[name][0]))
    taken: list[str] = []
    seconds = 0.0
    for test in dict.fromkeys(test for pair in zip(quickest, closest, strict=True) for test in pair):
        if len(taken) >= FEWEST and seconds + executed[test][0] > most:
            continue
        taken.append(test)
        seconds += executed[test][0]
    return tuple(taken)


def executed_lines(path: Path) -> Executed:
    """As ``path`` holds it, made anew where the sources are others."""
    state = hashlib.sha256()
    for file in [*sorted((ROOT / "shardfuse").rglob("*.py")), *(ROOT / name for name in COVERING)]:
        state.update(file.read_bytes())
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["sources"] == state.hexdigest():
            return kept["executed"]
    found: Executed = {}
    for name in COVERING:
        part = path.with_suffix(".part")
        given = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}", "SHARDFUSE_COVERED_LINES": str(part)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "covered_lines", "-p", "no:cacheprovider", name]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **given}, capture_output=True)
        found |= json.loads(part.read_text())
        part.unlink()
    path.write_text(json.dumps({"sources": state.hexdigest(), "executed": found}))
    return found


class Forked:
    """pytest in a process of its own group, on a tree in which one file is changed."""

    def __init__(self, planted: Planted, tree: Path) -> None:
        self.planted, self.path = planted, tree / planted.file
        self.before = self.path.read_text()
        self.path.write_text(planted.change.text)
        self.log = tree / "log.txt"
        self.end = time.monotonic() + PATIENCE
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_tests(tree, self.log, planted.tests)

    def verdict(self) -> str | None:
        """None while it runs. pytest's 0 is that all passed, 5 that there were no such tests."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done:
            if time.monotonic() < self.end:
                return None
            os.waitpid(self._kill(), 0)
            self.path.write_text(self.before)
            return "hung, caught"
        self._kill()
        self.path.write_text(self.before)
        match os.waitstatus_to_exitcode(status):
            case 0:
                return "SURVIVED"
            case 5:
                return "NO TESTS"
            case _:  # 4, that a test is not found, where its file cannot be imported
                return "caught"

    def _kill(self) -> int:
        """What tests started belongs to the same group of processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self.pid


def _run_tests(tree: Path, log: Path, tests: Sequence[str]) -> None:
    """In the forked process, which ends here."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if not p.startswith(str(ROOT)) or ".venv" in p)]
    sys.dont_write_bytecode = True
    here = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "SHARDFUSE_CACHE_DIR": str(tree / ".cache")}
    os.environ.update(here)
    os.environ.pop("TRITON_INTERPRET", None)
    for name in ("planted_faults", "equivalent_changes"):
        sys.modules.pop(name, None)
    import pytest

    status = 3
    try:
        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)
