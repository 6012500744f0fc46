"""Numbers on the host, known or not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..source_line import SourceLine
from .dtype import DataType
from .without_value import WithoutValue

Number = int | float | bool | complex


@dataclass(eq=False)
class Scalar(WithoutValue):
    """A host number.  ``value`` is ``None`` for a fusion input and for what is computed from one.

    ``is_literal``: written into kernels as it is; else a kernel argument, so that a new value needs no new kernel.
    ``line``: of the caller's program, where it was made.
    """

    name: str
    dtype: DataType
    value: Number | None = None
    is_literal: bool = False
    line: SourceLine | None = None

    def __repr__(self) -> str:
        return repr(self.value) if self.is_literal else self.name


Size = int | Scalar
"""An extent or an index: a number, or in a definition a scalar of the fusion."""


def number_text(value: Number) -> str:
    """Python text that evaluates to ``value``: infinities, NaN and complex zeros of either sign have no literal."""
    if isinstance(value, complex):
        return f"complex({number_text(value.real)}, {number_text(value.imag)})"
    return repr(value) if isinstance(value, int) or math.isfinite(value) else f"float('{value}')"
