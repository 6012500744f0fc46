"""GroupNorm, with an activation after it, on images that are whole or sharded over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from ..arguments import checked
from ..errors import ModuleArgumentError, ModuleInputError, PlacementError
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from .channels import channels_last, channels_second, is_channels_last, placement_of_channels_last
from .dtensor import Given, Result, on_local_tensors
from .group_norm_fusions import GroupNormSpec, group_norm_op
from .parameters import ParameterKind, ParameterModule
from .placement import TensorPlacement

if TYPE_CHECKING:
    from .placement import Placements


@checked(ModuleArgumentError, ("__init__",))
class GroupNorm(ParameterModule):
    """(x - mean) * rsqrt(var + eps) * weight + bias over groups of channels, as torch.nn.GroupNorm, and an activation.

    activation: None or "silu", which is applied to the result in the same kernel.
    mesh, input: on a mesh, where x and the result live: Shard of the batch, of the channels (whole groups, as many on
    each rank; weight and bias are cut too) or of image dims, where a group's statistics are one exchange of a few
    numbers; or Replicate.  parameters: as of ``RMSNorm``.
    x: [batch, channels, ...] in float64, float32, bfloat16 or float16; channels-last images stay so.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Wu & He 2018.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        activation: Literal["silu"] | None = None,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        parameters: ParameterKind = "dtensor",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        placement = TensorPlacement.of("input", input, mesh)
        super().__init__(mesh, placement.only(1), parameters)
        if num_groups < 1:
            raise ModuleArgumentError("GroupNorm", "num_groups", num_groups, "1 or more")
        if num_channels < 1 or num_channels % num_groups:
            raise ModuleArgumentError("GroupNorm", "num_channels", num_channels, f"a multiple of {num_groups} groups")
        if not eps >= 0:
            raise ModuleArgumentError("GroupNorm", "eps", eps, "0 or more")
        if activation not in (None, "silu"):
            raise ModuleArgumentError("GroupNorm", "activation", activation, 'None or "silu"')
        if placement.is_partial:
            raise PlacementError("input", (input,), "a norm, which needs whole values", "pass Shard or Replicate")
        if any(d is not None and d < 0 for d in placement.shards):
            raise PlacementError("input", (input,), "[batch, channels, ...]", "count the sharded dim from the front")
        if num_groups % placement.parts(mesh, 1):
            against = f"{num_groups} groups, of which each rank has as many"
            raise PlacementError("input", (input,), against, "shard batch or image dims, or make other groups")
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        self.activation: Literal["silu"] | None = activation
        self._input = placement
        self.weight = self.make_parameter("weight", num_channels, 1.0, device, dtype) if affine else None
        self.bias = self.make_parameter("bias", num_channels, 0.0, device, dtype) if affine else None

    def reset_parameters(self) -> None:
        """Weight to one, bias to zero."""
        if self.weight is not None and self.bias is not None:
            torch.nn.init.ones_(self.weight)
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        """x: [batch, channels, ...] (local) -> the same shape, dtype and memory format.

        ``unsharded``: the shape of the whole x, where local tensors are shards that differ in size.
        """
        if has_dtensor((x,)):
            result = Result(tuple(x.shape), self._input, self._input)
            here = partial(self._forward, unsharded=tuple(x.shape))
            return on_local_tensors(here, self.mesh, [Given("x", x, self._input)], [result])
        return self._forward(x, unsharded=unsharded)

    def _forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        if x.ndim < 2:
            raise ModuleInputError("GroupNorm", "x", f"{x.ndim} dims", "2 or more", "pass [batch, channels, ...]")
        self.check_size("x", x, 1, self.num_channels // self._input.parts(self.mesh, 1))
        placement = self._input.resolve("input", x.ndim).for_shape(self.mesh, unsharded)
        affine = self.local_parameters(weight=self.weight, bias=self.bias)
        is_last = is_channels_last(x)
        if is_last:
            placement = placement_of_channels_last(placement, x.ndim)
            unsharded = None if unsharded is None else (unsharded[0], *unsharded[2:], unsharded[1])
        spec = GroupNormSpec(
            ndim=x.ndim,
            channel_dim=x.ndim - 1 if is_last else 1,
            groups=self.num_groups,
            channels=self.num_channels,
            eps=self.eps,
            activation=self.activation,
            mesh=self.mesh,
            mesh_id=id(self.mesh),
            placement=placement,
            dtype=self.check_dtype("x", x),
            affine_dtype=self.check_dtype("weight", affine[0]) if affine else None,
        )
        given = channels_last(x) if is_last else x
        result = group_norm_op(spec).apply(self.timer, unsharded, given, *affine)[0]
        return channels_second(result) if is_last else result

    def extra_repr(self) -> str:
        affine = f"eps={self.eps}, affine={self.affine}, activation={self.activation}"
        return f"{self.num_groups}, {self.num_channels}, {affine}, mesh={self.mesh}"
