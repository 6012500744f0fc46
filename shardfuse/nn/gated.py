"""Gated units of an MLP, GeGLU and packed ones, on tensors that are whole or sharded over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch

from ..arguments import checked
from ..errors import ModuleArgumentError, ModuleInputError, PlacementError
from ..frontend import FusionDefinition
from ..frontend.detection import has_dtensor
from ..ir import DataType, TensorView
from . import traced
from .activation_functions import Activation, activated, slope
from .dtensor_autograd import Given, Result, on_local_tensors
from .fused import FusedModule, FusedOp
from .gelu import OfGelu, gelu_activation
from .placed_spec import PlacedSpec
from .placement import TensorPlacement, define, give
from .shaping import Reshaped, Shaping, contiguous_view, laid_out

if TYPE_CHECKING:
    pass


@checked(ModuleArgumentError, ("__init__",))
class GeGLU(OfGelu):
    """gelu(gate) * up, element by element.

    approximate: "none", or "tanh" for the approximation by a hyperbolic tangent.
    mesh, input: on a mesh, where gate, up and the result live: Shard or Replicate; nothing is sent.
    gate, up: [..., features] (local) in float64, float32, bfloat16 or float16, computed in float32 or float64.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Shazeer 2020.
    """

    family = "geglu"

    def forward(
        self, gate: torch.Tensor, up: torch.Tensor | None = None, *, unsharded: Sequence[int] | None = None
    ) -> torch.Tensor:
        """gate, up: [..., features] (local) of one dtype -> the same shape and dtype.

        Without ``up``, ``gate`` is both: [..., 2 * features] (local), what one matmul makes, this rank's part of the
        gate in the first half and of up in the second.  It is read in place, and its gradient comes as one tensor.
        unsharded: the shape of gate as a whole, where local tensors are shards that differ in size.
        """
        activation = gelu_activation("GeGLU", self.approximate)
        return gated(self, activation, self._input, gate, up, (), unsharded)

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        return bind_gated(self, gelu_activation("GeGLU", self.approximate), self._input, tensors, unsharded)


def gated(
    module: FusedModule,
    activation: Activation,
    at: TensorPlacement,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    biases: Sequence[torch.Tensor],
    unsharded: Sequence[int] | None,
) -> torch.Tensor:
    """activation(gate + bias) * (up + bias) for ``module``.  ``up`` None: gate holds both; ``biases``: none or two."""
    tensors = (gate,) if up is None else (gate, up)
    if module.is_decomposed():
        _check(module, gate, up)
        module.check_plain(gate=gate, gate_bias=biases[0] if biases else None)
        both = gate.chunk(2, -1) if up is None else tensors
        return traced.gated(activation, *both, *biases)
    here = partial(_gated, module, tuple(biases))
    if not has_dtensor(tensors):
        return here(*tensors, unsharded=unsharded)
    given = [Given(name, t, at) for name, t in zip(("gate", "up"), tensors, strict=False)]
    shape = module.unsharded_of(given)
    if up is None:
        if any(d is not None for d in at.only(-1).shards + at.only(gate.ndim - 1).shards):
            advice = "pass its local tensor, this rank's gate and up side by side, or gate and up apart"
            raise PlacementError("input", ("Shard(-1)",), "a DTensor that holds gate and up", advice)
        shape = (*shape[:-1], shape[-1] // 2)
    result = Result(shape, at, at)
    return on_local_tensors(partial(here, unsharded=shape), module.mesh, given, [result])


def _check(module: FusedModule, gate: torch.Tensor, up: torch.Tensor | None) -> None:
    """Of what the views of gate and up depend on, and what the dtypes are."""
    name = type(module).__name__
    if gate.ndim == 0:
        raise ModuleInputError(name, "gate", "no dims", "[..., features]", "pass rows")
    if up is not None:
        module.check_same("up", up, "gate", gate.shape)
        if up.dtype != gate.dtype:
            raise ModuleInputError(name, "up", f"dtype {up.dtype}", f"{gate.dtype}, the dtype of gate", "cast one")
    elif gate.shape[-1] % 2:
        found = f"{gate.shape[-1]} features"
        raise ModuleInputError(name, "gate", found, "an even number: gate and up", "pass both, side by side")


def _gated(
    module: FusedModule,
    biases: tuple[torch.Tensor, ...],
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    unsharded: Sequence[int] | None,
) -> torch.Tensor:
    _check(module, gate, up)
    whole = None if unsharded is None else (*unsharded[:-1], 1, unsharded[-1])
    if up is None:
        return module.run((gate, *biases), whole, _TOGETHER)[0]
    if not (gate.is_contiguous() or biases) and module.mesh is None:
        return laid_out(lambda a, b: module.run((a, b), None, _APART)[0], gate, up)
    return module.run((gate, up, *biases), whole, _APART)[0]


def _of(beside: int) -> Reshaped:
    """[..., features] as [..., beside, features / beside]: gate and up, or one of them, are a dim before the last."""
    return Reshaped(
        enter=lambda x: contiguous_view(x, *x.shape[:-1], beside, x.shape[-1] // beside),
        leave=lambda x: x.flatten(-2),
    )


_RESULT = Reshaped(enter=lambda x: x.unsqueeze(-2), leave=lambda x: x.squeeze(-2))
_TOGETHER, _APART = Shaping((_of(2),), (_RESULT,)), Shaping((_of(1), _of(1)), (_RESULT,))


def bind_gated(
    module: FusedModule,
    activation: Activation,
    at: TensorPlacement,
    tensors: Sequence[torch.Tensor],
    unsharded: Sequence[int] | None,
) -> FusedOp:
    """The fusions for (both), (gate, up), (both, biases...) or (gate, up, biases...) as ``_gated`` views them."""
    is_packed = len(tensors) % 2 == 1
    gate, biases = tensors[0], tensors[1:] if is_packed else tensors[2:]
    whole = None if unsharded is None else (*unsharded[:-2], unsharded[-1])
    last = gate.ndim - 2
    placement = at.resolve("input", last + 1).for_shape(module.mesh, whole)
    shards = tuple(last + 1 if d == last else d for d in placement.shards)
    for bias in biases:
        module.check_size("gate", gate.flatten(-2), -1, bias.shape[0] * gate.shape[-2])
    spec = GatedSpec(
        activation=activation,
        ndim=gate.ndim,
        is_packed=is_packed,
        mesh=module.mesh,
        mesh_id=id(module.mesh),
        placement=replace(placement, shards=shards),
        dtype=module.check_dtype("gate", gate),
        bias_dtype=module.check_dtype("gate_bias", biases[0]) if biases else None,
    )
    return gated_op(spec)


@dataclass(frozen=True, kw_only=True)
class GatedSpec(PlacedSpec):
    """All that the fusions depend on.

    The dim before the last holds gate and up (``is_packed``), or is 1, in ``ndim`` and in ``placement``.
    """

    activation: Activation
    is_packed: bool
    bias_dtype: DataType | None

    @property
    def other_dtypes(self) -> tuple[DataType | None, ...]:
        return (self.bias_dtype,)

    @property
    def bias(self) -> TensorPlacement:
        return self.placement.only(self.ndim - 1)

    def shape(self, beside: int) -> list[int]:
        """Of a tensor that has ``beside`` of gate and up."""
        return [*[-1] * (self.ndim - 2), beside, -1]


@lru_cache(maxsize=256)
def gated_op(spec: GatedSpec) -> FusedOp:
    """(gate, up[, biases]) or (both[, biases]) -> (result), of [..., 1, features]."""
    tensors = 2 - spec.is_packed
    biases = 2 * (spec.bias_dtype is not None)
    everything = tuple(range(tensors + biases))
    arguments = (*(spec.placement,) * tensors, *(spec.bias,) * biases)
    at = spec.placement
    return FusedOp(
        _forward(spec), _backward(spec), 1, everything, arguments, (at,), everything, follows=(0,), ones=(-2,)
    )


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
        d_up = fd.ops.mul(gradient, activated(fd, spec.activation, gate))
        d_gate = fd.ops.mul(fd.ops.mul(gradient, up), slope(fd, spec.activation, gate))
        found = [fd.ops.cast(d, dtype=spec.dtype) for d in (d_gate, d_up)]
        found = [fd.ops.cat(found, -2)] if spec.is_packed else found
        for d in found:
            give(fd, d, spec.mesh, spec.placement)
        if spec.bias_dtype is not None:
            rows = list(range(spec.ndim - 1))
            for d in (d_gate, d_up):
                give(fd, fd.ops.cast(fd.ops.sum(d, rows), dtype=spec.bias_dtype), spec.mesh, spec.bias)
    return fd


def _operands(fd: FusionDefinition, spec: GatedSpec) -> list[TensorView]:
    """Declare gate and up, and their biases, and add those: both in the compute dtype, [..., 1, features]."""
    if spec.is_packed:
        both = define(fd, spec.mesh, spec.placement, spec.shape(2), spec.dtype)
        ends: list[object] = [fd.ops.size(both, k) for k in range(spec.ndim)]
        parts: list[TensorView] = []
        for k in range(2):
            start = [0] * spec.ndim
            start[-2], ends[-2] = k, k + 1
            parts.append(fd.ops.slice(both, start, list(ends)))  # pyright: ignore[reportArgumentType]
    else:
        parts = [define(fd, spec.mesh, spec.placement, spec.shape(1), spec.dtype) for _ in range(2)]
    parts = [fd.ops.cast(part, dtype=spec.compute) for part in parts]
    if spec.bias_dtype is None:
        return parts
    biases = [define(fd, spec.mesh, spec.bias, [-1], spec.bias_dtype) for _ in range(2)]
    return [fd.ops.add(x, fd.ops.cast(b, dtype=spec.compute)) for x, b in zip(parts, biases, strict=True)]
