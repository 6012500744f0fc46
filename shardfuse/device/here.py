"""The record of the GPU that a program runs on."""

from __future__ import annotations

from typing import Any, cast

import torch

from .measured import measured_for
from .record import H200, NAMED, WARP, Device

_ACCESS_BYTES = 16
"""The widest load of a thread on every GPU that Triton compiles for."""
_REGISTERS = 65536
"""Of a multiprocessor, on every GPU of compute capability 5.0 and later.  Source: CUDA C++ programming guide."""
_KEPT = 1024
"""Bytes of a program's shared memory that the driver keeps.  Source: CUDA C++ programming guide, compute capability 8.x
and later."""


def device_here(device: torch.device | None = None) -> Device:
    """What kernels are planned for: ``device``, else the current GPU; an H200 where this process uses none.

    A GPU of the table of named ones is taken from there.  Another, and a slice of one, is read from the driver:
    programs that wait for each other must all be resident, and their grids follow from its multiprocessors.
    """
    if not torch.cuda.is_initialized():
        return H200
    found = cast(Any, torch.cuda).get_device_properties(_number_of(device))
    named = NAMED.get(found.name)
    if named is not None and named.multiprocessors == found.multi_processor_count:
        return named
    capability = 10 * found.major + found.minor
    return Device(
        found.name,
        multiprocessors=found.multi_processor_count,
        registers=_REGISTERS,
        warps=found.max_threads_per_multi_processor // WARP,
        shared_bytes=getattr(found, "shared_memory_per_multiprocessor", found.shared_memory_per_block + _KEPT) - _KEPT,
        access_bytes=_ACCESS_BYTES,
        l2_bytes=found.L2_cache_size,
        capability=capability,
        measured=measured_for(capability),
    )


def _number_of(device: torch.device | None) -> int:
    index = None if device is None or device.type != "cuda" else cast(int | None, device.index)
    return torch.cuda.current_device() if index is None else index
