"""Memory of the host that several of its processes write to, as `peer_memory.py` has that of GPUs.

It is for kernels under Triton's interpreter, so that ranks exchange words as they do on GPUs where there is none.  It
has no name in any file system, and ends with the last process that has it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache

_open: dict[int, mmap.mmap] = {}
_files: dict[int, int] = {}


def allocate(device: int, size: int) -> int:
    """The address of ``size`` bytes, all of them 0; the same for the process's life.  Raises RuntimeError."""
    return _allocated(os.getpid(), size)


@cache
def _allocated(process: int, size: int) -> int:
    """Those of ``process``: one that was forked from it would share them with it."""
    try:
        file = os.memfd_create("shardfuse")
        os.ftruncate(file, size)
        address = _mapped(file, size)
    except OSError as error:
        raise RuntimeError(f"no memory that other processes write to: {error}") from error
    _files[address] = file
    return address


def zero(address: int, size: int) -> None:
    """Zero so many bytes."""
    ctypes.memset(address, 0, size)


def exported(address: int) -> bytes:
    """What another process of this host and user opens the allocation at ``address`` by."""
    return f"/proc/{os.getpid()}/fd/{_files[address]}".encode()


def opened(handle: bytes) -> int:
    """The address, in this process, of what another has exported.  Raises RuntimeError."""
    try:
        file = os.open(handle.decode(), os.O_RDWR)
        try:
            return _mapped(file, os.fstat(file).st_size)
        finally:
            os.close(file)
    except OSError as error:
        raise RuntimeError(f"the memory of another process cannot be opened: {error}") from error


def close(address: int) -> None:
    """Let go of what was opened."""
    _open.pop(address).close()


def _mapped(file: int, size: int) -> int:
    found = mmap.mmap(file, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(found))
    _open[address] = found
    return address
