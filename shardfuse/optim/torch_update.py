"""AdamW by torch's foreach ops, where there are no kernels: the same steps in the same types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch


def foreach(name: str) -> Callable[..., Any]:
    """torch's op over lists of tensors: public in its documentation, private by its name."""
    return cast("Callable[..., Any]", getattr(torch, f"_foreach_{name}"))


@dataclass(frozen=True)
class Factors:
    """What the update of one tensor multiplies by; ``kernels.py`` has the same in a row of ``factors``."""

    decay: float
    rate: float
    correction: float
    eps: float
    beta1: float
    beta2: float
    sign: float

    @staticmethod
    def of(
        step: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, maximize: bool
    ) -> Factors:
        beta1, beta2 = betas
        correction = (1 - beta2**step) ** -0.5
        return Factors(
            1 - lr * weight_decay, lr / (1 - beta1**step), correction, eps, beta1, beta2, -1.0 if maximize else 1.0
        )


@dataclass(frozen=True)
class Row:
    """One parameter: tensors of one order in memory.  largest: with amsgrad; master: of a 16-bit parameter."""

    weight: torch.Tensor
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    largest: torch.Tensor | None
    master: torch.Tensor | None


def update(rows: Sequence[Row], factors: Sequence[Factors], scale: torch.Tensor | None) -> None:
    """One step of all rows.  scale: what gradients are multiplied by, 0-dim."""
    if not rows:
        return
    computed = [r.first.dtype for r in rows]
    weights = [r.weight if r.master is None else r.master for r in rows]
    values = [w.to(dtype) for w, dtype in zip(weights, computed, strict=True)]
    gradients = [r.gradient.to(dtype) * f.sign for r, f, dtype in zip(rows, factors, computed, strict=True)]
    if scale is not None:
        foreach("mul_")(gradients, scale)
    firsts, seconds = [r.first for r in rows], [r.second for r in rows]
    steps = foreach("sub")(gradients, firsts)
    foreach("mul_")(steps, [1 - f.beta1 if f.beta1 > 0.5 else -f.beta1 for f in factors])
    for first, gradient, f in zip(firsts, gradients, factors, strict=True):
        if f.beta1 <= 0.5:  # counted from the gradient's side, as by torch's lerp: with 0 nothing is left of the moment
            first.copy_(gradient)
    foreach("add_")(firsts, steps)
    foreach("mul_")(gradients, gradients)
    foreach("mul_")(gradients, [1 - f.beta2 for f in factors])
    foreach("mul_")(seconds, [f.beta2 for f in factors])
    foreach("add_")(seconds, gradients)
    for row in rows:
        if row.largest is not None:
            torch.maximum(row.largest, row.second, out=row.largest)
    tops = [r.second if r.largest is None else r.largest for r in rows]
    divisors = foreach("sqrt")(tops)
    foreach("mul_")(divisors, [f.correction for f in factors])
    foreach("add_")(divisors, [f.eps for f in factors])
    foreach("mul_")(values, [f.decay for f in factors])
    foreach("addcdiv_")(values, firsts, divisors, [-f.rate for f in factors])
    for row, value in zip(rows, values, strict=True):
        for written in (row.weight, row.master):
            if written is not None and written is not value:
                written.copy_(value)
