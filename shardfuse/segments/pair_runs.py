"""Sums in pairs: how long the runs of a row are, and the row with each of them as long as the next power of two.

Eight runs of 640 elements are branches of one tree only if each begins where a branch does: at a multiple of 1024.
"""

from __future__ import annotations

from ..ir.op import Reduce
from .segment import Segment


def runs_of_pairs(segment: Segment) -> set[int]:
    """Elements of the runs of its sums in pairs (``Reduce.in_pairs``): of one length where a single kernel has them."""
    return {e.op.in_pairs for e in segment.exprs if isinstance(e.op, Reduce) and e.op.in_pairs}


def run_of_pairs(segment: Segment) -> int:
    """The same of a kernel; 0 where it has no such sum."""
    return next(iter(runs_of_pairs(segment)), 0)


def whole_run(run: int) -> int:
    """Lanes of a run: the next power of two."""
    return 1 << max(run - 1, 0).bit_length()


def padded(n: int, run: int) -> int:
    """Lanes of ``n`` elements in runs of ``run``, or of a part of one, which has a power of two then; 0 for no runs."""
    return n // run * whole_run(run) if run and n >= run else n
