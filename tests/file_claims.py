"""Two pytest processes that run the files of one list between them: each takes the next file that the other has not.

scripts/test.sh starts both with the same tests, and names in TEST_CLAIMS a folder in which each file that is taken has
a file of its own. The process with TEST_CLAIMS_ORDER=backward begins with the last file; they meet where they meet.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Claims:
    """folder: of the files that are taken; backward: begins with the last."""

    def __init__(self, folder: Path, *, backward: bool) -> None:
        self._folder = folder
        self._backward = backward
        self._own: dict[Path, bool] = {}

    @classmethod
    def from_environment(cls) -> Claims | None:
        """What scripts/test.sh asks of this process, and not of those that its tests start."""
        folder, order = os.environ.pop("TEST_CLAIMS", None), os.environ.pop("TEST_CLAIMS_ORDER", "forward")
        return None if folder is None else cls(Path(folder), backward=order == "backward")

    def order(self, items: list[pytest.Item]) -> None:
        """Files in this process's order; a file's tests stay in theirs, next to each other."""
        places: dict[Path, int] = {}
        for item in items:
            places.setdefault(item.path, len(places))
        items.sort(key=lambda item: -places[item.path] if self._backward else places[item.path])

    def is_own(self, path: Path) -> bool:
        """Is a file for this process to run?  It takes the file where nothing has taken it."""
        if path not in self._own:
            try:
                os.close(os.open(self._folder / str(path).replace("/", "%"), os.O_CREAT | os.O_EXCL))
                self._own[path] = True
            except FileExistsError:
                self._own[path] = False
        return self._own[path]
