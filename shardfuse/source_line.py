"""Where in the caller's program something was written, so that a later error can name that line.

Every op of every definition keeps one, so a line costs what finding its frame costs: the code and the place in it are
kept, and turned into file, number and text when an error is printed.  Lines differ between ranks whose programs lie in
different folders: nothing that ranks compare, keep or plan by may depend on them.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_HERE = str(Path(__file__).parent) + os.sep
_OWN = tuple(f"{_HERE}{part}" for part in ("nn/", "passes/", "frontend/inputs.py", "frontend/pieces.py"))
"""Where shardfuse itself defines fusions, and says how tensors are sharded about which the caller said nothing."""
GENERATED = "<shardfuse"
"""Begins the file name of a program that shardfuse has written."""
_LIBRARIES = (_HERE, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__, GENERATED)
"""Frames of these are not the caller's: between a model and a fusion that it runs stand torch's modules too."""

_CALLER, _LIBRARY, _OWN_DOING = "caller", "library", "own"
_kinds: dict[str, str] = {}
"""Of the files that were met, whose they are."""


_new: Callable[..., SourceLine] = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
"""Of a NamedTuple, in a third of the time."""


class SourceLine(NamedTuple):
    """A line of the caller's program, as an instruction of ``code``; prints as ``train.py:31: y = fd.ops.add(a, b)``.

    ``at``: the offset of the instruction in bytes.
    """

    code: CodeType
    at: int

    def __str__(self) -> str:
        file = self.code.co_filename
        number = next(islice(self.code.co_positions(), self.at // 2, None))[0] or self.code.co_firstlineno
        text = linecache.getline(file, number).strip()
        return f"{from_here(file)}:{number}{': ' if text else ''}{text}"


def from_here(file: str) -> str:
    """The path of a file from the working directory, where it is below that."""
    try:
        return file.removeprefix(os.getcwd() + os.sep)
    except OSError:  # the directory is gone
        return file


def caller_line(*, in_modules: bool = False) -> SourceLine | None:
    """The innermost line on the stack that is neither shardfuse's nor torch's; ``None`` where there is none.

    A fusion that a module of shardfuse.nn defines serves all modules of its kind, so that no one line made it: ``None``
    as well, but where ``in_modules`` asks who made the module.
    """
    # The function that asks is shardfuse's.
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        kind = _kinds.get(file) or _remembered(file)
        if kind is _CALLER:
            return _new(SourceLine, (code, frame.f_lasti))
        if kind is _OWN_DOING and not in_modules:
            return None
        frame = frame.f_back
    return None


def _remembered(file: str) -> str:
    is_library = file.startswith(_LIBRARIES)
    _kinds[file] = kind = _OWN_DOING if file.startswith(_OWN) else _LIBRARY if is_library else _CALLER
    return kind


def is_callers(file: str) -> bool:
    """Is the file neither shardfuse's nor torch's?"""
    return (_kinds.get(file) or _remembered(file)) is _CALLER
