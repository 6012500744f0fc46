"""shardfuse after ``fd.tune``: what the proposed kernels leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..workload import Case, Tensors, Workload

Run = Callable[[], Tensors]


def prepare(workload: Workload, case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    """Raises TuningUnavailableError where kernels have no time worth measuring."""
    fd, bound = workload.fusion(case), workload.bind(inputs)
    fd.tune(bound)
    return lambda: fd.execute(bound)
