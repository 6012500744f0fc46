"""Errors about tensors of a fusion name the lines of the caller's program that made those tensors.

A ShardfuseError names tensors in its sentence; an error of torch's in a note of the op that it was raised by.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import ShardfuseError
from .fusion import Fusion, Val
from .tensor_view import TensorView

_NAME = re.compile(r"(?<![A-Za-z0-9])[TS]\d+")
"""A tensor or scalar of a definition in an error's sentence; ``T3p`` and ``kernel pointwise_T3`` come of T3."""
RAISED_BY = "raised by "
"""Begins the note of an error that is not shardfuse's: the op in which it was raised."""
_MOST = 6
"""Lines that an error names: those of an op and of its operands, or of a tensor and of how it was sharded."""


def definitions_name(name: str) -> str:
    """What the definition calls the tensor of a plan: ``T3h0``, which is T3 gathered, is T3."""
    found = _NAME.match(name)
    return name if found is None else found.group()


class lines_named:  # noqa: N801 - used as a statement
    """An error of the body gets the lines of the tensors that it names, ``about``'s before them."""

    __slots__ = ("about", "fusion")

    def __init__(self, fusion: Fusion, about: Val | None = None) -> None:
        self.fusion = fusion
        self.about = about

    def __enter__(self) -> None:
        """Nothing: every call of a fusion comes by."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ShardfuseError):
            error.at(self._lines(str(error), is_about_schedule=error.is_about_schedule))
            return
        notes: list[str] = [] if error is None else error.__dict__.get("__notes__", [])
        for k, note in enumerate(notes):
            if note.startswith(RAISED_BY) and "\n" not in note:
                lines = self._lines(note, is_about_schedule=False)
                notes[k] = "\n".join((note, *(f"  at {line}" for line in lines)))

    def _lines(self, text: str, *, is_about_schedule: bool) -> list[str]:
        named = _NAME.findall(text.partition("\n")[0])
        known = {v.name: v for v in _values(self.fusion)}
        about = [] if self.about is None else [self.about]
        values = list(dict.fromkeys([*about, *(known[name] for name in named if name in known)]))
        found: dict[str, list[str]] = {}
        for v in values:
            scheduled = v.schedule_lines if isinstance(v, TensorView) and is_about_schedule else ()
            for line in (v.line, *scheduled):
                if line is not None and v.name not in found.setdefault(str(line), []):
                    found[str(line)].append(v.name)
        return [f"{line}  # {', '.join(names)}" for line, names in found.items()][:_MOST]


def _values(fusion: Fusion) -> Iterable[Val]:
    yield from (i.val for i in fusion.inputs)
    yield from (out for record in fusion.records for out in record.outputs)
