"""A GPU as the schedulers see it, and the table of those that kernels are planned for by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from .measured import H200_MEASURED, Measured, measured_for
from .rates import Rates

WARP = 32
"""Threads of a warp, on every GPU of NVIDIA's."""
MAX_THREADS = 1024
"""Threads of a program, at most.  Source: CUDA C++ programming guide."""
MAX_REGISTERS = 255
"""Registers of a thread, at most.  Source: CUDA C++ programming guide."""
REGISTER_STEP = 8
"""Registers of a thread are handed out in so many.  Source: CUDA occupancy calculator."""
LINE_BYTES = 128
"""Bytes of a line of the caches, which one prefetch brings.  Source: CUDA C++ programming guide."""
SECTOR_BYTES = 32
"""Bytes of a line that are fetched together.  Source: CUDA C++ best practices guide."""
LEAST_COPY = 4
"""Bytes of the narrowest copy to shared memory that runs ahead (``cp.async``): what comes in less is waited for."""


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
    capability: the compute capability, 90 for 9.0, which kernels are compiled for.
    measured: what none of these says.
    rates: what it moves and computes in a microsecond.
    Source: NVIDIA's CUDA C++ programming guide, table of technical specifications by compute capability.
    """

    name: str
    multiprocessors: int
    registers: int
    warps: int
    shared_bytes: int
    access_bytes: int
    l2_bytes: int
    capability: int
    measured: Measured = field(default=H200_MEASURED, repr=False)
    rates: Rates = field(default=Rates(), repr=False)

    @property
    def row_bytes(self) -> int:
        """Bytes that a program holds of all streamed inputs of its row, at the most: a quarter of the registers."""
        return self.registers

    @property
    def filling(self) -> int:
        """Programs below which memory idles while some of them wait: two for each multiprocessor."""
        return 2 * self.multiprocessors

    def bound(self, warps: int, program: int = 1) -> int:
        """Registers of a thread, at most, with which so many warps are resident on a multiprocessor.

        program: warps of one program, all of which are resident at least.
        """
        return min(self.registers // (max(warps, program) * WARP) // REGISTER_STEP * REGISTER_STEP, MAX_REGISTERS)


def _named(name: str, multiprocessors: int, l2_mib: int, capability: int) -> Device:
    """A GPU of the data centre's or of the desk's, of which a multiprocessor is what its capability says."""
    warps, shared_kib = {80: (64, 163), 90: (64, 227), 100: (64, 227), 120: (48, 99)}[capability]
    shared, measured = shared_kib << 10, measured_for(capability)
    return Device(name, multiprocessors, 65536, warps, shared, 16, l2_mib << 20, capability, measured)


H200 = _named("NVIDIA H200", 132, 50, 90)
"""The GPU that schedules were measured on, and that they are made for where there is none."""
A100 = _named("NVIDIA A100-SXM4-80GB", 108, 40, 80)
"""Source: NVIDIA A100 Tensor Core GPU Architecture (2020).  Nothing was measured on it."""
B200 = _named("NVIDIA B200", 148, 126, 100)
"""Source: NVIDIA Blackwell tuning guide; multiprocessors: Chips and Cheese, "NVIDIA's B200".  Nothing was measured."""
RTX_5090 = _named("NVIDIA GeForce RTX 5090", 170, 96, 120)
"""Source: NVIDIA RTX Blackwell GPU Architecture (2025).  Nothing was measured on it."""

NAMED: dict[str, Device] = {device.name: device for device in (H200, A100, B200, RTX_5090)}
"""By the name that the driver gives."""
