"""What one GPU moves and computes in a microsecond."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Rates that were measured on an H200, which stand for those of a GPU that was not."""

    memory: float = 4.2e6
    """Bytes of its memory that are read or written in a microsecond, by a copy of 1 GB."""
    link: float = 0.28e6
    """Bytes that a rank sends in a microsecond, in an all-reduce of 134 MB over two ranks (`docs/measured.md`)."""
    product: float = 0.6e9
    """Operations of a matmul of 16-bit floats in a microsecond."""
