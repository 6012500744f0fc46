"""A GPU as the schedulers see it, and the table of those that were measured."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
"""Threads of a warp, on every GPU of NVIDIA's."""


@dataclass(frozen=True)
class Device:
    """What one GPU has, and what one program (a CUDA block) may take of it.

    name: what is planned for it is for no other.
    multiprocessors: of the whole GPU, or of the slice of it that this process has.
    registers: 32-bit registers of one multiprocessor.
    warps: how many are resident on one multiprocessor at once.
    shared_bytes: the largest shared memory of one program.
    access_bytes: the widest load or store of one thread.
    l2_bytes: the second-level cache.
    memory_rate: bytes of its memory that are read or written in a microsecond, by a copy of 1 GB.
    link_rate: bytes that a rank sends in a microsecond, in an all-reduce of 134 MB over two ranks (`docs/measured.md`).
    product_rate: operations of a matmul of 16-bit floats in a microsecond.
    Source: NVIDIA's CUDA C++ programming guide, table of technical specifications by compute capability.
    """

    name: str
    multiprocessors: int
    registers: int
    warps: int
    shared_bytes: int
    access_bytes: int
    l2_bytes: int
    memory_rate: float = 4.2e6
    link_rate: float = 0.28e6
    product_rate: float = 0.6e9


H200 = Device(
    "NVIDIA H200",
    multiprocessors=132,
    registers=65536,
    warps=64,
    shared_bytes=227 * 1024,
    access_bytes=16,
    l2_bytes=50 << 20,
)
"""The GPU that schedules were measured on, and that they are made for where there is none."""

NAMED: dict[str, Device] = {H200.name: H200}
"""By the name that the driver gives: what was measured there is planned with."""
