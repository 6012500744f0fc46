"""Versions that compare with strings."""

from __future__ import annotations

import re
from functools import total_ordering

from shardfuse.config import VERSION


@total_ordering
class Version:
    """``Version("0.2.3")`` compares with a Version or a string by its numbers."""

    def __init__(self, text: str) -> None:
        self.text = str(text)
        self.numbers = tuple(int(n) for n in re.findall(r"\d+", self.text.split("+")[0]))

    def __eq__(self, other: object) -> bool:
        return self.numbers == Version(str(other)).numbers

    def __lt__(self, other: object) -> bool:
        return self.numbers < Version(str(other)).numbers

    def __hash__(self) -> int:
        return hash(self.numbers)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


__version__ = Version(VERSION)
