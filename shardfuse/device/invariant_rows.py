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
    resident: int = 32
    """Warps on a multiprocessor up to which all loads come first, because few others hide what later ones would wait
    for.  LayerNorm of 64 x 5120, 8 warps a row, took 4.9 us so, else 6.5, of 2048 x 1536, 2 warps, 7.2 and 7.9; but of
    8192 x 4096 45 and 37, of 512 x 8192, 16 warps, 10.2 and 8.5."""
    spared: float = 0.15
    """The part of all lanes that must have an element more for half as many warps to be taken.  Softmax of 8192 x 5120
    took 65 us with 16 warps, 0.63 of whose lanes had one, 48 with 8, 0.83 of them, and 44 with 4; of 8192 x 1536 20.1
    us with 4 warps, 0.75 of their lanes, with 2 17.0."""
    few: int = 64
    """Rows that are to fill the machine where a row is walked in a loop, however many there are.  Cross entropy of 1,
    64 and 2048 rows of 128256 classes took 14.8, 20.9 and 403 us so, by groups of 4, by a program a row 32.1, 34.7 and
    391."""
    phases: int = 4
    """Reductions that follow one another, and one, up to which a row has so many threads."""
