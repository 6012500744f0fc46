"""What the fusions of a cross entropy share: the losses of rows, and the gradient of the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..frontend import FusionDefinition
from ..ir import TensorView
from .logits_fusions import LogitsSpec, cooled, is_class, is_target
from .placement import TensorPlacement

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)


@dataclass(frozen=True, kw_only=True)
class LossSpec(LogitsSpec):
    """All that the fusions of a loss depend on."""

    reduction: Reduction
    label_smoothing: float
    z_loss: float

    @property
    def loss(self) -> tuple[list[int], TensorPlacement]:
        """Shape and placement of the loss."""
        return (self.row_shape, self.rows) if self.reduction == "none" else ([], self.scalar)


@dataclass(frozen=True)
class Targets:
    """``chosen``: is a class the row's target?  And of rows, is the target one that is ``counted``, not ignored, and
    ``known``, a class?"""

    chosen: TensorView
    counted: TensorView
    known: TensorView

    @classmethod
    def of(cls, fd: FusionDefinition, spec: LossSpec, target: TensorView) -> Targets:
        chosen = is_target(fd, spec, target)
        return cls(chosen, fd.ops.ne(target, spec.ignore_index), is_class(fd, spec, target))


@dataclass(frozen=True)
class Rows:
    """Numbers of rows, [..., 1], and ``weights``, exp(logits - maximum), whose sum is ``total``."""

    loss: TensorView
    maximum: TensorView
    log_sum: TensorView
    weights: TensorView
    total: TensorView


def loss_of_rows(fd: FusionDefinition, spec: LossSpec, logits: TensorView, targets: Targets) -> Rows:
    """log_sum = log(sum(exp(logits - maximum))).

    The target's logit is found as a sum over the classes, in which all others count 0: kernels read that one element,
    where it is this rank's.
    """
    maximum = fd.ops.max(logits, [-1], keepdim=True)
    shifted = fd.ops.sub(logits, maximum)
    weights = fd.ops.exp(shifted)
    total = fd.ops.sum(weights, [-1], keepdim=True)
    log_sum = fd.ops.log(total)
    chosen = fd.ops.where(targets.chosen, logits, 0.0)
    chosen = fd.ops.sum(chosen, [-1], keepdim=True)
    loss = fd.ops.sub(log_sum, fd.ops.sub(chosen, maximum))
    if spec.label_smoothing:
        even = fd.ops.sub(log_sum, fd.ops.mean(shifted, [-1], keepdim=True))
        even = fd.ops.mul(even, spec.label_smoothing)
        loss = fd.ops.add(fd.ops.mul(loss, 1.0 - spec.label_smoothing), even)
    if spec.z_loss:
        whole = fd.ops.add(maximum, log_sum)
        loss = fd.ops.add(loss, fd.ops.mul(fd.ops.mul(whole, whole), spec.z_loss))
    loss = fd.ops.where(targets.counted, fd.ops.where(targets.known, loss, math.nan), 0.0)
    return Rows(loss, maximum, log_sum, weights, total)


def gradient_of_logits(
    fd: FusionDefinition,
    spec: LossSpec,
    targets: Targets,
    softmax: TensorView,
    maximum: TensorView,
    log_sum: TensorView,
    gradient: TensorView | None,
) -> TensorView:
    """(softmax - the target's weights) * gradient [/ temperature], in the logits' dtype.

    gradient: of the rows' losses; None for 1.  A z-loss's softmax counts 1 + 2 * z_loss * log(sum(exp(logits))) times.
    """
    weight = fd.ops.cast(targets.chosen, dtype=spec.compute)
    if spec.label_smoothing:
        even = spec.label_smoothing / spec.classes
        weight = fd.ops.add(fd.ops.mul(weight, 1.0 - spec.label_smoothing), even)
    if spec.z_loss:
        whole = fd.ops.add(maximum, log_sum)
        softmax = fd.ops.mul(softmax, fd.ops.add(fd.ops.mul(whole, 2 * spec.z_loss), 1.0))
    if gradient is None:
        row_gradient = cooled(fd, spec, fd.ops.sub(softmax, weight))
    else:
        gradient = cooled(fd, spec, gradient)
        row_gradient = fd.ops.mul(fd.ops.sub(softmax, weight), gradient)
    # An ignored row is chosen away, not multiplied by zero: its logits may be infinite.
    row_gradient = fd.ops.where(targets.known, row_gradient, math.nan)
    d_logits = fd.ops.where(targets.counted, row_gradient, 0.0)
    return fd.ops.cast(d_logits, dtype=spec.dtype)
