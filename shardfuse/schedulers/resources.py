"""What one element of a row takes of a thread's registers: counted once, for every form that holds rows and sums.

Registers have 32 bits.  What a form adds for addresses, and for what is being computed, is its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..ir.dtype import DataType
from ..ir.expr import REDUCTIONS, Expr
from ..ops.reductions import REDUCTION_TABLE
from .segment import Segment
from .space import Space

REGISTER = 4
"""Bytes of a register."""


@dataclass(frozen=True)
class Element:
    """Bytes of one element of the rows that a kernel walks.

    rows: of all inputs that change from row to row, as they are loaded.
    vectors: of those that are the same for all rows, as they are loaded; computed: as they are computed with.
    sums: of the sums down its column that are carried from row to row.
    """

    rows: int
    vectors: int
    computed: int
    sums: int

    def registers(self, *, keeps: bool) -> float:
        """Of one row and what stays: sums of columns, and vectors where they are kept as they are computed with."""
        return (self.rows + self.sums + (self.computed if keeps else 0)) / REGISTER

    def loaded_registers(self, elements: int, rows: int) -> int:
        """Of so many elements of several rows, and of what stays, all as it is loaded."""
        return elements * (rows * self.rows + self.vectors + self.sums) // REGISTER


def element_of(segment: Segment, space: Space, columns: Iterable[Expr]) -> Element:
    """``columns``: the reductions of ``segment`` that run down columns."""
    along = [t for t in segment.loads if space.has_r(t)]
    vectors = [t.dtype for t in along if not space.is_walked(t)]
    return Element(
        rows=sum(t.dtype.itemsize for t in along if space.is_walked(t)),
        vectors=sum(dtype.itemsize for dtype in vectors),
        computed=sum(dtype.compute.itemsize for dtype in vectors),
        sums=sum(carried(e).itemsize for e in columns),
    )


def carried(expr: Expr) -> DataType:
    """The type that the reduction ``expr`` accumulates in."""
    return REDUCTION_TABLE[expr.op].carried(expr.tensors[0].dtype, expr.output.dtype)


def summed_registers(segment: Segment) -> int:
    """Of one element while it is added up: of the widest of what is reduced, and of what it is accumulated in."""
    widest = (d for e in segment.exprs if e.op in REDUCTIONS for d in (e.tensors[0].dtype.compute, carried(e)))
    return max(max(d.itemsize for d in widest) // REGISTER, 1)
