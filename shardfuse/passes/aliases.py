"""Outputs that replace an input: they have its shape, and live where it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ShapeError, ShardingError
from ..ir.digits import extent
from ..ir.expr import BoundFusion, BoundTensor
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView
from .recorded_domains import bound_domain


def settle_aliases(fusion: Fusion, tensors: Mapping[TensorView, BoundTensor]) -> None:
    """An output about which nothing was said is sharded as the input that it replaces.

    Raises ``ShardingError`` where it was said to be sharded otherwise.
    """
    for tv, source in fusion.aliases.items():
        out, mesh = tensors[tv], source.domain.mesh
        if mesh is None or _shape(out) != _shape(tensors[source]):
            continue
        wanted = bound_domain(source, out)
        if tv.domain.mesh is None:
            out.domain = replace(out.domain, mesh=mesh, sharding=wanted.sharding)
            continue
        is_same_mesh = (tv.domain.mesh.ranks, tv.domain.mesh.shape) == (mesh.ranks, mesh.shape)
        if not is_same_mesh or out.domain.sharding != wanted.sharding:
            raise ShardingError(
                f"{tv!r} on {tv.domain.mesh}", f"it replaces {source!r} on {mesh}", "which is sharded otherwise",
                f"shard both alike, or say nothing of {tv.name}",
            )  # fmt: skip


def check_replaced_shapes(fusion: BoundFusion) -> None:
    """Raises ``ShapeError`` where an output replaces an input of another shape."""
    for out, source in fusion.aliases.items():
        if _shape(out) != _shape(source):
            raise ShapeError(
                "add_output", f"{out.name} of {_shape(out)} to replace {source.name} of {_shape(source)}",
                "the shape of the input", "give it that shape, or return it",
            )  # fmt: skip


def _shape(tensor: BoundTensor) -> list[int]:
    return [extent(axis) for axis in tensor.domain.logical]
