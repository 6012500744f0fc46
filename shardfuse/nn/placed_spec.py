"""What fusions of modules depend on whose activations all live in one place."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import DataType
from ..mesh import DeviceMesh
from .placement import TensorPlacement


@dataclass(frozen=True, kw_only=True)
class PlacedSpec:
    """Fusions are kept by it.  ``mesh_id``: fusions are bound to the process groups of one mesh object.

    ndim, placement, dtype: of the activations.
    """

    ndim: int
    mesh: DeviceMesh | None
    mesh_id: int
    placement: TensorPlacement
    dtype: DataType

    @property
    def other_dtypes(self) -> tuple[DataType | None, ...]:
        """Of tensors that are computed with beside the activations; None for those that there are not."""
        return ()

    @property
    def compute(self) -> DataType:
        """float32, or float64 where a tensor is."""
        return DataType.Double if DataType.Double in (self.dtype, *self.other_dtypes) else DataType.Float
