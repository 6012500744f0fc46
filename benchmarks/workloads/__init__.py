"""The suites: which workloads are measured together."""

from __future__ import annotations

from ..workload import Workload
from . import batch_norms, group_norms, modulated_norms, norm_gradients, norms, pointwise, reductions, softmaxes

SUITES: dict[str, tuple[Workload, ...]] = {
    "forward": norms.WORKLOADS,
    "backward": norm_gradients.WORKLOADS,
    "groupnorm": (*group_norms.WORKLOADS, *batch_norms.WORKLOADS),
    "softmax": softmaxes.WORKLOADS,
    "reduction": reductions.WORKLOADS,
    "pointwise": pointwise.WORKLOADS,
    "modulated": modulated_norms.WORKLOADS,
}
"""Suites that are tables of workloads; ``host`` and ``compile`` are measured by modules of their own."""

WORKLOADS: dict[str, Workload] = {w.name: w for suite in SUITES.values() for w in suite}
