"""Lists of arguments on docs/reference.md: each `name: text` of a docstring begins an item there.

Loaded by mkdocs.yml.  Docstrings are written to be read in an editor, without marks of lists::

    eps: None takes torch's own number.          - **eps**: None takes torch's own number.
    x: [..., hidden_size], of any dtype.    ->   - **x**: [..., hidden_size], of any dtype.
    Raises PlacementError.                       Raises PlacementError.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_NAME = r"(?:``)?[a-z_][a-z_0-9]*(?:``)?"
_NAMES = re.compile(rf"({_NAME}(?:, {_NAME})*):(?: (?=\S)|$)", re.MULTILINE)
_WITHIN = re.compile(rf"(?:(?<=[.?])  |(?<=;) )(?={_NAMES.pattern}|Raises )", re.MULTILINE)
"""Where an item, or what is raised, begins within a line: behind a sentence, which two spaces end, or a semicolon."""
_ENDS = (".", "?", ":", ";", ")", "and")
"""Of what is before an item: a sentence, a list's introduction, or nothing."""


class DocstringLists(Extension):
    """The arguments that docstrings name, as lists."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """``text`` with items of a Markdown list for the lines that begin with names of arguments."""
    lines, written = list[str](), False
    before = ""
    for line in _WITHIN.sub("\n", text).splitlines():
        found = _NAMES.match(line) if before.endswith(_ENDS) or not before else None
        if found:
            lines += [] if written else [""]
            names = ", ".join(f"**{name.strip('`')}**" for name in found[1].split(", "))
            lines.append(f"- {names}: {line[found.end() :]}")
            written = True
        elif written and (line.startswith(("Raises", "->", "Returns")) or not line):
            lines += ["", line]
            written = False
        else:
            lines.append(f"  {line}" if written else line)
        before = line.rstrip()
    return "\n".join(lines)
