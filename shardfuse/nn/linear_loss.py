"""Cross entropy of a linear layer's outputs, a chunk of rows at a time where all logits would take much memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from ..errors import ModuleArgumentError, ModuleInputError, PlacementError
from ..executor.uncompiled import uncompiled
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from .linear_loss_call import note_call
from .linear_loss_gradients import Chunks, LossAndGradient, can_make_gradients
from .linear_loss_op import linear_loss_op
from .loss import TORCHS, CrossEntropyLoss, StrayTargetError, check_torchs
from .loss_fusions import REDUCTIONS, Reduction
from .refused_calls import refusing
from .settings import Checked, checked_module

if TYPE_CHECKING:
    from .placement import Placements

_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
_MULTIPLE = 128
"""Rows of a chunk that is not asked for are a multiple of this many, which is a tile of a matmul."""


def _of_losses(name: str) -> property:
    """A setting that a LinearCrossEntropyLoss shares with the losses that it is made of, which check what it is."""

    def found(module: LinearCrossEntropyLoss) -> object:
        return getattr(module.loss, name)

    def change(module: LinearCrossEntropyLoss, value: object) -> None:
        # of the first that does not take it nothing has changed
        for loss in (module.loss,) if name == "reduction" else (module.loss, module.row_loss, module.loss_and_gradient):
            try:
                setattr(loss, name, value)
            except ModuleArgumentError as error:
                error.rename(type(module).__name__, error.argument)
                raise

    return property(found, change)


def _check_chunk_rows(module: LinearCrossEntropyLoss, rows: int | None) -> None:
    """Raise ModuleArgumentError for what is no number of rows."""
    if rows is not None and rows < 1:
        raise ModuleArgumentError(type(module).__name__, "chunk_rows", rows, "1 or more")


@checked_module
class LinearCrossEntropyLoss(torch.nn.Module):
    """The cross entropy of ``x @ weight.T + bias``, with the logits of a chunk of rows in memory at a time.

    Training by the mean or the sum makes the gradients with the loss, chunk by chunk, while a chunk's logits are there:
    the logits are multiplied once, and what is kept for the backward are the gradients.  That of the weight is added up
    over the chunks in float32 (float64) and rounded once.  With reduction="none" the backward computes a chunk's
    logits again, and adds up in the weight's dtype.  Logits that make one chunk are kept, as by a layer and
    ``CrossEntropyLoss``.  Under autocast x, weight and bias may be of several dtypes.  Arguments are those of
    ``CrossEntropyLoss``, and

    chunk_rows: rows of a chunk; left out, as many that its logits have no more elements than x and weight together (at
    least 128).
    mesh, logits: on a mesh, how the logits are placed: ``Shard(-1)``, where each rank has a part of the classes (of
    weight and bias), or Replicate.  The gradient of x is then each rank's summand, as of any column-parallel layer
    (``output_grad=Partial()`` of the norm before).

    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.
    """

    reduction, ignore_index, label_smoothing = map(_of_losses, ("reduction", "ignore_index", "label_smoothing"))
    num_classes, z_loss, temperature, mesh = map(_of_losses, ("num_classes", "z_loss", "temperature", "mesh"))
    chunk_rows: Checked[int | None] = Checked(_check_chunk_rows)  # no property: torch 2.11 compiles none of this name

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
        if reduction not in REDUCTIONS:
            raise ModuleArgumentError(type(self).__name__, "reduction", reduction, '"mean", "sum" or "none"')
        self.chunk_rows = chunk_rows
        options: dict[str, Any] = {
            "mesh": mesh, "logits": logits, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
            "num_classes": num_classes, "z_loss": z_loss, "temperature": temperature,
        }  # fmt: skip
        try:
            self.loss = CrossEntropyLoss(reduction=reduction, **options)
        except ModuleArgumentError as error:  # of a loss that the caller has not made
            error.rename(type(self).__name__, error.argument)
            raise
        self.row_loss = CrossEntropyLoss(reduction="none", **options)
        self.loss_and_gradient = LossAndGradient(reduction="none", **options)
        if mesh is not None and any(d not in (None, -1) for d in self.loss.logits_placement.shards):
            advice = (
                'shard classes, as Shard(-1); of row shards each rank takes its own loss with reduction="sum", and the '
                "sum of these over ranks is divided by how many targets of all ranks are not ignored"
            )
            raise PlacementError("logits", (logits,), "chunks of rows", advice)

    def __setattr__(self, name: str, value: object) -> None:
        if name in TORCHS and type(self).forward is LinearCrossEntropyLoss.forward:  # torch 2.13 has such a module too
            check_torchs(type(self).__name__, **{name: value})
        super().__setattr__(name, value)  # pyright: ignore[reportArgumentType]

    @refusing
    def forward(self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., features], weight: [classes, features], target: [...], bias: [classes] (classes local).

        -> a scalar, or [...] with reduction "none", in float32 or float64.
        """
        self._check(x, weight, target, bias)
        size = self.chunk_rows or self._chunk_rows(x.shape[:-1].numel(), x.shape[-1], weight.shape[0])
        if not torch.compiler.is_compiling():
            return self._called(x, weight, target, bias, size)
        if size >= target.numel():
            return self.loss(functional.linear(x, weight, bias), target)
        wanted = [t is not None and t.requires_grad for t in (x, weight, bias)]
        is_exporting = cast(Any, torch.compiler)._is_exporting_flag  # in torch 2.11 is_exporting() is True in any graph
        is_trained = torch.is_grad_enabled() and any(wanted) and not is_exporting
        if self.reduction == "none" or not is_trained:
            return self._of_chunks(x, weight, target, bias, size)
        settings, dtype = self.loss_and_gradient.text, _matmul_dtype(x)
        options = (settings, size, dtype, self.reduction == "mean", wanted)
        return linear_loss_op(x.flatten(0, -2), weight, target.flatten(), bias, *options)[0]

    @uncompiled
    def _called(self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, size: int) -> Tensor:
        """A call that is not compiled."""
        try:
            return self._made(x, weight, target, bias, size)
        except StrayTargetError as error:  # of a chunk, by a loss that the caller has not called
            raise error.within(type(self).__name__, target) from None

    def _made(self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, size: int) -> Tensor:
        note_call(self.loss, target.numel(), size, self.reduction, has_bias=bias is not None)
        if size >= target.numel():
            return self.loss(functional.linear(x, weight, bias), target)
        tensors = (x, weight, target) if bias is None else (x, weight, target, bias)
        if self.reduction == "none" or not can_make_gradients(tensors):
            return self._of_chunks(x, weight, target, bias, size)
        make = Chunks(self.loss_and_gradient, size, _matmul_dtype(x), self.reduction == "mean")
        return make(x.flatten(0, -2), weight, target.flatten(), bias)

    def _of_chunks(self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, size: int) -> Tensor:
        """By ops that are differentiated each by itself, a chunk's forward once more in the backward."""
        if torch.compiler.is_compiling():
            self._known()
        make = self._chunk_again if torch.is_grad_enabled() else self._chunk
        chunks = zip(_split(x.flatten(0, -2), size), _split(target.flatten(), size), strict=True)
        loss = torch.cat([make(part, weight, bias, its) for part, its in chunks])
        if self.reduction == "none":
            return loss.view(target.shape)
        total = loss.sum()
        return total / (target != self.loss.ignore_index).sum() if self.reduction == "mean" else total

    def _known(self) -> None:
        """Have torch.compile, asked for dynamic shapes, meet the loss's numbers here, ahead of all chunks.

        It makes symbols of floats too: of one that it first meets within a checkpoint the next checkpoint has none.
        """
        loss = self.row_loss
        for number in (loss.label_smoothing, loss.z_loss, loss.temperature):
            assert number >= 0, "the loss has checked it"

    def _chunk(self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        return self.row_loss(functional.linear(x, weight, bias), target)

    def _chunk_again(self, *tensors: Tensor | None) -> Tensor:
        """``_chunk``, which the backward does once more."""
        return cast("Tensor", checkpoint(self._chunk, *tensors, use_reentrant=False, preserve_rng_state=False))

    def _chunk_rows(self, rows: int, features: int, classes: int) -> int:
        """As many that a chunk's logits have no more elements than x and the weight together; chunks of like sizes.

        It is the same on every rank: ``classes`` of shards that differ in size are those of the largest.
        """
        whole, placement = self.loss.num_classes, self.loss.logits_placement
        if whole is not None:
            classes = -(-whole // placement.resolve("logits", 2).parts(self.mesh, 1))
        most = features + rows * features // max(classes, 1)
        if rows <= most:
            return rows
        most = max(_MULTIPLE, most // _MULTIPLE * _MULTIPLE)
        chunks = -(-rows // most)
        return -(-rows // (chunks * _MULTIPLE)) * _MULTIPLE

    def _local_part(self, name: str, tensor: Any) -> str:
        """How the local tensor that is asked for is had from a DTensor: each rank has all rows, and its own classes."""
        is_cut = [dim is not None for dim in self.loss.logits_placement.shards]
        if name in ("weight", "bias") and any(is_cut):
            is_placed = len(is_cut) == len(tensor.placements) and all(
                p.is_shard(0) if cut else p.is_replicate() for cut, p in zip(is_cut, tensor.placements, strict=True)
            )
            moved = "" if is_placed else f"redistribute(placements={_placements(is_cut, 'Shard(0)')})."
            return f"pass {name}.{moved}to_local()"
        is_whole = all(p.is_replicate() for p in tensor.placements)
        is_summed = name == "x" and any(is_cut)
        placed = f"grad_placements={_placements(is_cut, 'Partial()')}" if is_summed else ""
        why = [
            *([] if is_whole else ["each rank takes all of it"]),
            *(["each rank has a summand of the gradient"] if is_summed else []),
        ]
        method = "to_local" if is_whole else "full_tensor"
        return f"pass {name}.{method}({placed})" + (f", as {' and '.join(why)}" if why else "")

    def _check(self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
        def refuse(argument: str, found: str, expected: str, advice: str) -> ModuleInputError:
            return ModuleInputError(type(self).__name__, argument, found, expected, advice)

        for name, tensor in (("x", x), ("weight", weight), ("target", target), ("bias", bias)):
            if has_dtensor((tensor,)):
                raise refuse(name, "a DTensor", "this rank's local tensor", self._local_part(name, tensor))
        if x.ndim == 0:
            raise refuse("x", "no dims", "[..., features]", "pass rows of features")
        if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise refuse(
                "weight", f"shape {tuple(weight.shape)}", f"[classes, {x.shape[-1]}]", "pass the layer's weight"
            )
        if weight.dtype != x.dtype and not _is_cast(x, weight):
            raise refuse("weight", f"dtype {weight.dtype}", f"{x.dtype}, that of x", "cast one")
        if bias is not None and (
            bias.shape != weight.shape[:1] or (bias.dtype != weight.dtype and not _is_cast(bias, weight))
        ):
            found = f"shape {tuple(bias.shape)} of {bias.dtype}"
            raise refuse("bias", found, f"({weight.shape[0]},) of {weight.dtype}, a number for each class", "pass such")
        if target.shape != x.shape[:-1]:
            raise refuse(
                "target", f"shape {tuple(target.shape)}", f"{tuple(x.shape[:-1])}, x's rows", "pass one for each"
            )

    def extra_repr(self) -> str:
        return f"chunk_rows={self.chunk_rows}, reduction={self.reduction}"


def _is_cast(*tensors: Tensor) -> bool:
    """Does autocast cast such tensors for a matmul?"""
    device = tensors[0].device.type
    is_on = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    return is_on and all(t.dtype in _AUTOCAST for t in tensors)


def _matmul_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if _is_cast(x) else x.dtype


def _split(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Chunks of ``size`` rows, of which the last may be short."""
    return cast("Sequence[Tensor]", tensor.split(size))  # pyright: ignore[reportUnknownMemberType]


def _placements(is_cut: Sequence[bool], placement: str) -> str:
    """As a user writes them, one for each mesh dimension: ``placement`` along those that cut the classes."""
    return f"[{', '.join(placement if cut else 'Replicate()' for cut in is_cut)}]"
