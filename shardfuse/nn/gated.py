"""Gated units of an MLP, on tensors that are whole or sharded over a mesh: what GeGLU and SwiGLU share, and GeGLU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from ..errors import ModuleInputError, PlacementError
from ..frontend import FusionDefinition
from ..frontend.detection import has_dtensor
from ..ir import DataType, TensorView
from . import traced
from .activation_functions import Activation, activated, share_of, slope
from .dtensor_autograd import Given, Result, on_local_tensors
from .fused import PLAIN, FusedModule, FusedOp
from .gelu import OfGelu
from .of_linear import TakesProducts
from .placed_spec import PlacedSpec
from .placement import TensorPlacement, define, give
from .settings import Setting, checked_module
from .shaping import Reshaped, Shaping, contiguous_view, laid_out


class GatedUnit(TakesProducts, FusedModule):
    """activation(gate [+ gate_bias]) * (up [+ up_bias]), element by element.  ``features``: of these, where known."""

    features: Setting[int | None] = Setting()
    gate_bias: torch.nn.Parameter | None
    up_bias: torch.nn.Parameter | None
    _input: TensorPlacement

    @property
    def activation(self) -> Activation:
        """Of the gate."""
        raise NotImplementedError

    def forward(
        self, gate: torch.Tensor, up: torch.Tensor | None = None, *, unsharded: Sequence[int] | None = None
    ) -> torch.Tensor:
        """gate, up: [..., features] (local) of one dtype -> the same shape and dtype.

        Without ``up``, ``gate`` is both: [..., 2 * features] (local), what one matmul makes, this rank's part of the
        gate in the first half and of up in the second.  It is read in place, and its gradient comes as one tensor.
        ``unsharded``: the shape of gate as a whole, without ``up`` too [..., features], where local tensors are shards
        that differ in size.
        """
        if up is None and unsharded is None and not torch.compiler.is_compiling():
            results = self.run_again((gate, *self._biases_here()), _TOGETHER)
            if results is not None:
                return results[0]
        if self.is_decomposed():
            return self._traced(gate, up)
        if (type(gate) not in PLAIN or (up is not None and type(up) not in PLAIN)) and has_dtensor((gate, up)):
            return self._on_dtensors(gate, up, unsharded)
        return self._forward(gate, up, unsharded=unsharded)

    def _forward(
        self, gate: torch.Tensor, up: torch.Tensor | None = None, *, unsharded: Sequence[int] | None
    ) -> torch.Tensor:
        biases = self._biases_here()
        if up is None:
            self._check(gate, up)
            whole = None if unsharded is None else (*unsharded[:-1], 2, unsharded[-1])
            return self.run((gate, *biases), whole, _TOGETHER)[0]
        if gate.ndim == 1 and up.ndim == 1 and self.features is not None:  # a row, as a placement of rows has it
            return self._forward(gate[None], up[None], unsharded=None if unsharded is None else (1, *unsharded))[0]
        if not (gate.is_contiguous() or biases) and self.mesh is None:
            is_sized = self.features is not None
            return laid_out(lambda given: self.run(given, None), gate, up, keeps_last=is_sized)
        return self.run((gate, up, *biases), unsharded)[0]

    def _on_dtensors(
        self, gate: torch.Tensor, up: torch.Tensor | None, unsharded: Sequence[int] | None
    ) -> torch.Tensor:
        at, tensors = self._input, (gate,) if up is None else (gate, up)
        given = [Given(name, t, at) for name, t in zip(("gate", "up"), tensors, strict=False)]
        shape = self.unsharded_of(given, unsharded)
        if up is None:
            if any(d is not None for d in at.only(-1).shards + at.only(gate.ndim - 1).shards):
                advice = "pass its local tensor, this rank's gate and up side by side, or gate and up apart"
                raise PlacementError("input", ("Shard(-1)",), "a DTensor that holds gate and up", advice)
            shape = (*shape[:-1], shape[-1] // 2)
        return on_local_tensors(partial(self._forward, unsharded=shape), self.mesh, given, [Result(shape, at, at)])

    def _traced(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        """By torch's own ops."""
        self._check(gate, up)
        self._check_biases()
        if up is not None and self.features is not None:
            self.check_size("gate", gate, -1, self.features)
        self.check_plain(gate=gate, gate_bias=self.gate_bias)
        halves = gate.chunk(2, -1) if up is None else (gate, up)
        return traced.gated(self.activation, halves[0], halves[1], self.gate_bias, self.up_bias)

    def _biases_here(self) -> Sequence[torch.Tensor]:
        there = self._parameters  # past ``torch.nn.Module.__getattr__``, which looks for them in three places
        is_there = "gate_bias" in there and "up_bias" in there
        gate, up = (there["gate_bias"], there["up_bias"]) if is_there else (self.gate_bias, self.up_bias)
        if (gate is None) != (up is None):
            self._check_biases()
        return () if gate is None or up is None else (gate, up)

    def _check_biases(self) -> None:
        """Of which a caller may have assigned one."""
        if (self.gate_bias is None) != (self.up_bias is None):
            missing, other = ("gate_bias", "up_bias") if self.gate_bias is None else ("up_bias", "gate_bias")
            raise ModuleInputError(
                type(self).__name__, missing, "None", f"a bias, as {other} is", "assign both or none"
            )

    def _check(self, gate: torch.Tensor, up: torch.Tensor | None) -> None:
        """Of what the views of gate and up depend on, and what the dtypes are."""
        name = type(self).__name__
        if gate.ndim == 0:
            raise ModuleInputError(name, "gate", "no dims", "[..., features]", "pass rows")
        if up is not None:
            self.check_same("up", up, "gate", gate.shape)
            if up.dtype != gate.dtype:
                raise ModuleInputError(name, "up", f"dtype {up.dtype}", f"{gate.dtype}, the dtype of gate", "cast one")
        elif gate.shape[-1] % 2:
            found = f"{gate.shape[-1]} features"
            raise ModuleInputError(name, "gate", found, "an even number: gate and up", "pass both, side by side")

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        """Of (gate, up), or both as [..., 2, features], and of the biases."""
        gate, *others = tensors
        is_packed = len(tensors) % 2 == 1
        up = None if is_packed else others.pop(0)
        if up is not None:
            self._check(gate, up)
        whole = None if unsharded is None else (*unsharded[:-2], unsharded[-1]) if is_packed else unsharded
        ndim = gate.ndim - is_packed
        placement = self._input.resolve("input", ndim).for_shape(self.mesh, whole)
        if is_packed:
            if self.features is not None:
                here = placement.only(ndim - 1).local_shape(self.mesh, (self.features,))[0]
                self.check_size("gate", gate.flatten(-2), -1, here * gate.shape[-2])
            shards = tuple(ndim if d == ndim - 1 else d for d in placement.shards)
            placement = replace(placement, shards=shards)
        elif self.features is not None:
            self._check_features(gate, self.features, placement.only(ndim - 1), has_biases=len(others) > 0)
        biases: dict[str, torch.Tensor] = dict(zip(("gate_bias", "up_bias"), others, strict=False))
        self.check_vectors(biases, gate.shape[-1])
        if biases and biases["gate_bias"].dtype != biases["up_bias"].dtype:
            found, expected = f"dtype {biases['up_bias'].dtype}", f"{biases['gate_bias'].dtype}, the dtype of gate_bias"
            raise ModuleInputError(type(self).__name__, "up_bias", found, expected, "cast one")
        spec = GatedSpec(
            activation=self.activation,
            ndim=gate.ndim,
            is_packed=is_packed,
            features=-1 if is_packed or self.features is None else self.features,
            mesh=self.mesh,
            placement=placement,
            dtype=self.check_dtype("gate", gate),
            bias_dtype=self.check_dtype("gate_bias", others[0]) if others else None,
        )
        return gated_op(spec)

    def _check_features(
        self, gate: torch.Tensor, features: int, placement: TensorPlacement, *, has_biases: bool
    ) -> None:
        """``placement``: of the last axis of ``gate``, which ``Shard(gate.ndim - 1)`` cuts as ``Shard(-1)`` does."""
        if has_biases and placement.shards != self._input.only(-1).shards:
            shard = f"Shard({gate.ndim - 1})"
            raise PlacementError("input", (shard,), "biases along the last axis", "shard the last axis as Shard(-1)")
        self.check_size("gate", gate, -1, placement.local_shape(self.mesh, (features,))[0])


@checked_module
class GeGLU(OfGelu, GatedUnit):
    """GeGLU of two tensors, or of one that holds both: gelu(gate) * up.

    approximate: "none", or "tanh" for the approximation by a hyperbolic tangent.
    mesh, input: on a mesh, how gate, up and the result are placed: Shard or Replicate; nothing is sent.
    gate, up: [..., features] (local) in float64, float32, bfloat16 or float16, computed in float32 or float64.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Shazeer 2020.
    """

    family = "geglu"
    gate_bias = up_bias = None


_BOTH = Reshaped(  # [..., 2 * features] as [..., 2, features]: gate and up are a dim before the last
    enter=lambda x: contiguous_view(x, *x.shape[:-1], 2, x.shape[-1] // 2), leave=lambda x: x.flatten(-2)
)
_RESULT = Reshaped(enter=lambda x: x.unsqueeze(-2), leave=lambda x: x.squeeze(-2))
_TOGETHER = Shaping((_BOTH,), (_RESULT,))


@dataclass(frozen=True, kw_only=True)
class GatedSpec(PlacedSpec):
    """All that the fusions depend on.

    is_packed: gate and up are one tensor, in a dim before the last that the result has as 1, as ``ndim`` and
    ``placement`` have it.  features: unsharded size of the last dim; -1 where it is not known.
    """

    activation: Activation
    is_packed: bool
    features: int = -1
    bias_dtype: DataType | None

    @property
    def other_dtypes(self) -> tuple[DataType | None, ...]:
        return (self.bias_dtype,)

    @property
    def bias(self) -> TensorPlacement:
        return self.placement.only(self.ndim - 1)

    def shape(self, beside: int) -> list[int]:
        """Of a tensor that has ``beside`` of gate and up, where they have a dim."""
        rows = [-1] * (self.ndim - 1)
        return [*rows[:-1], beside, self.features] if self.is_packed else [*rows, self.features]


@lru_cache(maxsize=256)
def gated_op(spec: GatedSpec) -> FusedOp:
    """(gate, up[, biases]) or (both[, biases]) -> (result); of both it is [..., 1, features]."""
    tensors = 2 - spec.is_packed
    biases = 2 * (spec.bias_dtype is not None)
    everything = tuple(range(tensors + biases))
    arguments = (*(spec.placement,) * tensors, *(spec.bias,) * biases)
    follows, ones = ((0,), (-2,)) if spec.is_packed else ((), ())
    return FusedOp(
        _forward(spec), _backward(spec), 1, everything, arguments, (spec.placement,), everything,
        follows=follows, ones=ones,
    )  # fmt: skip


def _forward(spec: GatedSpec) -> FusionDefinition:
    """-> activation(gate) * up."""
    with FusionDefinition() as fd:
        gate, up = _operands(fd, spec)
        result = fd.ops.mul(activated(fd, spec.activation, gate), up)
        give(fd, fd.ops.cast(result, dtype=spec.dtype), spec.mesh, spec.placement)
    return fd


def _backward(spec: GatedSpec) -> FusionDefinition:
    """(gradient, what forward took) -> the gradient of each of those."""
    with FusionDefinition() as fd:
        gradient = define(fd, spec.mesh, spec.placement, spec.shape(1), spec.dtype)
        gradient = fd.ops.cast(gradient, dtype=spec.compute)
        gate, up = _operands(fd, spec)
        share = share_of(fd, spec.activation, gate)
        d_up = fd.ops.mul(gradient, fd.ops.mul(gate, share))
        steepness = slope(fd, spec.activation, gate, spec.dtype, share)
        d_gate = fd.ops.mul(fd.ops.mul(gradient, up), steepness)
        found = [fd.ops.cast(d, dtype=spec.dtype) for d in (d_gate, d_up)]
        for d in [fd.ops.cat(found, -2)] if spec.is_packed else found:
            give(fd, d, spec.mesh, spec.placement)
        if spec.bias_dtype is not None:
            rows = list(range(spec.ndim - 1))
            for d in (d_gate, d_up):
                give(fd, fd.ops.cast(fd.ops.sum(d, rows), dtype=spec.bias_dtype), spec.mesh, spec.bias)
    return fd


def _operands(fd: FusionDefinition, spec: GatedSpec) -> list[TensorView]:
    """Declare gate and up, and their biases, and add those: both in the compute dtype."""
    if spec.is_packed:
        both = define(fd, spec.mesh, spec.placement, spec.shape(2), spec.dtype)
        ends: list[object] = [fd.ops.size(both, k) for k in range(spec.ndim)]
        parts: list[TensorView] = []
        for k in range(2):
            start = [0] * spec.ndim
            start[-2], ends[-2] = k, k + 1
            parts.append(fd.ops.slice(both, start, list(ends)))  # pyright: ignore[reportArgumentType]
        parts = [fd.ops.cast(part, dtype=spec.compute) for part in parts]
    else:
        whole = spec.mesh, spec.placement, spec.shape(1), spec.dtype
        parts = [fd.ops.cast(define(fd, *whole), dtype=spec.compute) for _ in range(2)]
    if spec.bias_dtype is None:
        return parts
    biases = [define(fd, spec.mesh, spec.bias, [spec.features], spec.bias_dtype) for _ in range(2)]
    biases = [fd.ops.cast(bias, dtype=spec.compute) for bias in biases]
    return [fd.ops.add(x, bias) for x, bias in zip(parts, biases, strict=True)]
