"""torch itself: eager, and compiled by Inductor with its mix-order reductions on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..workload import Case, Tensors, Workload

Run = Callable[[], Tensors]


def prepare_eager(workload: Workload, case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    return lambda: workload.eager(case, *inputs)


def prepare_inductor(workload: Workload, case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    """One graph for the case's own sizes."""
    import torch._dynamo
    import torch._inductor.config as config

    torch._dynamo.reset()  # each case is compiled for its own sizes: no limit on how often
    options = {"triton.mix_order_reduction": True} if hasattr(config.triton, "mix_order_reduction") else {}

    def graph(*tensors: torch.Tensor) -> Tensors:
        return workload.eager(case, *tensors)

    compiled = torch.compile(graph, dynamic=False, fullgraph=True, options=options)
    return lambda: compiled(*inputs)
