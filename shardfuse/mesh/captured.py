"""What CUDA graphs hold of NCCL, whose communicators end only when no captured collective is left of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch


def reset_graphs(objects: Iterable[Any]) -> None:
    """Reset the CUDA graphs among ``objects``, and Inductor's: each then raises RuntimeError where it is replayed.

    A communicator that ends waits without a limit for the graphs that hold its collectives.  Which ones do cannot be
    asked, so that ``objects`` are all that the collector of garbage knows.  Inductor records its graphs again at the
    next call of a compiled function.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
    for found in objects:
        if issubclass(type(found), torch.cuda.CUDAGraph):
            found.reset()
