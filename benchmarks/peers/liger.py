"""Liger kernels (``pip install liger-kernel==0.8.5``), by the functions under its autograd ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..workload import EPS, Case, Tensors
from ..workloads.softmaxes import IGNORE, SMOOTHING

Run = Callable[[], Tensors]
MAX_COLUMNS = 65536
"""One block holds a row, but for cross entropy."""


def prepare(name: str, case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    """``None`` where Liger has no such function, or none for this size."""
    make = _MAKERS.get(name)
    return None if make is None else make(case, inputs)


def _rms_norm(case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    if case.columns > MAX_COLUMNS:
        return None
    x, weight = inputs
    return lambda: (rms_norm_forward(x, weight, EPS, 0.0, "llama", None)[0],)


def _layer_norm_backward(case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    from liger_kernel.ops.layer_norm import layer_norm_backward

    if case.columns > MAX_COLUMNS:
        return None
    x, dy, weight, mean, rstd = inputs
    mean, rstd = mean.view(-1), rstd.view(-1)
    return lambda: layer_norm_backward(dy, x, weight, weight, mean, rstd)


def _rms_norm_backward(case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    if case.columns > MAX_COLUMNS:
        return None
    x, dy, weight, rstd = inputs
    block, warps = calculate_settings(case.columns)
    llama, rstd = 0, rstd.view(-1)
    return lambda: rms_norm_backward(dy, x, weight, rstd, 0.0, llama, block, warps, False, None)


def _softmax(case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    from liger_kernel.ops.softmax import _softmax_forward

    if case.columns > MAX_COLUMNS:
        return None
    (x,) = inputs
    return lambda: (_softmax_forward(x)[0],)


def _softmax_backward(case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    from liger_kernel.ops.softmax import _softmax_backward
    from liger_kernel.ops.utils import calculate_settings

    if case.columns > MAX_COLUMNS:
        return None
    dy, y = inputs
    block, warps = calculate_settings(case.columns)
    return lambda: (_softmax_backward(dy, y, block, warps, False),)


def _cross_entropy(smoothing: float) -> Callable[[Case, Sequence[torch.Tensor]], Run]:
    def make(case: Case, inputs: Sequence[torch.Tensor]) -> Run:
        from liger_kernel.ops.cross_entropy import cross_entropy_forward

        x, target = inputs
        # weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss
        return lambda: (cross_entropy_forward(x, target, None, IGNORE, 0.0, smoothing, "none", None, False)[0],)

    return make


def _swiglu(case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    from liger_kernel.ops.swiglu import swiglu_forward

    if case.columns > MAX_COLUMNS:
        return None
    gate, up = inputs
    return lambda: (swiglu_forward(gate, up)[2],)


_MAKERS: dict[str, Callable[[Case, Sequence[torch.Tensor]], Run | None]] = {
    "rms_norm": _rms_norm,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm_backward": _rms_norm_backward,
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
    "cross_entropy": _cross_entropy(0.0),
    "cross_entropy_smoothed": _cross_entropy(SMOOTHING),
    "swiglu": _swiglu,
}
