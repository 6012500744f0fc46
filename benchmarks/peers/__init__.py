"""Those that shardfuse is compared with, each imported only where it is asked for and installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from ..workload import Case, Compared, Run, Workload
from . import copy, liger, quack, torch_peers, tuned
from .torch_peers import forget_compiled

PEERS = ("copy", "eager", "inductor", "liger", "quack", "inductor_graphs", "inductor_max_autotune", "tuned")
ASKED_FOR = ("inductor_graphs", "inductor_max_autotune", "tuned")
"""Left out unless named: a case takes the last two up to a minute.  ``inductor_graphs`` comes with ``inductor`` where
shardfuse's launches are a graph, and where the time of the host is measured."""
FORMATS = ("eager", "inductor")
"""Also measured without bringing the result into the memory format that is asked for, where torch gives another."""
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


def prepare(peer: str, workload: Compared, case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    """A call that gives the workload's outputs; ``None`` where the peer has no such function."""
    match peer:
        case "eager":
            return torch_peers.prepare_eager(workload, case, inputs)
        case "inductor":
            return torch_peers.prepare_inductor(workload, case, inputs)
        case "inductor_graphs":
            return torch_peers.prepare_inductor_graphs(workload, case, inputs)
        case "inductor_max_autotune":
            return torch_peers.prepare_inductor(workload, case, inputs, torch_peers.TUNED)
        case "liger":
            return liger.prepare(workload.name, case, inputs)
        case "quack":
            return quack.prepare(workload.name, case, inputs)
        case "tuned":
            return tuned.prepare(workload, case, inputs) if isinstance(workload, Workload) else None
        case _:
            raise AssertionError(f"{peer} is no peer that computes")


__all__ = ["ASKED_FOR", "FORMATS", "PEERS", "Run", "copy", "forget_compiled", "prepare", "why_absent"]
