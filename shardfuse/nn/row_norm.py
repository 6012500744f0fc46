"""What norms over the last dims share: sizes, parameters, placements, and the call of their fusions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import ModuleArgumentError, ModuleInputError, PlacementError
from ..mesh import DeviceMesh
from .fused import FusedOp
from .parameters import ParameterKind, ParameterModule
from .placement import TensorPlacement
from .row_norm_fusions import RowNormSpec, row_norm_op

if TYPE_CHECKING:
    from .placement import Placements


@dataclass(frozen=True)
class NormSwitches:
    """Which norm: is the mean subtracted, which parameters there are, and what is added to the weight."""

    centered: bool
    weight: bool
    bias: bool
    input_bias: bool
    weight_offset: float


class RowNorm(ParameterModule):
    """A norm over the last dims.  ``at``: the argument that says where it is computed, and what that says."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        switches: NormSwitches,
        *,
        mesh: DeviceMesh | None,
        parameters: ParameterKind,
        at: tuple[str, Placements | None],
        input: Placements | None,
        output: Placements | None,
        output_grad: Placements | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        # A parameter is cut along the hidden axis only where that is named as Shard(-1): rows are sharded otherwise.
        super().__init__(mesh, TensorPlacement.of(*at, mesh).only(-1), parameters)
        shape: tuple[int, ...] = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or any(n < 1 for n in shape):
            raise ModuleArgumentError(type(self).__name__, "normalized_shape", normalized_shape, "sizes of 1 or more")
        if not eps >= 0:
            raise ModuleArgumentError(type(self).__name__, "eps", eps, "0 or more")
        if len(shape) > 1 and not self._parameter.is_uncut:
            raise PlacementError(at[0], (at[1],), f"a norm over {len(shape)} dims", "shard rows, or norm one dim")
        self.normalized_shape, self.eps = shape, eps
        self.elementwise_affine, self._switches = switches.weight, switches
        self._input = TensorPlacement.of("input", input, mesh)
        self._at_name, self._at = at[0], TensorPlacement.of(*at, mesh)
        self._output = self._output_grad = self._at
        if output is not None:
            self._output = self._output_grad = TensorPlacement.of("output", output, mesh)
        if output_grad is not None:
            self._output_grad = TensorPlacement.of("output_grad", output_grad, mesh)
        for argument, placement, given in ((at[0], self._at, at[1]), ("output", self._output, output)):
            if placement.is_partial:
                raise PlacementError(argument, (given,), "a norm, which needs whole values", "pass Shard or Replicate")
        self._local_size = self._parameter.local(mesh, torch.empty(self._hidden, device="meta")).shape[0]
        size = shape if len(shape) > 1 else self._hidden
        start = 1.0 - switches.weight_offset
        self.weight = self.make_parameter("weight", size, start, device, dtype) if switches.weight else None
        self.bias = self.make_parameter("bias", size, 0.0, device, dtype) if switches.bias else None
        self.input_bias = self.make_parameter("input_bias", size, 0.0, device, dtype) if switches.input_bias else None

    @property
    def _hidden(self) -> int:
        """How many elements are normed together, unsharded."""
        return math.prod(self.normalized_shape)

    @property
    def dropout(self) -> float | None:
        """The probability that an element of x is dropped in this call; None where none can be."""
        return None

    def reset_parameters(self) -> None:
        """The weight so that it multiplies by one, biases to zero."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self._switches.weight_offset)
        for bias in (self.bias, self.input_bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        affine = f"elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}"
        return f"{self.normalized_shape}, eps={self.eps}, {affine}, mesh={self.mesh}"

    def normed(self, x: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        """The norm of a local x."""
        (rows,), whole = self._as_rows((("x", x),), unsharded)
        (normed,) = self._op(rows, None, whole).apply(self.timer, whole, rows, *self._parameters_here())
        return self._as_given(normed, x.ndim)

    def added(
        self, x: torch.Tensor, residual: torch.Tensor, *, unsharded: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of a residual sum, and that sum, of local tensors."""
        (rows, others), whole = self._as_rows((("x", x), ("residual", residual)), unsharded)
        self._check_residual(rows, others)
        op = self._op(rows, others, whole)
        normed, total = op.apply(self.timer, whole, rows, *self._parameters_here(), others)
        return self._as_given(normed, x.ndim), self._as_given(total, x.ndim)

    def _as_given(self, rows: torch.Tensor, ndim: int) -> torch.Tensor:
        """[rows..., hidden] with the dims of an argument of ``ndim`` dims."""
        dims = len(self.normalized_shape)
        result = rows.view(*rows.shape[:-1], *self.normalized_shape) if dims > 1 else rows
        return result[0] if ndim == dims else result

    def _as_rows(
        self, tensors: Sequence[tuple[str, torch.Tensor]], unsharded: Sequence[int] | None
    ) -> tuple[list[torch.Tensor], Sequence[int] | None]:
        """[rows..., hidden] each, with one row at least, and the unsharded shape of that."""
        dims = len(self.normalized_shape)
        rows: list[torch.Tensor] = []
        if unsharded is None and self._input.is_uncut:
            # Every rank sees the same sizes, so that all may conclude from them what shards there are.
            unsharded = tensors[0][1].shape
        for name, x in tensors:
            self._check_last_dims(name, x)
            flat = x.flatten(-dims) if dims > 1 else x
            rows.append(flat[None] if flat.ndim == 1 else flat)
        if unsharded is not None:
            unsharded = (*unsharded[:-dims], self._hidden)
            unsharded = (1, *unsharded) if len(unsharded) == 1 else unsharded
        return rows, unsharded

    def _check_last_dims(self, name: str, x: torch.Tensor) -> None:
        dims = len(self.normalized_shape)
        if dims > 1 and tuple(x.shape[-dims:]) != self.normalized_shape:
            found, expected = f"shape {tuple(x.shape)}", f"{self.normalized_shape} as its last dims"
            raise ModuleInputError(type(self).__name__, name, found, expected, "make the module for this shape")
        placement = self._input if name == "x" else self._at
        here = placement.resolve(name, max(x.ndim, 1))
        normed = range(max(x.ndim - dims, 0), max(x.ndim, 1))
        is_cut = here.only(x.ndim - 1).shards == self._parameter.shards
        if any(d in normed for d in here.shards) and (dims > 1 or (not is_cut and placement.only(-1).is_uncut)):
            said = "input" if name == "x" else name
            found = tuple(f"Shard({d})" for d in here.shards if d in normed)
            raise PlacementError(said, found, "the dims that are normed", "shard one such dim, as Shard(-1)")
        if dims == 1:
            self.check_size(name, x, -1, self._local_size if is_cut else self._hidden)

    def _check_residual(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """The residual is this rank's piece of what x is, where x is whole; of x's shape where both are cut alike."""
        whole = self._input.gradient()
        if whole.is_uncut:
            expected = self._at.resolve("residual", x.ndim).local(self.mesh, torch.empty(x.shape, device="meta"))
            self.check_same("residual", residual, "this rank's piece of x", expected.shape)
        elif whole == self._at:
            self.check_same("residual", residual, "x", x.shape)

    def _parameters_here(self) -> list[torch.Tensor]:
        """This rank's pieces of the parameters that there are, as vectors."""
        named = {"weight": self.weight, "bias": self.bias, "input_bias": self.input_bias}
        return [p.flatten() for p in self.local_parameters(**named)]

    def _op(self, x: torch.Tensor, residual: torch.Tensor | None, unsharded: Sequence[int] | None) -> FusedOp:
        """The fusions for such tensors [rows..., hidden]; equal modules share them."""
        named = (("at", self._at), ("output", self._output), ("output_grad", self._output_grad), ("input", self._input))
        resolved = [p.resolve(name, x.ndim).for_shape(self.mesh, unsharded) for name, p in named]
        at, output, output_grad, source = resolved
        if at.only(x.ndim - 1).shards != self._parameter.shards:
            found = (f"Shard({x.ndim - 1})",)
            raise PlacementError(self._at_name, found, "the hidden axis", "shard that axis as Shard(-1)")
        return row_norm_op(
            RowNormSpec(
                ndim=x.ndim,
                hidden_size=self._hidden,
                eps=self.eps,
                centered=self._switches.centered,
                dropout=self.dropout,
                weight_offset=self._switches.weight_offset,
                mesh=self.mesh,
                mesh_id=id(self.mesh),
                x=source,
                at=at,
                output=output,
                output_grad=output_grad,
                dtype=self.check_dtype("x", x),
                weight_dtype=None if self.weight is None else self.check_dtype("weight", self.weight),
                bias_dtype=None if self.bias is None else self.check_dtype("bias", self.bias),
                input_bias_dtype=None if self.input_bias is None else self.check_dtype("input_bias", self.input_bias),
                residual_dtype=None if residual is None else self.check_dtype("residual", residual),
            )
        )
