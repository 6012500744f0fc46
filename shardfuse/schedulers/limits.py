"""What kernels may take, stated once: the schedulers, the tests and the tuner all ask here."""

from __future__ import annotations

from ..device import WARP, Device
from ..ir.dtype import DataType

SHARED = 0.9
"""What copies under way may take of shared memory; the rest is for reductions."""
WIDEST_LOAD = 8
"""Elements of 16 bits that a thread loads at once."""
MAX_WARPS = 16
WIDEST_WARPS = 32
"""Of the longest rows that one program holds: RMSNorm of 8192 x 32768, bfloat16, took 278 us, with 16 warps 291."""
MAX_CHUNKS = 24
"""Unrolled chunks of a row: beyond, the code outgrows the instruction cache for no gain."""
MAX_ROW_BYTES = 64 * 1024
"""What a program holds of all streamed inputs of its row: 128 bytes a thread with 16 warps."""
SHORT_COLUMN = 128
"""Reduced elements that a tile of columns reads in one go where it needs them once."""
MAX_COLUMN = 1024
"""Reduced elements, of all inputs, that a tile of columns holds in registers."""
MAX_TEAM = 128
"""Programs that share a row: each polls a word of every other."""
MANY_VECTORS = 2
"""Beside each input of a row; more are what its kernel takes most of its time for, and what the row's own elements push
out of the first cache: LayerNorm of 8192 x 4096, float16, with 4 of them, took 37.0 us with the row kept out of it,
38.3 with the row kept; RMSNorm, with one, of 32768 x 4096 133.6 and 129.7."""
PROGRAMS_PER_MULTIPROCESSOR = 2
"""Fewer leave the memory idle while a program waits."""
ODD_BYTES = 4
"""Rows that are aligned to no more are walked from the beginning of the word that their first element lies in."""
LINE_BYTES = 128
"""What one prefetch brings."""
INT32_LIMIT = 2**31
"""Offsets and indices from here on are 64-bit."""


NARROWEST_PIECE = 8
"""Columns: 16 bytes of 16-bit elements, the widest load of a thread."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def in_powers_of_two(n: int) -> tuple[int, ...]:
    """``n`` columns in pieces, the widest first; in one, some of whose lanes idle, where pieces would gain little."""
    whole = power_of_two(n)
    if n % NARROWEST_PIECE or 4 * n > 3 * whole:
        return (whole,)
    return tuple(1 << k for k in reversed(range(n.bit_length())) if n >> k & 1)


def resident(device: Device, warps: int, registers: int) -> int:
    """Programs of ``warps`` warps that run at once where a thread has ``registers`` (a multiple of 8)."""
    return device.multiprocessors * min(device.registers // (warps * WARP * registers), device.warps // warps)


def vector(dtype: DataType, extent: int, device: Device) -> int:
    """Elements of one load: as many as 16 bytes hold and every row of ``extent`` elements keeps aligned."""
    width = max(device.access_bytes // dtype.itemsize, 1)
    while extent % width:
        width //= 2
    return width


def is_odd(dtype: DataType, extent: int, device: Device) -> bool:
    """Are rows of so many elements too odd for loads of more than a few bytes?"""
    return vector(dtype, extent, device) * dtype.itemsize <= ODD_BYTES
