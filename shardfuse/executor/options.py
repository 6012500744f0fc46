"""How a fusion is compiled and run: one frozen record, made once from the environment and passed on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..config import Exchange, read_cache_directory, read_settings
from ..mesh.process import ranks_per_node

Backend = Literal["triton", "torch"]


@dataclass(frozen=True)
class CompileOptions:
    """``backend``: ``None`` takes Triton for CUDA tensors, and for CPU tensors only under Triton's interpreter.

    ``interpret``: kernels are written for the interpreter.  ``strict``: a kernel that does not compile is an error
    rather than a fall back to torch.  ``autotune``: kernels are tuned before a program's first run on a GPU.
    ``cache_directory``: where generated sources and tuned parameters are kept.  ``ranks_per_node``: neighbours in the
    world that share a host, for the cost of collectives.  ``check_replicas``: replicated inputs are compared between
    ranks before every run.  ``exchange``: by what statistics of sharded rows are exchanged.
    """

    backend: Backend | None = None
    interpret: bool = False
    strict: bool = False
    autotune: bool = False
    cache_directory: Path = Path()
    ranks_per_node: int = 8
    check_replicas: bool = False
    exchange: Exchange = "auto"

    @staticmethod
    def from_environment(backend: Backend | None = None) -> CompileOptions:
        settings = read_settings()
        directory = read_cache_directory()
        return CompileOptions(
            backend,
            settings.triton_interpret,
            settings.strict,
            settings.autotune,
            directory,
            ranks_per_node() or CompileOptions.ranks_per_node,
            settings.check_replicas,
            settings.exchange,
        )

    def backend_for(self, device: torch.device) -> Backend:
        if self.backend is not None:
            return self.backend
        return "triton" if device.type == "cuda" or self.interpret else "torch"

    def autotunes(self, device: torch.device) -> bool:
        """Are kernels on ``device`` tuned before their first run?"""
        return self.autotune and device.type == "cuda" and self.backend_for(device) == "triton"
