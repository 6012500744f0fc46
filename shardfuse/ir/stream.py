"""An axis in chunks, and the order in which each rank takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..mesh import DeviceMesh, ParallelType
from .digits import Axis, extent

T = TypeVar("T")


@dataclass(frozen=True)
class Swizzle:
    """Each rank begins with the chunk that has its own index on ``parallel_type``; the next follow, in a ring."""

    mesh: DeviceMesh
    parallel_type: ParallelType


@dataclass(frozen=True)
class Stream:
    """``digits`` number the chunks.  Stage i is chunk i, or of a swizzled stream chunk (own index + i) mod chunks."""

    digits: Axis
    swizzle: Swizzle | None = None

    @property
    def chunks(self) -> int:
        return extent(self.digits)

    def first(self, rank: int) -> int:
        """The chunk that ``rank`` begins with."""
        if self.swizzle is None or rank not in self.swizzle.mesh.ranks:
            return 0
        return self.swizzle.mesh.index(rank, self.swizzle.parallel_type)

    def chunk(self, stage: int, rank: int) -> int:
        """The number of the chunk that ``rank`` takes at ``stage``."""
        return (self.first(rank) + stage) % self.chunks

    def by_chunk(self, stages: Sequence[T], rank: int) -> tuple[T, ...]:
        """What ``rank`` has of each stage, in the order of the chunks."""
        first = self.first(rank)
        return tuple(stages[(k - first) % self.chunks] for k in range(self.chunks))

    def __repr__(self) -> str:
        return f"{self.digits}" + (f" swizzled on {self.swizzle.parallel_type}" if self.swizzle is not None else "")
