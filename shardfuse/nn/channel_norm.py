"""Norms over channels, of images whose channels may come last in memory: they are read as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .parameters import ParameterModule
from .placement import TensorPlacement
from .settings import Setting
from .twins import TwinnedModule


class ChannelNorm(TwinnedModule, ParameterModule):
    """What norms of [batch, channels, ...] share; where ``is_last``, of [batch, ..., channels]."""

    eps: Setting[float] = Setting()
    affine: Setting[bool] = Setting()
    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None
    _input: TensorPlacement
    is_last = False
    twin_flag = "is_last"
    vectors = ("weight", "bias")

    def make_affine(
        self, channels: int, affine: bool, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Weight and bias, where there are such."""
        self.affine = affine
        for name, start, is_there in (("weight", 1.0, affine), ("bias", 0.0, affine and bias)):
            made = self.make_parameter(name, channels, start, device, dtype) if is_there else None
            self.register_parameter(name, made)

    def reset_parameters(self) -> None:
        """Weight to one, bias to zero."""
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def run_images(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> Sequence[torch.Tensor]:
        """``run`` on [batch, channels, ...] and vectors, and on images as they are stored: results keep that layout."""
        x, *vectors = tensors
        if not is_channels_last(x, is_piece=self.mesh is not None):
            return self.run(tensors, unsharded)
        if unsharded is not None and not torch.compiler.is_compiling():
            self.check_sizes(unsharded, x)
        if self._some_piece_is_both(unsharded):
            results = self.run(tensors, unsharded)
            kept = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
            return [results[0].contiguous(memory_format=kept), *results[1:]]
        whole = None if unsharded is None else (unsharded[0], *unsharded[2:], unsharded[1])
        given = (channels_last(x), *vectors)
        if torch.compiler.is_compiling():
            local = [self.traced(t) for t in given]
            results = self.library_op(local, self.twin_text, None if whole is None else list(whole))
        else:
            results = (self._twins.get(()) or self.twin()).run(given, whole)
        return [channels_second(results[0]), *results[1:]]

    def _some_piece_is_both(self, unsharded: Sequence[int] | None) -> bool:
        """Has some rank a piece whose strides are those of both memory formats: empty, of one channel, or of one pixel?

        It cannot tell from its piece which format the other ranks have: all read theirs with the channels second.
        """
        if self.mesh is None or unsharded is None:  # pieces of one shape tell all ranks alike
            return False
        placement = self._input.resolve("input", len(unsharded))
        if not placement.cuts_unevenly(self.mesh, unsharded):
            return False
        smallest = placement.smallest_shape(self.mesh, unsharded)
        # not `0 in smallest`: Dynamo does not find it among symbolic sizes
        return any(n == 0 for n in smallest) or smallest[1] == 1 or all(n == 1 for n in smallest[2:])

    def placed(self, placement: TensorPlacement, ndim: int, unsharded: Sequence[int] | None) -> TensorPlacement:
        """``placement`` of [batch, channels, ...] for tensors as ``bind`` has them, of these unsharded sizes."""
        resolved = placement.resolve("input", ndim)
        moved = placement_of_channels_last(resolved, ndim) if self.is_last else resolved
        return moved.for_shape(self.mesh, unsharded)


def is_channels_last(x: torch.Tensor, *, is_piece: bool) -> bool:
    """Are [batch, channels, ...] of four or five dims stored with the channels last, maybe as a part of such images?

    As torch tells it, which keeps that order.
    is_piece: a batch of one may have any stride, which addresses nothing: of a DTensor's piece torch writes another one
    than of several images, which other ranks may have.
    """
    if x.ndim not in (4, 5) or x.is_contiguous():
        return False
    strides, least = x.stride(), 0
    for dim in (1, *reversed(range(2, x.ndim)), 0):
        size, stride = x.shape[dim], strides[dim]
        if is_piece and dim == 0 and size == 1:
            break
        if size == 0 or stride < max(least, 1 if dim == 1 else 0) or (dim == 0 and least == strides[1]):
            return False
        least = stride * max(size, 1)
    return True


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """[batch, channels, ...] as [batch, ..., channels], a view."""
    return x.permute(0, *range(2, x.ndim), 1)


def channels_second(x: torch.Tensor) -> torch.Tensor:
    """[batch, ..., channels] as [batch, channels, ...], a view."""
    return x.permute(0, x.ndim - 1, *range(1, x.ndim - 1))


def placement_of_channels_last(placement: TensorPlacement, ndim: int) -> TensorPlacement:
    """Where a tensor of [batch, channels, ...] lives, in the dims of ``channels_last``."""
    moved = {0: 0, 1: ndim - 1, **{k: k - 1 for k in range(2, ndim)}}
    return replace(placement, shards=tuple(None if d is None else moved[d] for d in placement.shards))
