"""Sums in pairs: the runs of a row, and in which lanes of a program their elements are.

Eight runs of 640 elements are branches of one tree only if each has a power of two of summands.  640 is 5 x 128: the
elements that are 128 apart are added up first, one after another, which leaves 128 sums.  A row is 5 chunks then, of
1024 lanes, of which lane ``l`` of chunk ``k`` has element ::

    l // 128 * 640 + k * 128 + l % 128

Of a run without such a divisor, 4000 elements, the last part is shorter: 7 x 512 + 416.  Some lanes of the last chunk
have no element then.  How many parts there are, ``passes/segments.py`` chooses, and ``Reduce.parts`` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.expr import Expr
from ..ir.op import Reduce, is_reduction
from .segment import Segment


@dataclass(frozen=True)
class PairRuns:
    """``run`` and ``parts``: ``Reduce.in_pairs`` and ``parts``; a run of 0 where no sum is in pairs."""

    run: int = 0
    parts: int = 1

    def __str__(self) -> str:
        return f"{self.run} elements" + (f" in {self.parts} parts" if self.parts > 1 else "")

    @property
    def lanes(self) -> int:
        """Of a part of a run, but for the last one its elements."""
        return 1 << max(-(-self.run // self.parts) - 1, 0).bit_length()

    @property
    def last(self) -> int:
        """Elements of the last part."""
        return self.run - (self.parts - 1) * self.lanes

    @property
    def is_padded(self) -> bool:
        """Have some lanes no element of the last part?"""
        return self.run > 0 and self.last < self.lanes

    def lanes_of_row(self, n: int) -> int:
        """Lanes of a chunk of all runs of ``n`` elements, which each have one of every part.

        A rank may have less than a run, a part of one whose length is a power of two.
        """
        return n // self.run * self.lanes if self.run and n >= self.run else n

    def parts_of_row(self, n: int) -> int:
        """Elements of ``n`` that a lane adds up one after another."""
        return self.parts if n >= self.run else 1


def has_order(expr: Expr) -> bool:
    """Does the order of its additions show in the result?  Integers, maxima and truth values are the same in any."""
    return is_reduction(expr.op, "sum", "prod") and (expr.output.dtype.is_floating or expr.output.dtype.is_complex)


def all_pair_runs(segment: Segment) -> set[PairRuns]:
    """Of its sums in pairs: a single kernel has runs of one kind."""
    sums = (e.op for e in segment.exprs if isinstance(e.op, Reduce) and e.op.in_pairs)
    return {PairRuns(op.in_pairs, op.parts) for op in sums}


def pair_runs(segment: Segment) -> PairRuns:
    """Of a kernel."""
    return next(iter(all_pair_runs(segment)), PairRuns())
