"""Cross entropy of a linear layer's outputs, a chunk of rows at a time, so that logits are never whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from ..arguments import checked
from ..errors import ModuleArgumentError, ModuleInputError, PlacementError
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from .loss import REDUCTIONS, CrossEntropyLoss, Reduction
from .refused_calls import refusing

if TYPE_CHECKING:
    from .placement import Placements

_MULTIPLE = 128
"""Rows of a chunk that is not asked for are a multiple of this many, which is a tile of a matmul."""


@checked(ModuleArgumentError, ("__init__",))
class LinearCrossEntropyLoss(torch.nn.Module):
    """The cross entropy of ``x @ weight.T + bias``, with the logits of a chunk of rows in memory at a time.

    The backward computes a chunk's logits again: one matmul more, for memory of chunk_rows * classes instead of all
    rows.  The weight's gradient is added up over the chunks in the weight's dtype.  Arguments are those of
    ``CrossEntropyLoss``, and

    chunk_rows: rows of a chunk; left out, as many that its logits are about as large as x.
    mesh, logits: on a mesh, how the logits are placed: ``Shard(-1)``, where each rank has a part of the classes (of
    weight and bias), or Replicate.  The gradient of x is then each rank's summand, as of any column-parallel layer
    (``output_grad=Partial()`` of the norm before).

    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.
    """

    def __init__(
        self,
        *,
        chunk_rows: int | None = None,
        mesh: DeviceMesh | None = None,
        logits: Placements | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        num_classes: int | None = None,
        z_loss: float = 0.0,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        if chunk_rows is not None and chunk_rows < 1:
            raise ModuleArgumentError("LinearCrossEntropyLoss", "chunk_rows", chunk_rows, "1 or more")
        if reduction not in REDUCTIONS:
            raise ModuleArgumentError("LinearCrossEntropyLoss", "reduction", reduction, '"mean", "sum" or "none"')
        self.reduction, self.chunk_rows = reduction, chunk_rows
        self.loss = CrossEntropyLoss(
            mesh=mesh, logits=logits, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing,
            num_classes=num_classes, z_loss=z_loss, temperature=temperature,
        )  # fmt: skip
        if mesh is not None and any(d not in (None, -1) for d in self.loss.logits_placement.shards):
            advice = "shard classes, as Shard(-1); of row shards each rank takes its own loss, and the mean of those"
            raise PlacementError("logits", (logits,), "chunks of rows", advice)

    @refusing
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., features], weight: [classes, features], target: [...], bias: [classes] (classes local).

        -> a scalar, or [...] with reduction "none", in float32 or float64.
        """
        self._check(x, weight, target, bias)
        if torch.compiler.is_compiling():
            self._known()
        rows, targets = x.flatten(0, -2), target.flatten()
        size = self.chunk_rows or self._chunk_rows(rows, weight)
        losses = [
            cast(
                "torch.Tensor",
                checkpoint(self._chunk, part, weight, bias, its, use_reentrant=False, preserve_rng_state=False),
            )
            for part, its in zip(_split(rows, size), _split(targets, size), strict=True)
        ]
        loss = torch.cat(losses) if len(losses) > 1 else losses[0]
        if self.reduction == "none":
            return loss.view(target.shape)
        total = loss.sum()
        return total / (target != self.loss.ignore_index).sum() if self.reduction == "mean" else total

    def _known(self) -> None:
        """Have torch.compile, asked for dynamic shapes, meet the loss's numbers here, ahead of all chunks.

        It makes symbols of floats too: of one that it first meets within a checkpoint the next checkpoint has none.
        """
        loss = self.loss
        for number in (loss.label_smoothing, loss.z_loss, loss.temperature):
            assert number >= 0, "the loss has checked it"

    def _chunk(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
    ) -> torch.Tensor:
        return self.loss(functional.linear(x, weight, bias), target)

    def _chunk_rows(self, rows: torch.Tensor, weight: torch.Tensor) -> int:
        """As many that their logits are about as large as x."""
        wanted = rows.shape[0] * rows.shape[1] // max(weight.shape[0], 1)
        return max(_MULTIPLE, wanted // _MULTIPLE * _MULTIPLE)

    def _check(self, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None) -> None:
        def refuse(argument: str, found: str, expected: str, advice: str) -> ModuleInputError:
            return ModuleInputError("LinearCrossEntropyLoss", argument, found, expected, advice)

        for name, tensor in (("x", x), ("weight", weight), ("target", target), ("bias", bias)):
            if has_dtensor((tensor,)):
                is_summed = name == "x" and not self.loss.logits_placement.is_uncut
                placed = "grad_placements=[Partial()], as each rank has a summand of its gradient" if is_summed else ""
                raise refuse(name, "a DTensor", "this rank's local tensor", f"pass {name}.to_local({placed})")
        if x.ndim < 2:
            raise refuse("x", f"{x.ndim} dims", "2 or more", "pass rows of features")
        if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise refuse(
                "weight", f"shape {tuple(weight.shape)}", f"[classes, {x.shape[-1]}]", "pass the layer's weight"
            )
        if weight.dtype != x.dtype:
            raise refuse("weight", f"dtype {weight.dtype}", f"{x.dtype}, that of x", "cast one")
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
            found = f"shape {tuple(bias.shape)} of {bias.dtype}"
            raise refuse("bias", found, f"({weight.shape[0]},) of {weight.dtype}, a number for each class", "pass such")
        if target.shape != x.shape[:-1]:
            raise refuse(
                "target", f"shape {tuple(target.shape)}", f"{tuple(x.shape[:-1])}, x's rows", "pass one for each"
            )

    def extra_repr(self) -> str:
        return f"chunk_rows={self.chunk_rows}, reduction={self.reduction}"


def _split(tensor: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Chunks of ``size`` rows, of which the last may be short."""
    return cast("Sequence[torch.Tensor]", tensor.split(size))  # pyright: ignore[reportUnknownMemberType]
