"""torch itself: eager, and compiled by Inductor in three ways.

``inductor`` is ``torch.compile`` in its default mode with mix-order reductions on, one graph for the case's own sizes;
``inductor_max_autotune`` adds ``max_autotune`` and ``coordinate_descent_tuning``; ``inductor_graphs`` is the default
mode's call captured in a CUDA graph, whose inputs stay where they are, so that nothing is copied into it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FunctionType

import torch

from ..workload import Case, Compared, Run, Tensors

TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}


class NotCompiledError(RuntimeError):
    """Inductor took the program and generated no kernel for it."""

    def __init__(self) -> None:
        super().__init__("Inductor generated no kernel: what would be timed is eager torch")


def prepare_eager(workload: Compared, case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    return lambda: workload.eager(case, *inputs)


def prepare_inductor(
    workload: Compared, case: Case, inputs: Sequence[torch.Tensor], options: dict[str, bool] | None = None
) -> Run:
    """Compiled, having run once.  Raises NotCompiledError."""
    import torch._inductor.config as config
    from torch._inductor import metrics

    mixed = {"triton.mix_order_reduction": True} if hasattr(config.triton, "mix_order_reduction") else {}

    def compiler(graph: Callable[..., Tensors]) -> Callable[..., Tensors]:
        # Code of its own, which no other peer's compilation is kept with: there is a limit on how many are.
        code = graph.__code__.replace()
        own = FunctionType(code, graph.__globals__, f"{workload.name}_{case}", None, graph.__closure__)
        return torch.compile(own, dynamic=False, fullgraph=True, options={**mixed, **(options or {})})

    run = workload.compiled(case, inputs, compiler)
    before = metrics.generated_kernel_count  # those that a cache held are counted too
    run()
    if metrics.generated_kernel_count == before:
        raise NotCompiledError
    return run


def forget_compiled() -> None:
    """Let go of what was compiled for other cases."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def prepare_inductor_graphs(workload: Compared, case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    """``inductor``, captured into a CUDA graph."""
    return captured(prepare_inductor(workload, case, inputs))


def captured(run: Callable[[], Sequence[torch.Tensor]]) -> Run:
    """The run as a CUDA graph; every replay writes the same outputs."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = tuple(run())

    def replay() -> Tensors:
        graph.replay()
        return outputs

    return replay
