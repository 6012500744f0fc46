"""What a kernel whose ranks exchange may take of a GPU, beside NCCL."""

from __future__ import annotations

LEFT_FREE = 32
"""Multiprocessors on which no program of a plan is expected: as many as NCCL takes for one process group, see
``mesh/gpu_room.py``.  Where there are more groups, fewer programs of a plan run at a time (``RankExchange``)."""
WARPS_OF_ROWS, MANY_WARPS = 16, 32
"""Warps of a multiprocessor that are resident whatever the compiler does, as a thread is given no more registers than
its registers divided by them: 128 and 64 on an H200.  The first holds the longest rows without a spill."""


def free_multiprocessors(multiprocessors: int) -> int:
    """Those of a GPU with so many that NCCL leaves where it has one process group."""
    return max(multiprocessors - LEFT_FREE, 1)
