"""Where a mask with a gradient lives that is added to sharded scores: its shape, ``mask=`` or a DTensor tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ..errors import PlacementError
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from .placement import TensorPlacement

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def uneven_dims(at: TensorPlacement, mesh: DeviceMesh | None, unsharded: Sequence[int] | None) -> frozenset[int]:
    """The dims that ``at`` (resolved) cuts into pieces of several sizes."""
    if mesh is None or unsharded is None:
        return frozenset()
    return frozenset(d for d in at.cut_dims if d < len(unsharded) and unsharded[d] % at.parts(mesh, d) != 0)


def shared_dims(at: TensorPlacement, mesh: DeviceMesh | None) -> frozenset[int]:
    """The dims that ``at`` (resolved) cuts over several ranks."""
    sizes = () if mesh is None else mesh.shape
    return frozenset(d for d, n in zip(at.shards, sizes, strict=True) if d is not None and n > 1)


def beside(x: torch.Tensor, mask: torch.Tensor, at: TensorPlacement) -> TensorPlacement:
    """Where a mask lives that is a DTensor, by its own dims: cut as x is, whole along dims in which it is broadcast.

    at: where x lives, resolved.  Along a dim that is one element of x too, the mask may be either.
    """
    before = x.ndim - mask.ndim
    given = cast("DTensor", mask).placements if has_dtensor((mask,)) else ()
    if len(given) != len(at.shards):  # refused where it is compared
        given = (None,) * len(at.shards)

    def cut(d: int | None, placed: Placement | None) -> int | None:
        if d is None or d < before:
            return None
        is_beside = x.shape[d] == 1 and placed is not None and placed.is_shard(d - before)
        return d - before if mask.shape[d - before] != 1 or is_beside else None

    shards = [cut(d, placed) for d, placed in zip(at.shards, given, strict=True)]
    return replace(at, shards=tuple(shards))


def by_dims_of_x(said: TensorPlacement, mask_ndim: int, at: TensorPlacement, ndim: int) -> TensorPlacement:
    """``said`` of a mask of ``mask_ndim`` dims, by the dims of x, of which there are ``ndim``.

    at: where x lives, resolved.  Raises PlacementError where a mesh dimension cuts the mask otherwise than x.
    """
    behind = behind_others(said.resolve("mask", mask_ndim), ndim - mask_ndim)
    for own, other in zip(behind.shards, at.shards, strict=True):
        if own is not None and own != other:
            found = (f"Shard({own - ndim + mask_ndim})",)
            advice = "shard what x is sharded along, counted by the mask's own dims, or Replicate()"
            raise PlacementError("mask", found, f"x, of which that mesh dimension cuts dim {other}", advice)
    return behind


def behind_others(placed: TensorPlacement, before: int) -> TensorPlacement:
    """Of the same tensor with ``before`` more dims in front."""
    return replace(placed, shards=tuple(None if d is None else d + before for d in placed.shards))


def with_mask(text: str, placed: TensorPlacement | None) -> str:
    """The settings ``text`` with another mask=, of which the last that is said holds.  Plain enough for Dynamo."""
    if placed is None:
        return f'{text[:-1]},"mask":null}}'
    said = ",".join(f'"{"R" if d is None else f"S{d}"}"' for d in placed.shards)
    return f'{text[:-1]},"mask":[{said}]}}'
