"""RMSNorm, and RMSNorm of a residual sum, on tensors that are whole or sharded over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import ModuleInputError
from ..mesh import DeviceMesh
from .parameters import ParameterKind
from .residual_norm import ResidualNorm
from .row_norm import InputNorm, NormSwitches, RowNorm
from .settings import check_type, checked_module

if TYPE_CHECKING:
    from .placement import Placements


class _OfRootMeanSquare(RowNorm):
    """What the two norms share: the arguments that say which norm of what size it is."""

    argument_names = {"normalized_shape": "hidden_size"}  # noqa: RUF012 annotated where it is declared

    def _size(self, hidden_size: int | Sequence[int]) -> int:
        """The one of a list.  Raises ModuleArgumentError."""
        sizes = (hidden_size,) if isinstance(hidden_size, int) else tuple(hidden_size)
        is_one = len(sizes) == 1 and sizes[0] >= 1
        self.check_argument("hidden_size", hidden_size, is_one, "one size, 1 or more")
        return sizes[0]

    @property
    def hidden_size(self) -> int:
        """The length of the axis that is normed, unsharded."""
        return self.normalized_shape[0]

    @hidden_size.setter
    def hidden_size(self, value: int | Sequence[int]) -> None:
        self.normalized_shape = cast("tuple[int, ...]", value)  # which it is stored as

    @property
    def zero_centered(self) -> bool:
        """Are rows multiplied by 1 + weight?"""
        return self._switches.weight_offset != 0

    @zero_centered.setter
    def zero_centered(self, value: bool) -> None:
        check_type(self, "zero_centered", value)
        self._switches = replace(self._switches, weight_offset=_offset(value))
        self.describe()

    def own_settings(self) -> dict[str, object]:
        biases = {"bias": self._switches.input_bias} if self.takes_residual else {}
        return {"hidden_size": self.hidden_size, "zero_centered": self.zero_centered, **biases}

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, bias={self.input_bias is not None}, mesh={self.mesh}"


def _offset(zero_centered: bool) -> float:
    return 1.0 if zero_centered else 0.0


@checked_module
class RMSNorm(_OfRootMeanSquare, InputNorm):
    """RMSNorm over the last axis, as torch.nn.RMSNorm of one dim: y = x * rsqrt(mean(x^2) + eps) * weight.

    Without ``mesh`` an ordinary module; with it, on this rank's part of x or on a DTensor.  Placements are torch's
    Shard, Replicate and Partial, one or a sequence with one per mesh dimension.

    hidden_size: the unsharded size of the last axis (or a list of it).
    eps: None takes torch's own number for x's dtype, in each call.
    elementwise_affine: whether there is a weight.
    zero_centered: rows are multiplied by 1 + weight, which begins as 0.
    input: how x is placed, ``Partial()`` where each rank has a summand; Replicate by default.
    output: how y is to be placed; as the input by default (Replicate for a partial input).
    output_grad: how y's gradient arrives, as ``output`` by default; ``Partial()`` where each rank has a summand.
    parameters: "dtensor", DTensors on the mesh, which optimisers, clip_grad_norm_ and checkpoints treat as the whole
    (``load_state_dict`` takes unsharded tensors too); "local", plain tensors, each rank's own piece.  Making DTensors
    is collective among the ranks of the mesh.
    x: [..., hidden_size] in float64, float32, bfloat16 or float16; statistics are in float32 or float64.

    Where rows are sharded, the weight is whole on each rank and its gradient is summed over ranks, bitwise the same on
    each.  ``Shard(-1)``, the hidden axis, shards the weight too.

    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Zhang & Sennrich 2019.
    """

    family = "rms_norm"

    def __init__(
        self,
        hidden_size: int | Sequence[int],
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered: bool = False,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        output: Placements | None = None,
        output_grad: Placements | None = None,
        parameters: ParameterKind = "dtensor",
    ) -> None:
        switches = NormSwitches(False, elementwise_affine, False, False, _offset(zero_centered))
        super().__init__(
            self._size(hidden_size), eps, switches, mesh=mesh, parameters=parameters,
            input=input, output=output, output_grad=output_grad, device=device, dtype=dtype,
        )  # fmt: skip


@checked_module
class AddRMSNorm(_OfRootMeanSquare, ResidualNorm):
    """The sum of a residual and x, and its RMSNorm, in one fusion.

    new_residual = residual + x (+ bias); normed = new_residual * rsqrt(mean(new_residual^2) + eps) * weight.  A call
    returns normed and new_residual.  Arguments are those of ``RMSNorm``, and

    bias: whether there is a parameter ``input_bias``, the bias of the matmul before: it is added once to the sum of all
    summands, ahead of the norm.
    residual: how the residual is placed, and the new residual with its gradient too; the norm is computed there.
    Replicate where it is left out, whatever ``input`` is.

    With ``input=Partial(), residual=Shard(1), output=Replicate(), output_grad=Partial()`` one fusion takes the partial
    sums of a row-parallel matmul, reduce-scatters them over the sequence, adds, norms, and all-gathers for the next
    column-parallel matmul; its backward is the mirror image.
    """

    family = "add_rms_norm"

    def __init__(
        self,
        hidden_size: int | Sequence[int],
        eps: float | None = 1e-6,
        bias: bool = False,
        *,
        elementwise_affine: bool = True,
        zero_centered: bool = False,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        residual: Placements | None = None,
        output: Placements | None = None,
        output_grad: Placements | None = None,
        parameters: ParameterKind = "dtensor",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        switches = NormSwitches(False, elementwise_affine, False, bias, _offset(zero_centered))
        super().__init__(
            self._size(hidden_size), eps, switches, mesh=mesh, parameters=parameters, residual=residual,
            input=input, output=output, output_grad=output_grad, device=device, dtype=dtype,
        )  # fmt: skip

    def misread(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """A ``bias``, which is what a LayerNorm adds to its result."""
        if self.bias is not None or f"{prefix}bias" not in state_dict:
            return []
        found = f"{prefix}bias, which a LayerNorm adds to its result"
        expected = "no bias" if self.input_bias is None else f"{prefix}input_bias, which is added to x"
        advice = "leave it out, or rename it where that is meant"
        return [str(ModuleInputError("AddRMSNorm", "the state dict", found, expected, advice))]
