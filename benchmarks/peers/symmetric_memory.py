"""torch's all-reduces over its symmetric memory, of all ranks: peers of kernels that exchange.

Its interface is private, and alike in torch 2.11 and 2.13: ``torch.distributed._symmetric_memory`` for the memory, and
``torch.ops.symm_mem`` for what runs on it.  NVLink multicast stays off, and none of its operations is called.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse.config import read_launch

from ..reshard import everywhere


@dataclass(frozen=True)
class SymmetricBuffer:
    """memory: bytes that every rank of ``group``, its name, has as many of and the others reach."""

    memory: Tensor
    group: str

    @staticmethod
    def made(device: torch.device, size: int) -> SymmetricBuffer | str:
        """A buffer of ``size`` bytes on each rank of the world, or why there is none; all ranks ask, and get alike."""
        why = _why_not(device)
        if why:
            return why
        # Before torch allocates: a program that dies in multicast can take the GPUs of a shared host out of service.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        from torch.distributed import _symmetric_memory

        world, error = dist.group.WORLD, ""
        assert world is not None, "ranks have a group"
        memory: Tensor | None = None
        try:
            memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            _symmetric_memory.rendezvous(memory, world)
        except RuntimeError as raised:
            error = f"torch has no symmetric memory here: {next(iter(str(raised).splitlines()), '')[:90]}"
        is_everywhere = everywhere(not error, device)
        if memory is None or not is_everywhere:
            return error or "torch has no symmetric memory on another rank"
        return SymmetricBuffer(memory, world.group_name)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The beginning of the memory, as a tensor."""
        return self.memory[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def one_shot(self, summand: Tensor) -> Tensor:
        """The sum of all ranks' ``summand``, a ``tensor`` of the same shape on each; bfloat16 or float32."""
        return torch.ops.symm_mem.one_shot_all_reduce(summand, "sum", self.group)

    def two_shot(self, summand: Tensor) -> Tensor:
        """The same, written over ``summand``."""
        return torch.ops.symm_mem.two_shot_all_reduce_(summand, "sum", self.group)


def _why_not(device: torch.device) -> str:
    """The same on every rank."""
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    launch = read_launch()
    if launch.local_size < launch.world_size:
        return "ranks are on several hosts"
    told = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    told[dist.get_rank()] = device.index
    dist.all_reduce(told)
    indices = told.tolist()
    if len(set(indices)) < len(indices):
        return "ranks share a GPU, or do not see one another's"
    seen, others = torch.cuda.device_count(), [k for k in indices if k != device.index]
    reaches = all(k < seen and torch.cuda.can_device_access_peer(device.index, k) for k in others)
    return "" if everywhere(reaches, device) else "not all GPUs reach each other's memory"
