"""Softmax, log-softmax and cross entropy, forward and backward, to vocabularies of 262,144."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional

from shardfuse import DataType, FusionDefinition
from shardfuse.ir.tensor_view import TensorView

from ..workload import Case, Draw, Tensors, Workload, define

ROW_CASES = ("32768x1024", "16384x8192", "8192x32768", "4096x65536", "2048x131072", "1024x262144")
VOCABULARIES = ("8192x32000", "8192x50257", "4096x128256", "4096x151936", "2048x262144")
IGNORE = -100
SMOOTHING = 0.1


def _shifted(fd: FusionDefinition, x: TensorView) -> tuple[TensorView, TensorView]:
    """x - max, and the sum of its exponentials."""
    shifted = fd.ops.sub(x, fd.ops.max(x, [-1], keepdim=True))
    return shifted, fd.ops.sum(fd.ops.exp(shifted), [-1], keepdim=True)


def _row_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [draw.normal(case.shape, case.dtype)]


def _softmax_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.ops.cast(define(fd, [-1, case.columns], case.dtype), dtype=case.compute)
        shifted, total = _shifted(fd, x)
        fd.add_output(fd.ops.cast(fd.ops.div(fd.ops.exp(shifted), total), dtype=case.data_type))
    return fd


def _log_softmax_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.ops.cast(define(fd, [-1, case.columns], case.dtype), dtype=case.compute)
        shifted, total = _shifted(fd, x)
        fd.add_output(fd.ops.cast(fd.ops.sub(shifted, fd.ops.log(total)), dtype=case.data_type))
    return fd


def _softmax(case: Case, x: torch.Tensor) -> Tensors:
    return (torch.softmax(x, -1),)


def _log_softmax(case: Case, x: torch.Tensor) -> Tensors:
    return (torch.log_softmax(x, -1),)


# softmax: dx from dy and y


def _softmax_gradient_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [draw.normal(case.shape, case.dtype), torch.softmax(draw.normal(case.shape, case.dtype), -1)]


def _softmax_gradient_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        wide = [define(fd, [-1, case.columns], case.dtype) for _ in range(2)]
        dy, y = (fd.ops.cast(t, dtype=case.compute) for t in wide)
        along = fd.ops.sum(fd.ops.mul(dy, y), [-1], keepdim=True)
        fd.add_output(fd.ops.cast(fd.ops.mul(y, fd.ops.sub(dy, along)), dtype=case.data_type))
    return fd


def _softmax_gradient_eager(case: Case, dy: torch.Tensor, y: torch.Tensor) -> Tensors:
    return (torch.ops.aten._softmax_backward_data(dy, y, -1, case.dtype),)


def _softmax_gradient_reference(case: Case, dy: torch.Tensor, y: torch.Tensor) -> Tensors:
    return (y * (dy - (dy * y).sum(-1, keepdim=True)),)


# cross entropy: a loss for each row


def _targets(case: Case, draw: Draw) -> torch.Tensor:
    """Some rows are ignored."""
    rows = case.shape[:1]
    ignored = draw.integers(rows, 16) == 0
    return torch.where(ignored, IGNORE, draw.integers(rows, case.columns))


def _loss_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    return [draw.normal(case.shape, case.dtype), _targets(case, draw)]


def _is_target(fd: FusionDefinition, case: Case, target: TensorView) -> TensorView:
    return fd.ops.eq(fd.ops.iota(case.columns, 0, 1, DataType.Int), fd.ops.unsqueeze(target, 1))


def _loss_fusion(smoothing: float) -> Callable[[Case], FusionDefinition]:
    def fusion(case: Case) -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.ops.cast(define(fd, [-1, case.columns], case.dtype), dtype=case.compute)
            target = define(fd, [-1], torch.int64)
            shifted, total = _shifted(fd, x)
            log_sum = fd.ops.log(fd.ops.squeeze(total, [1]))
            chosen = fd.ops.sum(fd.ops.where(_is_target(fd, case, target), shifted, 0.0), [-1])
            loss = fd.ops.sub(log_sum, chosen)
            if smoothing:
                even = fd.ops.sub(log_sum, fd.ops.mean(shifted, [-1]))
                loss = fd.ops.add(fd.ops.mul(loss, 1.0 - smoothing), fd.ops.mul(even, smoothing))
            fd.add_output(fd.ops.where(fd.ops.ne(target, IGNORE), loss, 0.0))
        return fd

    return fusion


def _loss_eager(smoothing: float) -> Callable[..., Tensors]:
    def eager(case: Case, x: torch.Tensor, target: torch.Tensor) -> Tensors:
        loss = functional.cross_entropy(
            x.to(case.accurate), target, ignore_index=IGNORE, reduction="none", label_smoothing=smoothing
        )
        return (loss,)

    return eager


# cross entropy: d logits from the loss's gradient and log(sum(exp(x)))


def _loss_gradient_arguments(case: Case, draw: Draw) -> list[torch.Tensor]:
    x = draw.normal(case.shape, case.dtype)
    log_sum = torch.cat([torch.logsumexp(piece.to(case.accurate), -1) for piece in x.split(1024)])
    return [x, _targets(case, draw), draw.normal(case.shape[:1], case.accurate), log_sum]


def _loss_gradient_fusion(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.ops.cast(define(fd, [-1, case.columns], case.dtype), dtype=case.compute)
        target = define(fd, [-1], torch.int64)
        d_loss, log_sum = (fd.ops.unsqueeze(define(fd, [-1], case.accurate), 1) for _ in range(2))
        softmax = fd.ops.exp(fd.ops.sub(x, log_sum))
        weight = fd.ops.cast(_is_target(fd, case, target), dtype=case.compute)
        row = fd.ops.mul(fd.ops.sub(softmax, weight), d_loss)
        kept = fd.ops.where(fd.ops.unsqueeze(fd.ops.ne(target, IGNORE), 1), row, 0.0)
        fd.add_output(fd.ops.cast(kept, dtype=case.data_type))
    return fd


def _loss_gradient_eager(case: Case, x: torch.Tensor, target: torch.Tensor, *rest: torch.Tensor) -> Tensors:
    d_loss, log_sum = rest
    weight = torch.arange(case.columns, device=x.device) == target[:, None]
    row = (torch.exp(x.to(case.accurate) - log_sum[:, None]) - weight.to(case.accurate)) * d_loss[:, None]
    return (torch.where(target[:, None] != IGNORE, row, 0.0).to(x.dtype),)


def _loss_gradient_reference(case: Case, x: torch.Tensor, target: torch.Tensor, *rest: torch.Tensor) -> Tensors:
    leaf = x.detach().requires_grad_()
    loss = functional.cross_entropy(leaf, target, ignore_index=IGNORE, reduction="none")
    return torch.autograd.grad(loss, (leaf,), (rest[0],))


TINY = ("5x16", "7x51:float16", "3x1030:float32")

SOFTMAX = Workload(
    name="softmax",
    title="softmax(x)",
    cases=ROW_CASES,
    tiny=TINY,
    arguments=_row_arguments,
    fusion=_softmax_fusion,
    eager=_softmax,
    reference=_softmax,
    rows=(True,),
    relative=True,
)
LOG_SOFTMAX = replace(
    SOFTMAX,
    name="log_softmax",
    title="log_softmax(x)",
    cases=("16384x8192", "4096x65536"),
    fusion=_log_softmax_fusion,
    eager=_log_softmax,
    reference=_log_softmax,
    relative=False,
)
SOFTMAX_BACKWARD = Workload(
    name="softmax_backward",
    title="softmax: dx",
    cases=("32768x1024", "16384x8192", "8192x32768", "2048x131072"),
    tiny=TINY,
    arguments=_softmax_gradient_arguments,
    fusion=_softmax_gradient_fusion,
    eager=_softmax_gradient_eager,
    reference=_softmax_gradient_reference,
    rows=(True, True),
)
CROSS_ENTROPY = Workload(
    name="cross_entropy",
    title="cross entropy with an ignored index, a loss a row",
    cases=VOCABULARIES,
    tiny=TINY,
    arguments=_loss_arguments,
    fusion=_loss_fusion(0.0),
    eager=_loss_eager(0.0),
    reference=_loss_eager(0.0),
    rows=(True, True),
    roundings=4,
)
CROSS_ENTROPY_SMOOTHED = replace(
    CROSS_ENTROPY,
    name="cross_entropy_smoothed",
    title="cross entropy with label smoothing",
    cases=("8192x32000", "4096x128256"),
    fusion=_loss_fusion(SMOOTHING),
    eager=_loss_eager(SMOOTHING),
    reference=_loss_eager(SMOOTHING),
)
CROSS_ENTROPY_BACKWARD = Workload(
    name="cross_entropy_backward",
    title="cross entropy: d logits",
    cases=("8192x32000", "4096x128256", "2048x262144"),
    tiny=TINY,
    arguments=_loss_gradient_arguments,
    fusion=_loss_gradient_fusion,
    eager=_loss_gradient_eager,
    reference=_loss_gradient_reference,
    rows=(True, True, True, True),
    relative=True,
)
WORKLOADS = (SOFTMAX, LOG_SOFTMAX, SOFTMAX_BACKWARD, CROSS_ENTROPY, CROSS_ENTROPY_SMOOTHED, CROSS_ENTROPY_BACKWARD)
