# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Kernels that other processes compile, which have no GPU, while this one does what comes before their first launch.

A worker leaves the binary where this process looks for it.  One that fails leaves nothing: the kernel is compiled here
then, which says what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .binaries import Asked, is_kept
from .cache import LRUCache

Submit = Callable[[Callable[[], None]], "Future[Any]"]
"""``submit(job)`` of a pool of processes; what it gives is done when the job is."""

BEGUN = 512
"""Kernels, of which it is known who compiles them."""
PATIENCE = 60.0
"""Seconds that a program waits for a worker.  Workers that took longer are waited for no more."""

_begun: LRUCache[tuple[int, Asked, Path], Future[Any]] = LRUCache(BEGUN)
"""With the process that has asked for it: a forked one hears of no worker."""


def begin(asked: Asked, directory: Path, compile_apart: Callable[[Asked, Path], None], submit: Submit) -> None:
    """Have a worker compile the kernel, unless it is there, or one does so already."""
    key = os.getpid(), asked, directory
    if _begun.get(key) is None and not is_kept(asked, directory):
        _begun.put(key, submit(partial(compile_apart, asked, directory)))


def wait_for(asked: Asked, directory: Path) -> None:
    """Until the worker that was asked to compile the kernel has ended."""
    global _begun
    future = _begun.get((os.getpid(), asked, directory))
    if future is not None and not wait([future], PATIENCE).done:
        _begun = LRUCache(BEGUN)


@contextmanager
def compiling_for(capability: tuple[int, int]) -> Generator[None]:
    """Triton is told that the current device is of this capability, and asks no driver."""
    from triton.runtime.driver import driver

    held: Any = driver
    before = held._active  # pyright: ignore[reportPrivateUsage]
    held.set_active(_NoGpu(capability))
    try:
        yield
    finally:
        held._active = before  # pyright: ignore[reportPrivateUsage]


class _NoGpu:
    """What Triton asks of its driver to compile a kernel."""

    def __init__(self, capability: tuple[int, int]) -> None:
        major, minor = capability
        self._capability = 10 * major + minor

    def get_current_device(self) -> int:
        """What Triton's tables are looked up by: those of one capability are one device's."""
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)
