"""A pytest plugin that writes down which lines of shardfuse each test executes, by which `scripts/mutate.py` chooses.

`SHARDFUSE_COVERED_LINES` names the JSON file that it writes: of each test that passed its seconds, and of each file of
`shardfuse/` the lines that it executed, in its threads too. What a cache or a fixture keeps for later tests counts for
the test that made it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

CALLS = 64
FOLDER = os.sep + "shardfuse" + os.sep


class Lines:
    """Those executed since ``begin``, of each function's first ``CALLS`` calls, so that tracing costs little."""

    def __init__(self, root: str) -> None:
        self.prefix = root.rstrip(os.sep) + FOLDER
        self.calls: dict[CodeType, int] = {}
        self.seen: dict[str, set[int]] = {}

    def begin(self) -> None:
        self.calls, self.seen = {}, {}
        threading.settrace(self.enter)
        sys.settrace(self.enter)

    def end(self) -> dict[str, list[int]]:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        return {name[len(self.prefix) - len(FOLDER) + 1 :]: sorted(lines) for name, lines in self.seen.items()}

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self.prefix):
            return None
        calls = self.calls[code] = self.calls.get(code, 0) + 1
        return self.line if calls <= CALLS else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.seen.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return self.line


class Plugin:
    def __init__(self, path: str, root: str) -> None:
        self.path, self.lines = path, Lines(root)
        self.found: dict[str, tuple[float, dict[str, list[int]]]] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began = time.perf_counter()
        self.lines.begin()
        yield
        self.found[item.nodeid] = time.perf_counter() - began, self.lines.end()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        with open(self.path, "w") as file:
            json.dump({test: said for test, said in self.found.items() if test not in self.failed}, file)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(os.environ["SHARDFUSE_COVERED_LINES"], str(config.rootpath)))
