"""SwiGLU, the gate of a gated MLP, with its biases, on tensors that are whole or sharded over a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..arguments import checked
from ..errors import ModuleArgumentError
from ..mesh import DeviceMesh
from .gated import GatedUnit
from .parameters import ParameterKind, ParameterModule
from .placement import TensorPlacement
from .settings import Setting
from .shaping import laid_out

if TYPE_CHECKING:
    from .placement import Placements


@checked(ModuleArgumentError, ("__init__",))
class SwiGLU(GatedUnit, ParameterModule):
    """silu(gate [+ gate_bias]) * (up [+ up_bias]), element by element.

    features: unsharded size of the last axis; needed with ``bias`` only.
    mesh, input: on a mesh, where gate, up and the result live: Shard or Replicate, one or a sequence with one per mesh
    dimension.  ``Shard(-1)``, what column-parallel matmuls leave, cuts the biases too; row shards leave them whole,
    with gradients summed over ranks.  parameters: as of ``RMSNorm``.
    gate, up: [..., features] (local) in float64, float32, bfloat16 or float16, computed in float32 or float64.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Shazeer 2020.
    """

    family = "swiglu"
    features: Setting[int | None] = Setting()
    _activation = "silu"

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

    def settings(self) -> dict[str, object]:
        has_bias = self.gate_bias is not None
        return {"features": self.features, "bias": has_bias, "mesh": self.mesh, "input": self._input}

    def reset_parameters(self) -> None:
        """Biases to zero."""
        for bias in (self.gate_bias, self.up_bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)

<<<<<<< HEAD
    def forward(
        self, gate: torch.Tensor, up: torch.Tensor | None = None, *, unsharded: Sequence[int] | None = None
    ) -> torch.Tensor:
        """gate, up: [..., features] (local) of one dtype -> the same shape and dtype.

        Without ``up``, ``gate`` is both: [..., 2 * features] (local), what one matmul makes, this rank's part of the
        gate in the first half and of up in the second.  It is read in place, and its gradient comes as one tensor.
        ``unsharded``: the shape of gate as a whole, where local tensors are shards that differ in size.
        """
        if up is None:
            gate_bias, up_bias = self.parameter("gate_bias"), self.parameter("up_bias")
            biases = () if gate_bias is None or up_bias is None else (gate_bias, up_bias)
            return gated(self, "silu", self._input, gate, None, biases, unsharded)
        if self.is_decomposed():
            self._check(gate, up)
            if self._local_size is not None:
                self.check_size("gate", gate, -1, self._local_size)
            self.check_plain(gate=gate, gate_bias=self.gate_bias)
            return traced.gated("silu", gate, up, self.gate_bias, self.up_bias)
        if (type(gate) not in PLAIN or type(up) not in PLAIN) and has_dtensor((gate, up)):
            given = [Given("gate", gate, self._input), Given("up", up, self._input)]
            shape = self.unsharded_of(given)
            result = Result(shape, self._input, self._input)
            return on_local_tensors(partial(self._forward, unsharded=shape), self.mesh, given, [result])
        return self._forward(gate, up, unsharded=unsharded)

    def _forward(self, gate: torch.Tensor, up: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        if gate.ndim == 1 and up.ndim == 1:
            return self._forward(gate[None], up[None], unsharded=None if unsharded is None else (1, *unsharded))[0]
        gate_bias, up_bias = self.gate_bias, self.up_bias
        if not gate.is_contiguous() and gate_bias is None and up_bias is None and self.mesh is None:
            return laid_out(lambda a, b: self.run((a, b), None)[0], gate, up)
        tensors = (gate, up) if gate_bias is None or up_bias is None else (gate, up, gate_bias, up_bias)
        return self.run(tensors, unsharded)[0]

    def _check(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        self.check_same("up", up, "gate", gate.shape)
        if up.dtype != gate.dtype:
            raise ModuleInputError("SwiGLU", "up", f"dtype {up.dtype}", f"{gate.dtype}, the dtype of gate", "cast one")

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        if len(tensors) % 2:  # gate and up in one
            return bind_gated(self, "silu", self._input, tensors, unsharded)
        gate, up, *biases = tensors
        self._check(gate, up)
        placement = self._input.resolve("input", gate.ndim).for_shape(self.mesh, unsharded)
        if self._local_size is not None:
            self._check_features(gate, placement.only(gate.ndim - 1), has_biases=len(biases) > 0)
        spec = _Spec(
            ndim=gate.ndim,
            features=self.features,
            mesh=self.mesh,
            mesh_id=id(self.mesh),
            placement=placement,
            dtype=self.check_dtype("gate", gate),
            bias_dtype=self.check_dtype("gate_bias", biases[0]) if biases else None,
        )
        return _op(spec)

    def _check_features(self, gate: torch.Tensor, placement: TensorPlacement, *, has_biases: bool) -> None:
        """``placement``: of the last axis of ``gate``, which ``Shard(gate.ndim - 1)`` cuts as ``Shard(-1)`` does."""
        size = self._local_size
        if placement.shards != self._input.only(-1).shards:
            if has_biases:
                shard = f"Shard({gate.ndim - 1})"
                raise PlacementError(
                    "input", (shard,), "biases along the last axis", "shard the last axis as Shard(-1)"
                )
            assert self.features is not None, "a local size is of features"
            size = placement.local(self.mesh, torch.empty(self.features, device="meta")).shape[0]
        assert size is not None, "of features there is a local size"
        self.check_size("gate", gate, -1, size)

=======
>>>>>>> main
    def extra_repr(self) -> str:
        return f"features={self.features}, bias={self.gate_bias is not None}, mesh={self.mesh}"
