"""RMSNorm, and RMSNorm of a residual sum, on tensors that are whole or sharded over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import checked
from ..errors import ModuleArgumentError, ModuleInputError, PlacementError
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from . import traced
from .dtensor import Given, Result, on_local_tensors
from .fused import PLAIN, FusedOp
from .norm_fusions import NormSpec, norm_op
from .parameters import ParameterKind, ParameterModule
from .placement import TensorPlacement
from .settings import Setting

if TYPE_CHECKING:
    from .placement import Placements


class _Norm(ParameterModule):
    """What the two norms share: size, parameters and placements."""

    hidden_size: Setting[int] = Setting()
    eps: Setting[float] = Setting()
    elementwise_affine: Setting[bool] = Setting()
    zero_centered: Setting[bool] = Setting()

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        bias: bool,
        mesh: DeviceMesh | None,
        parameters: ParameterKind,
        at: tuple[str, Placements | None],
        input: Placements | None,
        output: Placements | None,
        output_grad: Placements | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        elementwise_affine: bool = True,
        zero_centered: bool = False,
    ) -> None:
        # A parameter is cut along the hidden axis only where that is named as Shard(-1): rows are sharded otherwise.
        super().__init__(mesh, TensorPlacement.of(*at, mesh).only(-1), parameters)
        if hidden_size < 1:
            raise ModuleArgumentError(type(self).__name__, "hidden_size", hidden_size, "1 or more")
        if eps < 0:
            raise ModuleArgumentError(type(self).__name__, "eps", eps, "0 or more")
        self.hidden_size, self.eps = hidden_size, eps
        self._input = TensorPlacement.of("input", input, mesh)
        self._at_name = at[0]
        self._at = TensorPlacement.of(*at, mesh)
        self._output = self._output_grad = self._at
        if output is not None:
            self._output = self._output_grad = TensorPlacement.of("output", output, mesh)
        if output_grad is not None:
            self._output_grad = TensorPlacement.of("output_grad", output_grad, mesh)
        for argument, placement, given in ((at[0], self._at, at[1]), ("output", self._output, output)):
            if placement.is_partial:
                raise PlacementError(argument, (given,), "a norm, which needs whole values", "pass Shard or Replicate")
        self._local_size = self._parameter.local(mesh, torch.empty(hidden_size, device="meta")).shape[0]
        self.elementwise_affine, self.zero_centered = elementwise_affine, zero_centered
        start = 0.0 if zero_centered else 1.0
        self.weight = self.make_parameter("weight", hidden_size, start, device, dtype) if elementwise_affine else None
        self.input_bias = self.make_parameter("input_bias", hidden_size, 0.0, device, dtype) if bias else None
        self.describe()

    def settings(self) -> dict[str, object]:
        placements = {"input": self._input, "output": self._output, "output_grad": self._output_grad}
        switches = {"elementwise_affine": self.elementwise_affine, "zero_centered": self.zero_centered}
        return {"hidden_size": self.hidden_size, "eps": self.eps, **switches, "mesh": self.mesh, **placements}

    @property
    def _weights(self) -> tuple[torch.Tensor, ...]:
        """The weight, where there is one."""
        weight = self.parameter("weight")
        return () if weight is None else (weight,)

    def reset_parameters(self) -> None:
        """The weight so that it multiplies by one, the bias to zero."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.input_bias is not None:
            torch.nn.init.zeros_(self.input_bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, bias={self.input_bias is not None}, mesh={self.mesh}"

    def whole(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> Sequence[int] | None:
        """Where x is whole every rank sees the same sizes, so that all may conclude from them what shards there are."""
        return tensors[0].shape if unsharded is None and self._input.is_uncut else unsharded

    def _spec(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        unsharded: Sequence[int] | None,
    ) -> NormSpec:
        at, output, output_grad, source = self._resolve(x.ndim, unsharded)
        if at.only(x.ndim - 1).shards != self._parameter.shards:
            found = (f"Shard({x.ndim - 1})",)
            raise PlacementError(self._at_name, found, "the hidden axis", "shard that axis as Shard(-1)")
        return NormSpec(
            ndim=x.ndim,
            hidden_size=self.hidden_size,
            eps=self.eps,
            mesh=self.mesh,
            mesh_id=id(self.mesh),
            x=source,
            at=at,
            output=output,
            output_grad=output_grad,
            dtype=self.check_dtype("x", x),
            weight_dtype=None if weight is None else self.check_dtype("weight", weight),
            residual_dtype=None if residual is None else self.check_dtype("residual", residual),
            bias_dtype=None if bias is None else self.check_dtype("input_bias", bias),
            zero_centered=self.zero_centered,
        )

    def _resolve(self, ndim: int, unsharded: Sequence[int] | None) -> list[TensorPlacement]:
        """The placements (at, output, output_grad, input) of tensors of ``ndim`` dims."""
        placements = [
            self._at.resolve(self._at_name, ndim),
            self._output.resolve("output", ndim),
            self._output_grad.resolve("output_grad", ndim),
            self._input.resolve("input", ndim),
        ]
        return [p.for_shape(self.mesh, unsharded) for p in placements]

    def _check_hidden(self, argument: str, tensor: torch.Tensor, placement: TensorPlacement) -> None:
        here = placement.resolve(argument, max(tensor.ndim, 1)).only(tensor.ndim - 1).shards
        is_cut = here == self._parameter.shards
        if not is_cut and placement.only(-1).is_uncut and any(d is not None for d in here):
            said, found = "input" if argument == "x" else argument, (f"Shard({tensor.ndim - 1})",)
            raise PlacementError(said, found, "the hidden axis", "shard that axis as Shard(-1)")
        self.check_size(argument, tensor, -1, self._local_size if is_cut else self.hidden_size)


@checked(ModuleArgumentError, ("__init__",))
class RMSNorm(_Norm):
    """y = x * rsqrt(mean(x^2) + eps) * weight over the last axis, of ``hidden_size`` elements unsharded.

    Plain, or with ``mesh`` on local tensors; placements are torch's Shard, Replicate, Partial, one or a sequence with
    one per mesh dimension:
    input: where x lives, with ``Partial()`` as each rank's summand; Replicate by default.
    output: where y is wanted; where the input is by default (Replicate for a partial input).
    output_grad: where y's gradient arrives, as ``output`` by default; ``Partial()`` where each rank has a summand.
    Row shards leave the weight whole, with a gradient summed over ranks, bitwise the same on each; ``Shard(-1)``, the
    hidden axis, cuts the weight too.
    parameters: "dtensor", DTensors on the mesh, which optimisers, clip_grad_norm_ and checkpoints take for the whole
    (``load_state_dict`` takes unsharded tensors too); "local", plain tensors, each rank's own piece.  Making DTensors
    is collective among the ranks of the mesh.
    elementwise_affine: is there a weight?  zero_centered: rows are multiplied by 1 + weight, which begins as 0.
    x: [..., hidden_size] in float64, float32, bfloat16 or float16; statistics are in float32 or float64.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Zhang & Sennrich 2019.
    """

    family = "rms_norm"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        zero_centered: bool = False,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        output: Placements | None = None,
        output_grad: Placements | None = None,
        parameters: ParameterKind = "dtensor",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        is_partial = TensorPlacement.of("input", input, mesh).is_partial
        super().__init__(
            hidden_size, eps, bias=False, mesh=mesh, parameters=parameters,
            at=("output", output) if is_partial else ("input", input),
            input=input, output=output, output_grad=output_grad, device=device, dtype=dtype,
            elementwise_affine=elementwise_affine, zero_centered=zero_centered,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        """x: [..., hidden_size] (local) -> the same shape, in x's dtype, placed as ``output``.

        ``unsharded``: the shape of the whole x, where local tensors are shards that differ in size.
        """
        if self.mesh is None and torch.compiler.is_compiling():
            self.check_plain(x=x, weight=self.weight)
            self.check_size("x", x, -1, self.hidden_size)
            return traced.rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)[0]
        if type(x) not in PLAIN and has_dtensor((x,)):
            result = Result(tuple(x.shape), self._output, self._output_grad)
            here = partial(self._forward, unsharded=x.shape)
            return on_local_tensors(here, self.mesh, [Given("x", x, self._input)], [result])
        return self._forward(x, unsharded=unsharded)

    def _forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        if x.ndim == 1:
            return self._forward(x[None], unsharded=None if unsharded is None else (1, *unsharded))[0]
        return self.run((x, *self._weights), unsharded)[0]

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        x, *weights = tensors
        self._check_hidden("x", x, self._input)
        return norm_op(self._spec(x, weights[0] if weights else None, None, None, self.whole(tensors, unsharded)))

    def op(self, x: torch.Tensor, unsharded: Sequence[int] | None = None) -> FusedOp:
        """The fusions for such an x, forward and backward; equal modules share them.

        x: [rows..., hidden_size] (local); ``unsharded``: its whole shape, where its shards differ in size.
        """
        return self.bind((x, *self._weights), unsharded)


@checked(ModuleArgumentError, ("__init__",))
class AddRMSNorm(_Norm):
    """new_residual = residual + x (+ bias); normed = new_residual * rsqrt(mean(new_residual^2) + eps) * weight.

    As ``RMSNorm``, and
    residual: where the residual lives and the norm is computed, and the new residual with its gradient too.
    With ``input=Partial(), residual=Shard(1), output=Replicate(), output_grad=Partial()`` one fusion takes the partial
    sums of a row-parallel matmul, reduce-scatters them over the sequence, adds, norms, and all-gathers for the next
    column-parallel matmul; its backward is the mirror image.
    bias: that of the matmul before, ``input_bias``: it is added once to the sum of all summands, ahead of the norm.
    """

    family = "add_rms_norm"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
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
        super().__init__(
            hidden_size, eps, bias=bias, mesh=mesh, parameters=parameters, at=("residual", residual),
            input=input, output=output, output_grad=output_grad, device=device, dtype=dtype,
            elementwise_affine=elementwise_affine, zero_centered=zero_centered,
        )  # fmt: skip

    def misread(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """A ``bias``, which is what a LayerNorm adds to its result."""
        if f"{prefix}bias" not in state_dict:
            return []
        found = f"{prefix}bias, which a LayerNorm adds to its result"
        expected = "no bias" if self.input_bias is None else f"{prefix}input_bias, which is added to x"
        advice = "leave it out, or rename it where that is meant"
        return [str(ModuleInputError("AddRMSNorm", "the state dict", found, expected, advice))]

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, *, unsharded: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [..., hidden_size] (local) -> (normed in x's dtype, new residual in residual's dtype).

        ``unsharded``: their shape as wholes, where local tensors are shards that differ in size.
        """
        if self.mesh is None and torch.compiler.is_compiling():
            self.check_plain(x=x, residual=residual, weight=self.weight, input_bias=self.input_bias)
            self.check_size("x", x, -1, self.hidden_size)
            self.check_same("residual", residual, "x", x.shape)
            parameters = (self.weight, self.eps, self.input_bias, residual)
            return traced.rms_norm(x, *parameters, zero_centered=self.zero_centered)
        if (type(x) not in PLAIN or type(residual) not in PLAIN) and has_dtensor((x, residual)):
            given = [Given("x", x, self._input), Given("residual", residual, self._at)]
            shape = self.unsharded_of(given)
            results = [Result(shape, self._output, self._output_grad), Result(shape, self._at, self._at)]
            return on_local_tensors(partial(self._forward, unsharded=shape), self.mesh, given, results)
        return self._forward(x, residual, unsharded=unsharded)

    def _forward(
        self, x: torch.Tensor, residual: torch.Tensor, *, unsharded: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x.ndim == 1 and residual.ndim == 1:
            whole = None if unsharded is None else (1, *unsharded)
            normed, new_residual = self._forward(x[None], residual[None], unsharded=whole)
            return normed[0], new_residual[0]
        bias = self.parameter("input_bias")
        biases = () if bias is None else (bias,)
        results = self.run((x, *self._weights, *biases, residual), unsharded)
        return results[0], results[1]

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "bias": self.input_bias is not None, "residual": self._at}

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        x, *parameters, residual = tensors
        weight = parameters.pop(0) if self.elementwise_affine else None
        bias = parameters[0] if parameters else None
        self._check_hidden("x", x, self._input)
        self._check_hidden("residual", residual, self._at)
        self._check_residual(x, residual)
        return norm_op(self._spec(x, weight, bias, residual, self.whole(tensors, unsharded)))

    def op(self, x: torch.Tensor, residual: torch.Tensor, unsharded: Sequence[int] | None = None) -> FusedOp:
        """The fusions for such tensors, forward and backward; equal modules share them.

        ``unsharded``: the whole shape, where shards differ in size.
        """
        bias = () if self.input_bias is None else (self.input_bias,)
        return self.bind((x, *self._weights, *bias, residual), unsharded)

    def _check_residual(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """The residual is this rank's piece of what x is, where x is whole; of x's shape where both are cut alike."""
        whole = self._input.gradient()
        if whole.is_uncut:
            expected = self._at.resolve("residual", x.ndim).local_shape(self.mesh, x.shape)
            self.check_same("residual", residual, "this rank's piece of x", expected)
        elif whole == self._at:
            self.check_same("residual", residual, "x", x.shape)
