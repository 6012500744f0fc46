"""One line that tells how far a long task has come."""

from __future__ import annotations

from typing import TextIO

_WIDTH = 20


class Progress:
    """``tuning persistent_T7 [#####---------------] 4/16, 31.2 us``, written over itself on a terminal.

    Elsewhere, as in a log, each task leaves its last line only.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_terminal = stream is not None and stream.isatty()
        self._longest = 0

    def show(self, task: str, done: int, total: int, found: str) -> None:
        """``found``: what is known by now."""
        if self._is_terminal:
            self._write(_line(task, done, total, found), end="")

    def close(self, task: str, done: int, found: str) -> None:
        """The task is over."""
        self._write(_line(task, done, done, found), end="\n")
        self._longest = 0

    def _write(self, line: str, end: str) -> None:
        if self._stream is None:
            return
        self._longest = max(self._longest, len(line))
        start = "\r" if self._is_terminal else ""
        self._stream.write(f"{start}{line.ljust(self._longest) if self._is_terminal else line}{end}")
        self._stream.flush()


def _line(task: str, done: int, total: int, found: str) -> str:
    filled = _WIDTH * done // max(total, 1)
    return f"tuning {task} [{'#' * filled}{'-' * (_WIDTH - filled)}] {done}/{total}, {found}"
