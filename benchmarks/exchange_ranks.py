"""What the workloads of ``exchange`` share: the ranks, how a fusion is made to exchange, and what torch compiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfuse import DeviceMesh

from .exchange_verdicts import Run
from .peers.symmetric_memory import SymmetricBuffer
from .workload import OWN, Draw

COLLECTIVES, NCCL = f"{OWN}, collectives", "NCCL + Inductor"
ONE_SHOT, TWO_SHOT = "torch one-shot + Inductor", "torch two-shot + Inductor"
EXCHANGE = "SHARDFUSE_EXCHANGE"


@dataclass(frozen=True)
class Ranks:
    """mesh: of all ranks, on one dimension.  buffer: torch's symmetric memory, None where that is left out."""

    mesh: DeviceMesh
    device: torch.device
    buffer: SymmetricBuffer | None = None

    def drawn(self, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
        return Draw(self.device, seed).normal(shape, dtype)

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's columns."""
        return self.mesh.shard_tensor(tensor, -1)

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(map(self.part, tensors))


@contextmanager
def exchanging_by(how: str) -> Generator[None, None, None]:
    """Fusions that are made meanwhile exchange so: a value of ``SHARDFUSE_EXCHANGE``."""
    before = os.environ.get(EXCHANGE)
    os.environ[EXCHANGE] = how
    try:
        yield
    finally:
        os.environ.pop(EXCHANGE)
        os.environ |= {} if before is None else {EXCHANGE: before}


def asked() -> str:
    return os.environ.get(EXCHANGE, "auto")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def with_gradients(call: Callable[[], Tensor], leaves: Sequence[Tensor], given: Tensor) -> Run:
    def run() -> Sequence[Tensor]:
        made = call()
        return made.detach(), *torch.autograd.grad(made, leaves, given)

    return run
