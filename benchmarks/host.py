"""Time on the host of one call: tensors so small that the GPU never is what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from shardfuse import FusionDefinition

from .workload import Case, Draw, Tensors, Workload, define
from .workloads.norms import ADD_RMS_NORM, RMS_NORM

CALLS, BATCHES = 100, 30
"""A GPU takes a thousand launches before the host has to wait: a batch of eight kernels a call stays below that."""


def independent_segments(count: int) -> Workload:
    """``count`` outputs that have nothing to do with each other: as many segments."""

    def arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
        return [draw.normal(case.shape, case.dtype) for _ in range(count)]

    def fusion(case: Case) -> FusionDefinition:
        with FusionDefinition() as fd:
            for _ in range(count):
                x = fd.ops.cast(define(fd, [-1, case.columns], case.dtype), dtype=case.compute)
                fd.add_output(fd.ops.sum(x, [-1]))
        return fd

    def eager(case: Case, *inputs: torch.Tensor) -> Tensors:
        return tuple(x.sum(-1, dtype=case.accurate) for x in inputs)

    return Workload(
        name=f"segments_{count}",
        title=f"{count} independent sums over rows",
        cases=("64x1024",),
        tiny=("5x16",),
        arguments=arguments,
        fusion=fusion,
        eager=eager,
        reference=eager,
        rows=(True,) * count,
        sums=(False,) * count,
        roundings=4,
    )


CALLED: tuple[tuple[Workload, str], ...] = (
    (RMS_NORM, "64x1024"),
    (ADD_RMS_NORM, "64x1024"),
    *((independent_segments(n), "64x1024") for n in (1, 2, 4, 8)),
)


def host_microseconds(
    run: Callable[[], object], calls: int = CALLS, batches: int = BATCHES
) -> tuple[float, float, float]:
    """Median, 20th and 80th of a hundred, over batches of calls that nothing waits for."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(10):
        run()
    found: list[float] = []
    for _ in range(batches):
        wait()
        began = perf_counter()
        for _ in range(calls):
            run()
        found.append((perf_counter() - began) / calls * 1e6)
    found.sort()
    return median(found), found[len(found) // 5], found[len(found) * 4 // 5]
