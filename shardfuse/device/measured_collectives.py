"""What was measured on two H200s of collectives that are kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collectives:
    """Chunks of a tensor that ranks store into each other's memory over NVLink, and who moves them."""

    chunk_bytes: int = 1 << 14
    """Bytes of a chunk for one peer, at the most: the row of 8192 16-bit elements with which the exchange row by row
    reaches NVLink's bandwidth. More peers have smaller ones, so that slots take as much."""
    least_chunk_bytes: int = 1 << 12
    """Bytes of a chunk where a launch has less than one for each multiprocessor: the smaller ones leave and come by
    more of them at a time. Below it a fence and a flag take longer than what they stand for."""
    thread_bytes: int = 64
    """Bytes of the chunks of all peers that a thread has, of each those of one load at least: as many are under
    way."""
    another_turn: float = 8.0
    """Microseconds that a program takes for another turn of a row that ranks send each other. Four rows of 8192 took
    14.9 us in two turns, one row 5.8 in one (4 x H200, bfloat16, in a CUDA graph)."""
    summands: int = 4
    """Ranks, at most, of which a thread with 32 values of a row adds up summands and passes the sums on with no more
    than 40 bytes in local memory; of 8 ranks it takes 350 with as many values, and 24 with half of them (sm_90)."""
    programs: int = 4
    """Programs on a multiprocessor: while one waits, the others store."""
    longest: int = 1 << 28
    """Bytes of what a rank gives one other, beyond which NCCL's rings are as fast."""
