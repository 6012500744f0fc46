"""The shapes of a fusion's local outputs, of sizes that may be symbolic: all that a compiler knows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..allocation.global_sizes import origin
from ..analysis.extents import equal_extents
from ..ir import TensorView
from ..ir.domain import IterDomain
from ..ir.fusion import Fusion
from .placement import TensorPlacement


@dataclass(frozen=True)
class OutputShapes:
    """Local shapes of the outputs of ``fusion``, each of whose symbolic axes is as long as one of an input."""

    fusion: Fusion
    placements: tuple[TensorPlacement, ...]
    """Where each input lives, its dims counted from the front."""
    follows: tuple[int, ...] = ()
    """For each output the input as whose dims, one by one, those of its axes are that were cut or regrouped."""
    ones: tuple[int, ...] = ()
    """Dims of which every output has one element, though the input that it follows has more."""

    def empty(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> list[torch.Tensor]:
        """Outputs without values, contiguous, for local ``tensors``.

        ``unsharded``: sizes of the activations, where the local ones do not tell them.
        """
        classes = equal_extents(self.fusion)
        sizes = self._sizes(classes, tensors, unsharded)
        outputs: list[torch.Tensor] = []
        inputs = [i.val for i in self.fusion.inputs if isinstance(i.val, TensorView)]
        for at, tv in enumerate(self.fusion.outputs):
            like = inputs[self.follows[at]] if self.follows else tv
            whole: list[int] = []
            for k, (axis, n) in enumerate(zip(tv.domain.logical, tv.shape, strict=True)):
                if n < 0 and classes[axis] not in sizes:  # no op says of which input's axis it is
                    n, axis = 1 if k - tv.ndim in self.ones else like.shape[k], like.domain.logical[k]
                whole.append(n if n >= 0 else sizes[classes[axis]])
            shape = _placement_of(tv).local_shape(tv.domain.mesh, whole)
            outputs.append(tensors[0].new_empty(shape, dtype=tv.dtype.torch))
        return outputs

    def _sizes(
        self,
        classes: Mapping[IterDomain, IterDomain],
        tensors: Sequence[torch.Tensor],
        unsharded: Sequence[int] | None,
    ) -> dict[IterDomain, int]:
        """The unsharded size of each class of axes that an input has."""
        sizes: dict[IterDomain, int] = {}
        inputs = [i.val for i in self.fusion.inputs if isinstance(i.val, TensorView)]
        for tv, local, placement in zip(inputs, tensors, self.placements, strict=True):
            for k, n in enumerate(local.shape):
                axis, declared = tv.domain.logical[k + placement.leading], tv.shape[k + placement.leading]
                if declared >= 0:
                    continue
                # As where a fusion is run: the sizes that inputs leave open are those of the activations' last dims.
                whole = n * placement.parts(tv.domain.mesh, k) if unsharded is None else unsharded[k - local.ndim]
                sizes.setdefault(classes[axis], whole)
        return sizes


def _placement_of(tv: TensorView) -> TensorPlacement:
    """Where a fusion's output lives, as the definition says."""
    domain = tv.domain
    if domain.mesh is None:
        return TensorPlacement()
    axes = domain.mesh_axes()
    cut = [origin(domain, axes[p]) if p in axes else None for p in domain.mesh.parallel_types]
    shards = tuple(None if axis is None else domain.logical.index(axis) for axis in cut)
    return TensorPlacement(shards, (False,) * len(shards))
