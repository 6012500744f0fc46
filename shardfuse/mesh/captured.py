"""What CUDA graphs hold of NCCL, whose communicators end only when no captured collective is left of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def instances(kind: type[T], objects: Sequence[Any]) -> list[T]:
    """Those of a type among millions of objects, which are of few types: each type is asked once what it is."""
    kinds = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in kinds] if kinds else []


def reset_graphs(objects: Sequence[Any]) -> None:
    """Reset the CUDA graphs among ``objects``, and Inductor's: each then raises RuntimeError where it is replayed.

    A communicator that ends waits without a limit for the graphs that hold its collectives.  Which ones do cannot be
    asked, so that ``objects`` are all that the collector of garbage knows.  Inductor records its graphs again at the
    next call of a compiled function.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
    for graph in instances(torch.cuda.CUDAGraph, objects):
        graph.reset()
