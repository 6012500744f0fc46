"""What one GPU moves and computes in a microsecond."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Rates that were measured on an H200, which stand for those of a GPU that was not.

    Those from ``issued`` on are fitted to the recorded timings, from which the costs of kernels are 6 % off on average
    (``python -m benchmarks.ranking timings``).
    """

    memory: float = 4.2e6
    """Bytes of its memory that are read or written in a microsecond, by a copy of 1 GB."""
    link: float = 0.28e6
    """Bytes that a rank sends in a microsecond, in an all-reduce of 134 MB over two ranks (`docs/measured.md`)."""
    product: float = 0.6e9
    """Operations of a matmul of 16-bit floats in a microsecond."""
    issued: float = 3.0e7
    """Instructions of all threads in a microsecond."""
    launched: float = 5.0
    """Microseconds of a kernel's start and end: copies of 32 to 512 MB lose so many."""
    loaded: float = 0.85
    met: float = 0.27
    reached: float = 4.0
    """Microseconds that a program waits for a load from memory, for a reduction across its warps, and for the other
    programs of its group or grid."""
    share: float = 1.125
    """How many times its part of the bandwidth one multiprocessor has while others have nothing left to do."""
