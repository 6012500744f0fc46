"""Those that shardfuse is compared with, each imported only where it is asked for and installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from ..workload import Case, Tensors, Workload
from . import copy, liger, quack, torch_peers, tuned

Run = Callable[[], Tensors]

PEERS = ("copy", "eager", "inductor", "liger", "quack", "tuned")
ASKED_FOR = ("tuned",)
"""Left out unless named: a case takes it a minute."""
_PACKAGES = {
    "liger": (("liger_kernel",), "liger-kernel==0.8.5"),
    "quack": (("quack", "cutlass"), "quack-kernels==0.6.5"),
}


def why_absent(peer: str) -> str | None:
    """Why ``peer`` is left out of every case; ``None`` where it is here."""
    packages, requirement = _PACKAGES.get(peer, ((), ""))
    missing = [name for name in packages if find_spec(name) is None]
    if not missing:
        return None
    return f"{peer} is left out: {' and '.join(missing)} not installed (pip install {requirement})"


def prepare(peer: str, workload: Workload, case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    """A call that gives the workload's outputs; ``None`` where the peer has no such function."""
    match peer:
        case "eager":
            return torch_peers.prepare_eager(workload, case, inputs)
        case "inductor":
            return torch_peers.prepare_inductor(workload, case, inputs)
        case "liger":
            return liger.prepare(workload.name, case, inputs)
        case "quack":
            return quack.prepare(workload.name, case, inputs)
        case "tuned":
            return tuned.prepare(workload, case, inputs)
        case _:
            raise AssertionError(f"{peer} is no peer that computes")


__all__ = ["ASKED_FOR", "PEERS", "Run", "copy", "prepare", "why_absent"]
