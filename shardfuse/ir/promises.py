"""Promises: what a fusion keeps bit for bit, beyond what every fusion keeps."""

from __future__ import annotations

from dataclasses import dataclass

INVARIANTS = ("batch", "ranks")


SEGMENTS = 8
"""Parts that a sum is cut into where it is to be the same on any number of ranks that divides them."""
MOST_IN_PAIRS, LONGEST_SEGMENT = 1 << 15, 1 << 16
"""Elements, at the most, of a row that is added up in pairs as a program holds it, and of a segment of a longer one,
which a program takes in and holds nothing of."""


@dataclass(frozen=True)
class Promises:
    """What the author of a fusion asked for; a plan keeps it, or is refused.

    batch: a row's result is bitwise the same whatever the number of rows, and whatever its place among them.
    ranks: a result is bitwise the same on 1, 2, 4 and 8 ranks.
    wide_sums: 16-bit numbers are added in float32 across ranks, by whichever collective.
    """

    batch: bool = False
    ranks: bool = False
    wide_sums: bool = False

    @property
    def invariant(self) -> tuple[str, ...]:
        """The names of what does not change a result."""
        return tuple(name for name, is_kept in zip(INVARIANTS, (self.batch, self.ranks), strict=True) if is_kept)

    @property
    def arguments(self) -> tuple[str, ...]:
        """As they are said, each an argument of ``promise``; none where nothing is promised."""
        said = (f"invariant={self.invariant}",) if self.invariant else ()
        return (*said, *(('accumulate="float32"',) if self.wide_sums else ()))

    def __str__(self) -> str:
        return ", ".join(self.arguments)
