"""The backend of a rank's collectives and the device that it computes on, by the GPUs that its process sees."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardfuse.config import LaunchConfig
from shardfuse.errors import BackendUnavailableError
from shardfuse.mesh.groups import default_group
from shardfuse.start_errors import SharedGpuError

# What a backend's name stands for: with NCCL, tensors on the CPU (counters, flags) are gloo's.
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}


def choose(backend: str | None, launch: LaunchConfig, *, is_gpu_shared: bool = False) -> tuple[str, torch.device]:
    """The backend and the device; the device is then the current one.

    is_gpu_shared: ranks take turns on the GPUs that there are, whose collectives are gloo's: NCCL refuses two ranks on
    one GPU.
    Raises BackendUnavailableError and SharedGpuError.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = launch.local_size <= gpus and dist.is_nccl_available() and not is_gpu_shared
    chosen = backend or ("nccl" if enough else "gloo")
    if not isinstance(chosen, str) or chosen not in BACKENDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BackendUnavailableError(chosen, f"shardfuse knows {' and '.join(sorted(BACKENDS))}")
    if is_gpu_shared and (chosen == "nccl" or not gpus):
        raise SharedGpuError(launch.rank, "asks for NCCL, which refuses that" if gpus else "sees no GPU")
    if chosen == "nccl" and not enough:
        raise BackendUnavailableError(chosen, f"{launch.local_size} ranks on this host have {gpus} GPUs")
    device = torch.device("cpu")
    if chosen == "nccl" or is_gpu_shared:
        device = torch.device("cuda", launch.local_rank % gpus)
        torch.cuda.set_device(device)
    return chosen, device


# By default process group: the GPU that `initialize` chose for it, or else that of the first program.
_own: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def own_gpu(number: int) -> int:
    """The number of the GPU that this rank computes on, which is ``number`` where it has had none yet."""
    return _own.setdefault(default_group(), number)
