"""SwiGLU, the gate of a gated MLP, with its biases, on tensors that are whole or sharded over a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..mesh import DeviceMesh
from .activation_functions import Activation
from .gated import GatedUnit
from .parameters import ParameterKind, ParameterModule
from .placement import TensorPlacement
from .settings import checked_module

if TYPE_CHECKING:
    from .placement import Placements


@checked_module
class SwiGLU(GatedUnit, ParameterModule):
    """SwiGLU of two tensors, or of one that holds both: silu(gate [+ gate_bias]) * (up [+ up_bias]).

    features: unsharded size of the last axis; needed with ``bias`` only.
    mesh, input: on a mesh, how gate, up and the result are placed: Shard or Replicate, one or a sequence with one per
    mesh dimension.  ``Shard(-1)``, what column-parallel matmuls leave, shards the biases too; where rows are sharded
    they are whole, with gradients summed over ranks.  parameters: as of ``RMSNorm``.
    gate, up: [..., features] (local) in float64, float32, bfloat16 or float16, computed in float32 or float64.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Shazeer 2020.
    """

    family = "swiglu"

    def __init__(
        self,
        features: int | None = None,
        bias: bool = False,
        *,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        parameters: ParameterKind = "dtensor",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        placement = TensorPlacement.of_whole_values("input", input, mesh, "SwiGLU")
        super().__init__(mesh, placement.only(-1), parameters)
        self.features, self._input = features, placement
        is_said = features is not None or not bias
        self.check_argument("features", features, is_said, "the unsharded size, which bias=True needs")
        self.check_argument("features", features, features is None or features >= 1, "1 or more")
        self.gate_bias: torch.nn.Parameter | None = None
        self.up_bias: torch.nn.Parameter | None = None
        if features is not None and bias:
            self.gate_bias = self.make_parameter("gate_bias", features, 0.0, device, dtype)
            self.up_bias = self.make_parameter("up_bias", features, 0.0, device, dtype)
        self.describe()

    @property
    def activation(self) -> Activation:
        return "silu"

    def settings(self) -> dict[str, object]:
        has_bias = self.gate_bias is not None
        return {"features": self.features, "bias": has_bias, "mesh": self.mesh, "input": self._input}

    def reset_parameters(self) -> None:
        """Biases to zero."""
        for bias in (self.gate_bias, self.up_bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        return f"features={self.features}, bias={self.gate_bias is not None}, mesh={self.mesh}"
