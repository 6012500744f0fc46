"""How a mask with a gradient is placed that is added to sharded scores: by its shape, ``mask=``, or as a DTensor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ..errors import PlacementError
from ..frontend.detection import has_dtensor
from .placement import TensorPlacement

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def of_dtensor(x: torch.Tensor, mask: torch.Tensor, at: TensorPlacement) -> TensorPlacement:
    """How a mask that is a DTensor is placed, by its own dims: as x, but whole along dims in which it is broadcast.

    at: where x lives, resolved.  Along a dim of which x has one element too, the mask may be sharded or whole.
    """
    before = x.ndim - mask.ndim
    given = cast("DTensor", mask).placements if has_dtensor((mask,)) else ()
    if len(given) != len(at.shards):  # refused where it is compared
        given = (None,) * len(at.shards)

    def cut(d: int | None, placed: Placement | None) -> int | None:
        if d is None or d < before:
            return None
        is_as_x = x.shape[d] == 1 and placed is not None and placed.is_shard(d - before)
        return d - before if mask.shape[d - before] != 1 or is_as_x else None

    shards = [cut(d, placed) for d, placed in zip(at.shards, given, strict=True)]
    return replace(at, shards=tuple(shards))


def in_dims_of_x(given: TensorPlacement, mask_ndim: int, at: TensorPlacement, ndim: int) -> TensorPlacement:
    """``given``, which a mask of ``mask_ndim`` dims has by its own dims, by the ``ndim`` dims of x.

    at: where x lives, resolved.  Raises PlacementError where a mesh dimension shards another dim of the mask than of x.
    """
    moved = with_leading_dims(given.resolve("mask", mask_ndim), ndim - mask_ndim)
    for own, other in zip(moved.shards, at.shards, strict=True):
        if own is not None and own != other:
            found = (f"Shard({own - ndim + mask_ndim})",)
            advice = "shard what x is sharded along, counted by the mask's own dims, or Replicate()"
            raise PlacementError("mask", found, f"x, of which that mesh dimension cuts dim {other}", advice)
    return moved


def with_leading_dims(placed: TensorPlacement, count: int) -> TensorPlacement:
    """The placement of the same tensor with ``count`` more dims in front."""
    return replace(placed, shards=tuple(None if d is None else d + count for d in placed.shards))


def with_mask(text: str, placed: TensorPlacement | None) -> str:
    """The settings ``text`` with this for mask=: of an entry that is there twice, the last holds.

    Joined by hand, as Dynamo does not trace json.
    """
    entry = "null" if placed is None else "[" + ",".join(f'"{letter}"' for letter in placed.letters()) + "]"
    return f'{text[:-1]},"mask":{entry}}}'
