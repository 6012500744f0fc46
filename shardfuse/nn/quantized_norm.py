"""The RMSNorm of a residual sum, quantised to float8, on tensors that are whole or of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from ..errors import ModuleInputError
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from . import norm, traced
from . import quantizing_torch_ops as by_torch
from .dtensor_autograd import Given, Result, on_local_tensors
from .fused import PLAIN, FusedOp
from .parameters import ParameterKind
from .quantized_norm_fusions import quantized_norm_op, scales_at
from .quantized_result import Quantized
from .quantizing_fusions import BLOCK, ScaleKind
from .row_norm_fusions import RowNormSpec
from .settings import Setting, checked_module

if TYPE_CHECKING:
    from .placement import Placements

Results = tuple[Quantized, torch.Tensor]
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@checked_module
class AddRMSNorm(norm.AddRMSNorm):
    """``shardfuse.nn.AddRMSNorm`` whose normed rows are float8 values and their scales; for inference.

    A call returns Quantized(values, scales), placed as ``output``, and the new residual.  The arguments are those of
    ``shardfuse.nn.AddRMSNorm``, without ``output_grad``, and

    scales: "row", one for each row, [..., 1]; "block", one for each 128 elements of a row, [..., hidden_size / 128],
    in the order in memory that torch's scaled matmuls read; "given", one for all, which a call is given and gives back.
    values_dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    With ``input=Partial()`` the summands of a row-parallel matmul are added up, with the residual, normed and
    quantised in one kernel, where ranks exchange inside of kernels; collectives are of what is quantised where the
    output lives elsewhere than the residual.  A hidden axis that is sharded has whole blocks on each rank.

    Nothing has a gradient: the weight requires none, and a call with a tensor that does is refused while gradients are
    recorded.  Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.
    """

    family = "quantized_add_rms_norm"
    scales: Setting[ScaleKind] = Setting()
    values_dtype: Setting[torch.dtype] = Setting()

    def __init__(
        self,
        hidden_size: int | Sequence[int],
        eps: float | None = 1e-6,
        bias: bool = False,
        *,
        scales: ScaleKind = "row",
        values_dtype: torch.dtype = torch.float8_e4m3fn,
        elementwise_affine: bool = True,
        zero_centered: bool = False,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        residual: Placements | None = None,
        output: Placements | None = None,
        parameters: ParameterKind = "dtensor",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, eps, bias, elementwise_affine=elementwise_affine, zero_centered=zero_centered, mesh=mesh,
            input=input, residual=residual, output=output, parameters=parameters, device=device, dtype=dtype,
        )  # fmt: skip
        expected = "torch.float8_e4m3fn or torch.float8_e5m2"
        self.__dict__.update(scales=scales, values_dtype=values_dtype)  # settings, which are described below
        self.check_argument("values_dtype", values_dtype, values_dtype in FLOAT8, expected)
        for placement in (self._at, self._output):
            self._check_blocks(placement.parts(mesh, -1))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.describe()

    def _check_blocks(self, parts: int) -> None:
        """Raise ModuleArgumentError where rows that are cut in so many parts are cut within blocks."""
        is_whole = self.scales != "block" or self.hidden_size % (parts * BLOCK) == 0
        cut = f"{parts} x {BLOCK}, the blocks of each rank" if parts > 1 else f"{BLOCK}, for scales of blocks"
        self.check_argument("hidden_size", self.hidden_size, is_whole, f"a multiple of {cut}")

    def settings(self) -> dict[str, object]:
        found = super().settings()
        del found["output_grad"]
        return {**found, "scales": self.scales, "values_dtype": str(self.values_dtype).removeprefix("torch.")}

    @classmethod
    def made_again(cls, settings: Mapping[str, Any]) -> Self:
        dtype = settings["values_dtype"]
        return super().made_again(
            {**settings, "values_dtype": getattr(torch, dtype) if isinstance(dtype, str) else dtype}
        )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        scale: torch.Tensor | None = None,
        *,
        unsharded: Sequence[int] | None = None,
    ) -> Results:
        """x, residual: [..., hidden_size] (local).  scale: float32, one element, of a module whose scales are given.

        ``unsharded``: their shape as wholes, where local tensors are shards that differ in size.
        """
        if torch.is_grad_enabled():
            self._refuse_gradients(x=x, residual=residual, scale=scale)
        more = self._more(scale)
        if unsharded is None:
            results = self._again(x, residual, *more)
            if results is not None:
                return self._given_back(results, scale)
        if (type(x) not in PLAIN or type(residual) not in PLAIN) and has_dtensor((x, residual)):
            return self._of_dtensors(x, residual, scale, unsharded)
        return self._given_back(self._quantized(x, residual, *more, unsharded=unsharded), scale)

    def _of_dtensors(
        self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor | None, unsharded: Sequence[int] | None
    ) -> Results:
        given = [Given("x", x, self._input), Given("residual", residual, self._at)]
        shape = self.unsharded_of(given, unsharded)
        ndim, last = len(shape), 1 if self.scales == "row" else shape[-1] // BLOCK
        at = scales_at(self._output.resolve("output", ndim), ndim, self.scales)
        of_scales = [] if self.scales == "given" else [Result((*shape[:-1], last), at, at)]
        results = [Result(shape, self._output, self._output), *of_scales, Result(shape, self._at, self._at)]
        more = self._more(scale)

        def call(*local: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(self._quantized(*local, *more, unsharded=shape))

        return self._given_back(on_local_tensors(call, self.mesh, given, results), scale)

    def _given_back(self, results: Sequence[torch.Tensor], scale: torch.Tensor | None) -> Results:
        """As a caller has them."""
        if scale is not None:
            return Quantized(results[0], scale), results[1]
        return Quantized(results[0], results[1]), results[2]

    def _more(self, scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The scale that is given, [1].  Raises ModuleInputError where one lacks or has no use."""
        if scale is None and self.scales != "given":
            return ()
        name, is_one = type(self).__name__, isinstance(scale, torch.Tensor) and scale.numel() == 1
        if scale is not None and self.scales != "given":
            found, expected = "a scale", f"none, as there is one made for each {self.scales}"
            raise ModuleInputError(name, "scale", found, expected, 'make the module with scales="given"')
        if not is_one or cast("torch.Tensor", scale).dtype != torch.float32:
            what = f"shape {tuple(scale.shape)} of {scale.dtype}" if isinstance(scale, torch.Tensor) else repr(scale)
            raise ModuleInputError(name, "scale", what, "one float32 number", "pass a tensor of one element")
        return (cast("torch.Tensor", scale).reshape(1),)

    def _refuse_gradients(self, **tensors: torch.Tensor | None) -> None:
        given = {**dict(zip(self.given, self.vectors_here(), strict=True)), **tensors}
        for argument, tensor in given.items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                found, expected = "a tensor that requires a gradient", "one that does not"
                advice = "call this under torch.no_grad(), or detach() it"
                raise ModuleInputError(type(self).__name__, argument, found, expected, advice)

    def _quantized(
        self, x: torch.Tensor, residual: torch.Tensor, *scale: torch.Tensor, unsharded: Sequence[int] | None
    ) -> Sequence[torch.Tensor]:
        """(values[, scales], new residual) of local tensors."""
        if self.is_decomposed():
            self.check_same("residual", residual, "x", x.shape)
            return self._traced_quantized(x, residual, *scale)
        if residual.ndim != x.ndim:
            self.check_same("residual", residual, "x", x.shape)
        rows, others = self._as_rows("x", x), self._as_rows("residual", residual)
        results = [*self._called(rows, (others, *scale), self._shape_of_rows(unsharded))]
        if self.scales == "block" and not results[1].movedim(-1, 0).is_contiguous():  # of a graph's op
            results[1] = by_torch.as_matmuls_read(results[1])
        return results if x.ndim > 1 else [t[0] for t in results]

    def _traced_quantized(
        self, x: torch.Tensor, residual: torch.Tensor, *scale: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """By torch's own ops."""
        given: dict[str, Any] = {"residual": residual, "weight": self.weight, "input_bias": self.input_bias}
        self.check_plain(x=x, **given)
        self._check_last_dims("x", x)
        wide = (
            torch.float64
            if torch.float64 in [t.dtype for t in (x, *given.values()) if t is not None]
            else torch.float32
        )
        normed, total = traced.norm(
            x.to(wide), self._eps_of(x), **given, bias=None, centered=False, weight_offset=self._switches.weight_offset
        )
        values, scales = by_torch.quantized(normed, self.scales, scale[0] if scale else None, self.values_dtype)
        return (values, total) if scale else (values, scales, total)

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        return super().bind(tensors[:-1] if self.scales == "given" else tensors, unsharded)

    def op_of(self, spec: RowNormSpec) -> FusedOp:
        self._check_blocks(spec.output.parts(self.mesh, spec.ndim - 1))
        return quantized_norm_op(spec, self.scales, self.values_dtype)
