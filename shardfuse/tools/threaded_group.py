"""torch's process group whose ranks are threads, and what has to be put right around it."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
import torch.testing._internal.distributed.multi_threaded_pg as _threaded

_threads: Any = _threaded  # torch's test group has no types


def install_threaded_group() -> None:
    """Give torch.distributed a world for each thread, until ``remove_threaded_group`` is called."""
    if not torch.cuda.is_available():
        # Fake tensors of a CUDA build without a GPU replace its device guard, once for the process, by one that lives
        # as long as the thread that was the first (torch 2.11): not a rank's, or the next fake tensor is a crash.
        cast(Any, torch)._C._ensureCUDADeviceGuardSet()
    world = _threads._install_threaded_pg()
    if not hasattr(world, "comms"):  # torch 2.11's has none, although `destroy_process_group` reads them
        world.comms = []  # of torchcomms, which a threaded group has none of in any version


def remove_threaded_group() -> None:
    """Give torch.distributed the process's own world again."""
    _threads._uninstall_threaded_pg()
    _forget_redistributions()


def _forget_redistributions() -> None:
    """How torch brings DTensors from one sharding to another is kept by mesh, and what a rank does is part of it.

    A mesh of threads is told from another by the thread's number, which the threads of the next world have again, in
    another order: a rank would be given what another was to do.
    """
    kept = cast(Any, sys.modules.get("torch.distributed.tensor._redistribute"))
    if kept is not None:
        kept._gen_transform_infos.cache_clear()
        kept.clear_redistribute_planner_cache()
