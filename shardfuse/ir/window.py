"""Windows: tensors whose elements are those of a stored tensor at other places along some of its axes.

A ``Window`` is no computation but a way to load: a kernel walks the axes of the output and reads the input at the
indices that its ``reads`` say.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Read:
    """Along logical axis ``axis``: element j is the input's ``offset + step * j`` where start <= j < stop, else 0."""

    axis: int
    offset: int
    step: int
    start: int
    stop: int

    def __repr__(self) -> str:
        place = "j" if self.step == 1 else f"{self.step} * j"
        return f"axis {self.axis}: {self.offset} + {place}, {self.start} <= j < {self.stop}"
