"""Quack (``pip install quack-kernels==0.6.5``, which brings nvidia-cutlass-dsl): CuTe kernels for Hopper and later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..workload import EPS, Case, Tensors
from ..workloads.softmaxes import IGNORE

Run = Callable[[], Tensors]


def prepare(name: str, case: Case, inputs: Sequence[torch.Tensor]) -> Run | None:
    """``None`` where Quack has no such function."""
    make = _MAKERS.get(name)
    return None if make is None else make(case, inputs)


def _rms_norm(case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    from quack.rmsnorm import rmsnorm_fwd

    x, weight = inputs
    return lambda: (rmsnorm_fwd(x, weight, eps=EPS)[0],)


def _layer_norm_backward(case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    """Weights are float32 there, and so are their gradients, which are cast to the weights' dtype."""
    from quack.rmsnorm import layernorm_bwd

    x, dy, weight, mean, rstd = inputs
    wide, mean, rstd = weight.float(), mean.view(-1), rstd.view(-1)

    def run() -> Tensors:
        dx, *sums = layernorm_bwd(x, wide, dy, rstd, mean)
        return dx, *(t.to(weight.dtype) for t in sums)

    return run


def _rms_norm_backward(case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    from quack.rmsnorm import rmsnorm_bwd

    x, dy, weight, rstd = inputs
    rstd = rstd.view(-1)
    return lambda: rmsnorm_bwd(x, weight, dy, rstd)[:2]


def _softmax(case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    from quack.softmax import softmax_fwd

    (x,) = inputs
    return lambda: (softmax_fwd(x),)


def _softmax_backward(case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    from quack.softmax import softmax_bwd

    dy, y = inputs
    return lambda: (softmax_bwd(dy, y),)


def _cross_entropy(case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    from quack.cross_entropy import cross_entropy_fwd

    x, target = inputs
    return lambda: (cross_entropy_fwd(x, target, ignore_index=IGNORE),)


def _cross_entropy_backward(case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    from quack.cross_entropy import cross_entropy_bwd

    x, target, d_loss, log_sum = inputs
    return lambda: (cross_entropy_bwd(x, target, d_loss, log_sum, ignore_index=IGNORE),)


def _rope(case: Case, inputs: Sequence[torch.Tensor]) -> Run:
    from quack.rotary import apply_rotary

    x, cos, sin = inputs
    return lambda: (apply_rotary(x, cos, sin),)


_MAKERS: dict[str, Callable[[Case, Sequence[torch.Tensor]], Run]] = {
    "rms_norm": _rms_norm,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm_backward": _rms_norm_backward,
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "rope": _rope,
    "rope_halves": _rope,
}
