"""What a rank knows of itself and of its world."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardfuse.config import Settings


@dataclass(frozen=True)
class ProcessContext:
    """This process's place in the world, and the device that it computes on.

    backend: "nccl" (with gloo for tensors on the CPU) or "gloo". timeout: seconds that a collective waits.
    ranks_per_node: of the host that has fewest ranks, the same on all.
    exchange: by what ranks exchange statistics of rows that are sharded, and partial sums, where a program has them:
    "kernels", or "collectives" with the reason, the same on all; "" for a world of one.
    exchange_memory: MB of this rank's memory that others write to, where kernels exchange.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    timeout: float
    ranks_per_node: int = 1
    exchange: str = ""
    exchange_memory: int = Settings.exchange_memory
