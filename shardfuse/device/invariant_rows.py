"""Numbers of rows whose sums are in one order whatever the number of rows, which were measured on a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InvariantRows:
    """Rows with a program each, however many they are.  Times are those of whole kernels on an H200, in bfloat16."""

    each: int = 16
    """Elements of a row that a thread holds."""
    short: int = 512
    """Elements of a row up to which a warp takes it whole, with others: it takes as long on an under-occupied grid."""
    eager_warps: int = 4
    """Up to which all loads come first.  LayerNorm of 8192 x 4096, 8 warps, took 45 us so, else 37; of 2048 columns, 4
    warps, 23.5 and 22.2, but of a single row 5.3 and 6.0."""
    wide_bytes: int = 4
    """Bytes of an element from which all loads come first with any warps, as fewer are left of each thread: float32
    took 68 us so, else 69, and of a single row 5.5 and 6.2."""
    used: float = 0.8
    """The part of the lanes that have an element, below which half as many warps are taken.  Softmax of 8192 x 5120
    took 65 us with 16 warps, 0.63 of whose lanes had one; without the promise 45."""
    phases: int = 4
    """Reductions that follow one another, and one, up to which a row has so many threads."""
