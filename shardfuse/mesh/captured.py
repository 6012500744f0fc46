"""What CUDA graphs hold of NCCL, whose communicators end only when no captured collective is left of them."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch


def reset_graphs() -> None:
    """Reset all CUDA graphs of this process: each then raises RuntimeError where it is replayed.

    A communicator that ends waits without a limit for the graphs that hold its collectives, and nobody can tell which
    ones do.  Those of Inductor are recorded again at the next call of a compiled function.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
    for found in all_objects():
        if issubclass(type(found), torch.cuda.CUDAGraph):
            found.reset()


def all_objects() -> list[Any]:
    """What the collector of garbage knows, objects that `gc.freeze` has put aside among them."""
    gc.unfreeze()
    return gc.get_objects()
