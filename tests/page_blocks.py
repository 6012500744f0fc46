"""The Python blocks of a page, and how each is run: alone, or as each of some simulated ranks.

Two comments, each right before a block, are for tests alone: ``<!-- before: CODE -->`` is run first, and
``<!-- on N ranks -->`` has the block run as each of N simulated ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BLOCK = re.compile(
    r"(?:<!-- before:\n(?P<before>.*?)\n-->\n+)?(?:<!-- on (?P<ranks>\d+) ranks -->\n+)?```python\n(?P<code>.*?)```",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """``before``: what is run first.  ``ranks``: 0 for a block that runs alone.  ``line``: of the page, before it."""

    before: str
    code: str
    ranks: int
    line: int


def blocks_of(text: str) -> list[Block]:
    """All blocks of a page, in order."""
    found = [
        Block(b["before"] or "", b["code"], int(b["ranks"] or 0), text.count("\n", 0, b.start("code")))
        for b in _BLOCK.finditer(text)
    ]
    assert len(found) == text.count("```python"), "a block of this page is not recognised"
    return found
