"""What kernels may take, stated once: the schedulers, the tests and the tuner all ask here."""

from __future__ import annotations

from ..device import LEAST_COPY, MAX_THREADS, WARP, Device
from ..ir.dtype import DataType

WARPS = 4
"""Warps of a program that shares its multiprocessor with several others, which hide what it waits for."""
LONG_WARPS = 8
"""Warps of a program with a long row, or a tile with two sides: the more, the less each thread holds of it."""
WIDEST_LOAD = 8
"""Elements of 16 bits that a thread loads at once: 16 bytes, the widest access of every GPU."""
MAX_WARPS = 16
"""Warps of a program at the most, but of the longest rows: more of them wait for each other at every reduction."""
WIDEST_WARPS = MAX_THREADS // WARP
"""The most that CUDA launches together: of a program that holds one of the longest rows.  RMSNorm of 8192 x 32768,
bfloat16, took 278 us on an H200 so, with 16 warps 291."""
INT32_LIMIT = 2**31
"""The first offset or index that does not fit 32 bits with a sign; from here on they are 64-bit."""
NARROWEST_PIECE = 8
"""Columns of the narrowest piece that a block of columns is cut into: one 16-byte load of 16-bit elements."""
REGISTER_BYTES = 4
"""Of a register, which holds a float32 or two 16-bit values."""
TWO_IN_A_WORD = (DataType.BFloat16, DataType.Half)
"""Types of which two are held, or sent, in one word of 32 bits."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def power_of_two_within(n: int) -> int:
    """The largest power of two that is at most ``n``; 0 where that is 0."""
    return power_of_two(n + 1) // 2


def in_powers_of_two(n: int) -> tuple[int, ...]:
    """``n`` columns in pieces, the widest first; in one, some of whose lanes idle, where pieces would gain little."""
    whole = power_of_two(n)
    if n % NARROWEST_PIECE or 4 * n > 3 * whole:
        return (whole,)
    return tuple(1 << k for k in reversed(range(n.bit_length())) if n >> k & 1)


def vector(dtype: DataType, extent: int, device: Device) -> int:
    """Elements of one load: as many as 16 bytes hold and every row of ``extent`` elements keeps aligned."""
    width = max(device.access_bytes // dtype.itemsize, 1)
    while extent % width:
        width //= 2
    return width


def least_chunk(itemsize: int, warps: int, block: int) -> int:
    """Elements of the smallest chunk: each thread has what it can copy ahead of the narrowest rows, of ``itemsize``."""
    return min(warps * WARP * max(LEAST_COPY // itemsize, 1), block)


def chunk_widths(total: int, block: int, least: int) -> list[int]:
    """``total`` elements in blocks, the rest in smaller ones: lanes that are masked cost as much as others."""
    return [block] * (total // block) + _cut(total % block, least)


def _cut(rest: int, least: int) -> list[int]:
    """Powers of two that cover ``rest``, the last of them masked where it is more than is left.

    Below ``least`` a chunk is widened if a quarter of it is used: else its registers cost more than the stall.
    """
    if rest <= 0:
        return []
    whole = power_of_two(rest)
    if whole <= least:
        return [least if 4 * rest >= least else whole]
    if 4 * rest > 3 * whole:
        return [whole]
    return [whole // 2, *_cut(rest - whole // 2, least)]
