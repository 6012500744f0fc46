"""What the fusions of modules depend on: all that one pair of them is kept by."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir import DataType
from ..mesh import DeviceMesh
from .placement import WHOLE, TensorPlacement


@dataclass(frozen=True, kw_only=True)
class FusionSpec:
    """ndim, dtype: of the activations.  mesh_id: fusions are bound to the process groups of one mesh object."""

    ndim: int
    dtype: DataType
    mesh: DeviceMesh | None = None
    mesh_id: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_id", id(self.mesh))

    @property
    def other_dtypes(self) -> tuple[DataType | None, ...]:
        """Of tensors that are computed with beside the activations; None for those that there are not."""
        return ()

    @property
    def compute(self) -> DataType:
        """float32, or float64 where a tensor is."""
        return DataType.Double if DataType.Double in (self.dtype, *self.other_dtypes) else DataType.Float


@dataclass(frozen=True, kw_only=True)
class PlacedSpec(FusionSpec):
    """Of activations that all live in one place, whole unless it is said."""

    placement: TensorPlacement = WHOLE
