"""GELU, element by element, on tensors that are whole or sharded over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import ModuleArgumentError
from ..frontend import FusionDefinition
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from . import traced
from .activation_functions import Activation, activated, slope
from .fused import PLAIN, FusedModule, FusedOp
from .placed_spec import PlacedSpec
from .placement import TensorPlacement, define, give
from .settings import Setting, checked_module
from .shaping import laid_out

if TYPE_CHECKING:
    from .placement import Placements

Approximation = Literal["none", "tanh"]


def gelu_activation(module: str, approximate: Approximation) -> Activation:
    """torch's ``approximate`` as one of the activations.  Raises ModuleArgumentError."""
    if approximate not in ("none", "tanh"):
        raise ModuleArgumentError(module, "approximate", approximate, '"none" or "tanh"')
    return "gelu" if approximate == "none" else "gelu_tanh"


class OfGelu(FusedModule):
    """What GELU and GeGLU share: arguments and settings."""

    approximate: Setting[Approximation] = Setting()

    def __init__(
        self, approximate: Approximation = "none", *, mesh: DeviceMesh | None = None, input: Placements | None = None
    ) -> None:
        super().__init__()
        name = type(self).__name__
        gelu_activation(name, approximate)
        self.approximate, self.mesh = approximate, mesh
        self._input = TensorPlacement.of_whole_values("input", input, mesh, name)
        self.describe()

    @property
    def activation(self) -> Activation:
        """Which of the two, by the name that fusions have for it."""
        return gelu_activation(type(self).__name__, self.approximate)

    def settings(self) -> dict[str, object]:
        return {"approximate": self.approximate, "mesh": self.mesh, "input": self._input}

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


@checked_module
class GELU(OfGelu):
    """GELU, as torch.nn.GELU: x times the share of a standard normal distribution below x.

    approximate: "none", or "tanh" for the approximation by a hyperbolic tangent.
    mesh, input: on a mesh, how x and the result are placed: Shard or Replicate; nothing is sent.
    x: any shape, in float64, float32, bfloat16 or float16, computed in float32 or float64.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Hendrycks & Gimpel 2016.
    """

    family = "gelu"

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        """x: any shape (local) -> the same shape and dtype.

        ``unsharded``: its shape as a whole, where local tensors are shards that differ in size.
        """
        if self.is_decomposed():
            self.check_plain(x=x)
            return traced.activation(self.activation, x)
        if type(x) not in PLAIN and has_dtensor((x,)):
            return self.on_dtensor(self._forward, x, self._input, unsharded)
        return self._forward(x, unsharded=unsharded)

    def _forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        if x.is_contiguous() or self.mesh is not None:
            return self.run((x,), unsharded)[0]
        return laid_out(lambda given: self.run(given, None), x)

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        (x,) = tensors
        placement = self._input.resolve("input", x.ndim).for_shape(self.mesh, unsharded)
        spec = ActivationSpec(
            activation=self.activation,
            ndim=x.ndim,
            mesh=self.mesh,
            placement=placement,
            dtype=self.check_dtype("x", x),
        )
        return activation_op(spec)


@dataclass(frozen=True, kw_only=True)
class ActivationSpec(PlacedSpec):
    """All that the fusions depend on."""

    activation: Activation


@lru_cache(maxsize=256)
def activation_op(spec: ActivationSpec) -> FusedOp:
    """(x) -> (activated)."""
    at = spec.placement
    with FusionDefinition() as forward:
        x = forward.ops.cast(define(forward, spec.mesh, at, [-1] * spec.ndim, spec.dtype), dtype=spec.compute)
        give(forward, forward.ops.cast(activated(forward, spec.activation, x), dtype=spec.dtype), spec.mesh, at)
    with FusionDefinition() as backward:
        gradient, x = (
            backward.ops.cast(define(backward, spec.mesh, at, [-1] * spec.ndim, spec.dtype), dtype=spec.compute)
            for _ in range(2)
        )
        d_x = backward.ops.mul(gradient, slope(backward, spec.activation, x, spec.dtype))
        give(backward, backward.ops.cast(d_x, dtype=spec.dtype), spec.mesh, at)
    return FusedOp(forward, backward, 1, (0,), (at,), (at,), (0,))
