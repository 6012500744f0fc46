"""GroupNorm, with an activation after it, on images that are whole or sharded over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import ModuleInputError, PlacementError
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from . import traced
from .channel_norm import ChannelNorm
from .fused import PLAIN, FusedOp
from .group_norm_fusions import GroupNormSpec, group_norm_op
from .parameters import ParameterKind
from .placement import TensorPlacement
from .settings import Setting, checked_module

if TYPE_CHECKING:
    from .placement import Placements


@checked_module
class GroupNorm(ChannelNorm):
    """GroupNorm, as torch.nn.GroupNorm, with an activation in the same kernel.

    y = (x - mean) * rsqrt(var + eps) * weight + bias, with statistics of each group of channels.

    bias: whether there is a bias where there is a weight.  affine=False has neither.
    activation: None or "silu", which is applied to the result in the same kernel.
    mesh, input: on a mesh, how x and the result are placed: Shard of the batch, of the channels (whole groups, as many
    on each rank; weight and bias are sharded too) or of image dims, where a group's statistics are one exchange of a
    few numbers; or Replicate.  parameters: as of ``RMSNorm``.
    x: [batch, channels, ...] in float64, float32, bfloat16 or float16; channels-last images stay so.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Wu & He 2018.
    """

    family = "group_norm"
    num_groups: Setting[int] = Setting()
    num_channels: Setting[int] = Setting()
    checked_in_calls = frozenset({"num_channels"})
    activation: Setting[Literal["silu"] | None] = Setting()
    _with_silu: GroupNorm | None = None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: Literal["silu"] | None = None,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        parameters: ParameterKind = "dtensor",
    ) -> None:
        placement = TensorPlacement.of_whole_values("input", input, mesh, "a norm")
        super().__init__(mesh, placement.only(1), parameters)
        self.check_argument("num_groups", num_groups, num_groups >= 1, "1 or more")
        are_whole = num_channels >= 1 and num_channels % num_groups == 0
        self.check_argument("num_channels", num_channels, are_whole, f"a multiple of {num_groups} groups")
        self.check_eps(eps)
        self.check_argument("activation", activation, activation in (None, "silu"), 'None or "silu"')
        if any(d is not None and d < 0 for d in placement.shards):
            raise PlacementError("input", (input,), "[batch, channels, ...]", "count the sharded dim from the front")
        if num_groups % placement.parts(mesh, 1):
            against = f"{num_groups} groups, of which each rank has as many"
            raise PlacementError("input", (input,), against, "shard batch or image dims, or make other groups")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.activation, self._input = activation, placement
        self.make_affine(num_channels, affine, bias, device, dtype)
        self.describe()

    def describe(self) -> None:
        self.__dict__["_with_silu"] = None
        super().describe()

    def with_silu(self) -> GroupNorm:
        """The same norm with ``activation="silu"``, which has the parameters of this one and is no child of it."""
        made = self._with_silu
        if made is None:
            with torch.no_grad():
                made = self.made_again({**self.settings(), "activation": "silu"})
            made.timer, made.promises = self.timer, self.promises
            made.__dict__.update(_parameters=self._parameters, made_at=self.made_at)
            self.__dict__["_with_silu"] = made
        return made

    def settings(self) -> dict[str, object]:
        sizes = {"num_groups": self.num_groups, "num_channels": self.num_channels, "eps": self.eps}
        options = {"given": " ".join(self.given), "activation": self.activation}
        return {**sizes, **options, "mesh": self.mesh, "input": self._input}

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        """x: [batch, channels, ...] (local) -> the same shape, dtype and memory format.

        ``unsharded``: the shape of the whole x, where local tensors are shards that differ in size.
        """
        if self.is_decomposed():
            self._check(x, 1)
            self.check_plain(x=x, weight=self.weight, bias=self.bias)
            self._check_count(x.shape)
            return traced.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, self.activation)
        if type(x) not in PLAIN and has_dtensor((x,)):
            return self.on_dtensor(self._forward, x, self._input, unsharded)
        return self._forward(x, unsharded=unsharded)

    def _forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        return self.run_images((x, *self.vectors_here()), unsharded)[0]

    def _check(self, x: torch.Tensor, channel_dim: int) -> None:
        if x.ndim < 2:
            raise ModuleInputError("GroupNorm", "x", f"{x.ndim} dims", "2 or more", "pass [batch, channels, ...]")
        are_whole = self.num_channels % self.num_groups == 0
        self.check_argument("num_channels", self.num_channels, are_whole, f"a multiple of {self.num_groups} groups")
        self.check_size("x", x, channel_dim, self.num_channels // self._input.parts(self.mesh, 1))

    def _check_count(self, sizes: Sequence[int]) -> None:
        """torch refuses one sample of groups of one element, whose variance says nothing."""
        if prod(sizes) == self.num_groups:  # a torch.Size would make numbers of a graph's symbols
            found = f"shape {tuple(sizes)}, one value per group"
            raise ModuleInputError("GroupNorm", "x", found, "more", "pass more, or make fewer groups")

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        x, *vectors = tensors
        channel_dim = x.ndim - 1 if self.is_last else 1
        self._check(x, channel_dim)
        placement = self.placed(self._input, x.ndim, unsharded)
        parts = [n * placement.parts(self.mesh, k) for k, n in enumerate(x.shape)]
        self._check_count(parts if unsharded is None else unsharded)
        spec = GroupNormSpec(
            ndim=x.ndim,
            channel_dim=channel_dim,
            groups=self.num_groups,
            channels=self.num_channels,
            eps=self.eps,
            activation=self.activation,
            mesh=self.mesh,
            placement=placement,
            dtype=self.check_dtype("x", x),
            **self.vector_dtypes(vectors, x.shape[channel_dim]),
        )
        return group_norm_op(spec)

    def extra_repr(self) -> str:
        affine = f"eps={self.eps}, affine={self.affine}, bias={self.bias is not None}, activation={self.activation}"
        return f"{self.num_groups}, {self.num_channels}, {affine}, mesh={self.mesh}"
