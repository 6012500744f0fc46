"""Gradients of a linear layer's cross entropy that are made with the loss, while a chunk's logits are in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..executor.uncompiled import uncompiled
from ..frontend import FusionDefinition
from ..ir import DataType
from .fused import FusedOp
from .fusion_run import FusionRun
from .logits_fusions import give_strays, logits_and_target
from .loss import CrossEntropyLoss
from .loss_fusions import LossSpec, Targets, gradient_of_logits, loss_of_rows
from .placement import WHOLE, define, give
from .second_derivatives import apply_of_c, once
from .tensor_kinds import are_torchs, forward_ad
from .transforms import check_one_gradient

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

_CALLED = "LinearCrossEntropyLoss"
"""What the caller has called."""
_HALVES = (torch.bfloat16, torch.float16)
_torch: Any = torch


class LossAndGradient(CrossEntropyLoss):
    """The losses of rows, and the gradient of their sum by the logits, of one fusion: it has no derivative itself.

    The gradient is stored over the logits where a kernel allows that.
    """

    family = "loss_and_gradient"
    """By which ``shardfuse::linear_cross_entropy_v1`` finds such a module again: it has no op of its own."""

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """logits: [rows, classes] (local), target: [rows] -> [rows] in float32 or float64, and as the logits."""
        loss, gradient = self.checked_results(logits, target, None)
        return loss[..., 0], gradient

    @property
    def checked_name(self) -> str:
        return _CALLED

    @property
    def result_count(self) -> int:
        return 2

    def bind(self, tensors: Sequence[Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        return _op(self.loss_spec(tensors, unsharded))


@lru_cache(maxsize=256)
def _op(spec: LossSpec) -> FusedOp:
    fusion, results = _loss_and_gradient(spec), 2 + spec.counts_strays
    return FusedOp(fusion, fusion, results, (), (spec.placement, spec.rows), (), ())  # nothing runs the second


def _loss_and_gradient(spec: LossSpec) -> FusionDefinition:
    """(logits, target) -> (loss of rows, d logits[, strays])."""
    with FusionDefinition() as fd:
        given = define(fd, spec.mesh, spec.placement, spec.shape, spec.dtype)
        logits, target = logits_and_target(fd, spec, given)
        targets = Targets.of(fd, spec, target)
        rows = loss_of_rows(fd, spec, logits, targets)
        softmax = fd.ops.div(rows.weights, rows.total)
        d_logits = gradient_of_logits(fd, spec, targets, softmax, rows.maximum, rows.log_sum, None)
        give(fd, rows.loss, spec.mesh, spec.rows)
        give(fd, d_logits, spec.mesh, spec.placement)
        give_strays(fd, spec, targets.counted, targets.known)
    fd.fusion.given_up = (given,)
    return fd


@dataclass(frozen=True)
class Chunks:
    """What the sum or the mean of a linear layer's losses is made by.

    rows: of a chunk.  dtype: of the matmuls.  is_mean: over targets that are not ignored; else it is the sum.
    """

    loss: LossAndGradient
    rows: int
    dtype: torch.dtype
    is_mean: bool

    def __call__(self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        """x: [rows, features], weight: [classes, features], target: [rows], bias: [classes] -> a scalar."""
        return _apply(self, x, weight, target, bias)

    def sums(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, wanted: Sequence[bool]
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None]]:
        """The loss, the number of targets of a mean, and the sum's gradients of x, weight and bias that are wanted."""
        device = x.device.type
        if torch.is_autocast_enabled(device):  # it would choose the dtypes of the products and their sums
            with torch.autocast(device, enabled=False):
                return self.sums(x, weight, target, bias, wanted)
        layer = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        sums = _Sums.of(self.dtype, x if wanted[0] else None, wanted[1], wanted[2])
        losses: list[Tensor] = []
        for start in range(0, x.shape[0], self.rows):
            here = slice(start, start + self.rows)
            part = x[here].to(self.dtype)
            loss, gradient = self.loss(functional.linear(part, *layer), target[here])
            losses.append(loss)
            sums.add(here, part, layer[0], gradient)
            del gradient  # whose memory the next chunk's logits take
        total = torch.cat(losses).sum()
        count = (target != self.loss.ignore_index).sum() if self.is_mean else None
        return total if count is None else total / count, count, (sums.of_x, sums.of_weight, sums.of_bias)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """In which products of ``dtype`` are added up over the chunks."""
    return torch.float32 if dtype in _HALVES else dtype


def can_make_gradients(tensors: Sequence[Tensor]) -> bool:
    """Is there something to differentiate, of tensors that an autograd function knows?"""
    return (
        torch.is_grad_enabled()
        and any(t.requires_grad for t in tensors)
        and are_torchs(tensors)
        and tensors[0].device.type in ("cpu", "cuda")
        and forward_ad._current_level < 0
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    )


class _LinearLoss(torch.autograd.Function):
    """The gradients of the sum are made with it, chunk by chunk; the backward multiplies them by its gradient.

    So the logits' matmul is done once.  The factor comes last, in float32, as 16 bits would lose the small ones.
    """

    @staticmethod
    @uncompiled
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, chunks: Chunks, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
    ) -> Tensor:
        kept, needs = cast("Any", ctx), cast("Any", ctx).needs_input_grad
        wanted = (needs[1], needs[2], needs[4])
        loss, count, sums = chunks.sums(x, weight, target, bias, wanted)
        # The inputs are kept as what the gradients depend on: a second derivative finds them, and is refused.
        given = [t if needed else None for t, needed in zip((x, weight, bias), wanted, strict=True)]
        kept.dtypes = [None if t is None else t.dtype for t in given]
        kept.save_for_backward(count, *sums, *given)
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_one_gradient((gradient,))
        count, *saved = cast("Any", ctx).saved_tensors
        sums, given, dtypes = saved[:3], saved[3:], cast("Any", ctx).dtypes
        with torch.no_grad():
            factor = gradient if count is None else gradient / count.clamp(min=1)  # with no target all sums are 0
            made = [None if s is None else _scaled(s, factor, d) for s, d in zip(sums, dtypes, strict=True)]
        if torch.is_grad_enabled():  # create_graph=True: gradients that are not differentiated again, and say so
            made = once("shardfuse.nn.functional.linear_cross_entropy", made, (gradient, *given))
        of_x, of_weight, of_bias = made
        return None, of_x, of_weight, None, of_bias


_apply: Callable[..., Tensor] = apply_of_c(_LinearLoss)


@dataclass
class _Sums:
    """The gradients of the sum of losses; those of parameters, added up over the chunks, in float32 (float64)."""

    wide: torch.dtype
    of_x: Tensor | None
    needs_weight: bool
    needs_bias: bool
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None

    @classmethod
    def of(cls, dtype: torch.dtype, x: Tensor | None, needs_weight: bool, needs_bias: bool) -> _Sums:
        """x: where its gradient is wanted.  dtype: of the matmuls."""
        of_x = None if x is None else torch.empty(x.shape, dtype=dtype, device=x.device)
        return cls(wide_of(dtype), of_x, needs_weight, needs_bias)

    def add(self, here: slice, x: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """``gradient``: of the logits of the chunk ``here``, whose rows ``x`` are."""
        if self.of_x is not None:
            torch.mm(gradient, weight, out=self.of_x[here])
        if self.needs_weight:
            self.of_weight = _add_product(self.of_weight, gradient.t(), x, self.wide)
        if self.needs_bias:
            of_bias = gradient.sum(0, dtype=self.wide)
            self.of_bias = of_bias if self.of_bias is None else self.of_bias.add_(of_bias)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``total + a @ b`` in ``dtype``, in the memory of ``total``; unrounded before, as the GPU's matmul writes that."""
    wider = {"out_dtype": dtype} if a.is_cuda and a.dtype != dtype else {}
    if not wider:
        a, b = a.to(dtype), b.to(dtype)
    if total is None:
        return _torch.mm(a, b, **wider)
    return _torch.addmm(total, a, b, out=total, **wider)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor``, a scalar, rounded once to ``dtype``."""
    outputs, _ = _scaling(x.dtype, factor.dtype, dtype)(None, (x if x.ndim == 2 else x[None], factor.view(1, 1)))
    return outputs[0].view(x.shape)


@lru_cache
def _scaling(given: torch.dtype, factor: torch.dtype, made: torch.dtype) -> FusionRun:
    types = [DataType.from_torch(d) for d in (given, factor, made)]
    with FusionDefinition() as fd:
        x, by = define(fd, None, WHOLE, (-1, -1), types[0]), define(fd, None, WHOLE, (1, 1), types[1])
        fd.add_output(fd.ops.cast(fd.ops.mul(fd.ops.cast(x, dtype=types[1]), by), dtype=types[2]))
    return FusionRun(fd, (WHOLE, WHOLE), None, is_known=False, name=f"shardfuse::{_CALLED} backward")
