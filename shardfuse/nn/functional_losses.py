"""Losses as functions of logits; ``functional`` has them for callers."""

from __future__ import annotations

from functools import partial

import torch

from ..frontend.promise_arguments import Invariant
from . import traced
from .checks import Function
from .functional_promises import Accumulate, kept_module, said
from .linear_loss import LinearCrossEntropyLoss
from .log_prob import LogProb
from .loss import CrossEntropyLoss, check_options, check_torchs
from .loss_fusions import Reduction
from .refused_calls import refusing

_cross_entropy, _log_prob, _linear_cross_entropy = (
    kept_module(CrossEntropyLoss),
    kept_module(LogProb),
    kept_module(LinearCrossEntropyLoss),
)
_refusing = partial(refusing, names={"logits": "input"})


@_refusing
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float = 1.0,
    weight: object = None,
    size_average: object = None,
    reduce: object = None,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy of classes along the last axis: input [..., classes], target [...].

    weight, size_average, reduce: None, as anything else is refused.
    """
    check_torchs("cross_entropy", weight, size_average, reduce)
    promises = said("cross_entropy", invariant, accumulate)
    if promises is None and torch.compiler.is_compiling():
        _check_call("cross_entropy", input, target, reduction, label_smoothing, z_loss, temperature)
        options = (ignore_index, label_smoothing, z_loss, temperature)
        return traced.cross_entropy(input, target, reduction, *options)
    module = _cross_entropy(
        promises, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        z_loss=z_loss, temperature=temperature,
    )  # fmt: skip
    return module(input, target)


@_refusing
def log_prob(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """The log-probability of each row's target, [...], of input [..., classes]."""
    promises = said("log_prob", invariant, accumulate)
    if promises is None and torch.compiler.is_compiling():
        _check_call("log_prob", input, target, temperature=temperature)
        return traced.log_prob(input, target, ignore_index, temperature, entropy=False)[0]
    return _log_prob(promises, temperature=temperature, ignore_index=ignore_index)(input, target)


@_refusing
def log_prob_and_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``log_prob``, and the entropy of each row's distribution."""
    promises = said("log_prob_and_entropy", invariant, accumulate)
    if promises is None and torch.compiler.is_compiling():
        _check_call("log_prob_and_entropy", input, target, temperature=temperature)
        made = traced.log_prob(input, target, ignore_index, temperature, entropy=True)
        return made[0], made[1]
    return _log_prob(promises, temperature=temperature, ignore_index=ignore_index, entropy=True)(input, target)


def _check_call(
    name: str,
    logits: torch.Tensor,
    target: torch.Tensor,
    reduction: Reduction = "none",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float = 1.0,
) -> None:
    """Raise what a module would where torch.compile traces, which makes none."""
    function = Function(name)
    check_options(function, reduction, label_smoothing, z_loss, temperature)
    function.check_plain(input=logits)
    if logits.ndim == 0:
        raise function.refuse("input", "no dims", "[..., classes]")
    if target.dtype != torch.int64 or target.shape != logits.shape[:-1]:
        found = f"shape {tuple(target.shape)} of {target.dtype}"
        raise function.refuse("target", found, f"{tuple(logits.shape[:-1])} of torch.int64")


@refusing
def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    chunk_rows: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """``cross_entropy(input @ weight.T + bias, target)``, a chunk of rows at a time, as ``LinearCrossEntropyLoss``."""
    if torch.compiler.is_compiling():  # which shows the error of a module that it makes as one of its own
        check_options(Function("linear_cross_entropy"), reduction, label_smoothing, z_loss, temperature)
    module = _linear_cross_entropy(
        None, chunk_rows=chunk_rows, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        z_loss=z_loss, temperature=temperature,
    )  # fmt: skip
    return module(input, weight, target, bias)
