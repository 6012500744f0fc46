"""What the fusions of norms over channels share: their tensors' shapes, and vectors of a number for each channel."""

from __future__ import annotations

from dataclasses import dataclass

from ..frontend import FusionDefinition
from ..ir import DataType, TensorView
from .placed_spec import PlacedSpec
from .placement import TensorPlacement, define


@dataclass(frozen=True, kw_only=True)
class ChannelNormSpec(PlacedSpec):
    """What such fusions depend on.

    channel_dim: 1, or the last dim where the tensors are channels-last.  placement: of x, counted in these dims.
    weight_dtype, bias_dtype: None without a weight, or a bias.
    """

    channel_dim: int
    channels: int
    eps: float
    weight_dtype: DataType | None = None
    bias_dtype: DataType | None = None

    @property
    def other_dtypes(self) -> tuple[DataType | None, ...]:
        return self.weight_dtype, self.bias_dtype

    @property
    def vector_dtypes(self) -> list[DataType]:
        """Those of weight and bias that there are."""
        return [dtype for dtype in (self.weight_dtype, self.bias_dtype) if dtype is not None]

    @property
    def shape(self) -> list[int]:
        """Unsharded sizes of x."""
        sizes = [-1] * self.ndim
        sizes[self.channel_dim] = self.channels
        return sizes

    @property
    def vector(self) -> TensorPlacement:
        """Where one number for each channel lives."""
        return self.placement.only(self.channel_dim)

    @property
    def rows(self) -> list[int]:
        """The dims of a channel, which a parameter's gradient is summed over."""
        return [k for k in range(self.ndim) if k != self.channel_dim]


def affine(fd: FusionDefinition, unit: TensorView, weight: TensorView | None, bias: TensorView | None) -> TensorView:
    """``unit * weight + bias``, as far as there are such."""
    scaled = unit if weight is None else fd.ops.mul(unit, weight)
    return scaled if bias is None else fd.ops.add(scaled, bias)


def of_channels(fd: FusionDefinition, spec: ChannelNormSpec, dtype: DataType | None) -> TensorView | None:
    """A number for each channel, in the compute dtype and x's dims; None where there is no dtype."""
    if dtype is None:
        return None
    given = define(fd, spec.mesh, spec.vector, [spec.channels], dtype)
    flags = [k != spec.channel_dim for k in range(spec.ndim)]
    return fd.ops.broadcast(fd.ops.cast(given, dtype=spec.compute), flags)
