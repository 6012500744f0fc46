"""Softmax and its logarithm, scaled and masked, on tensors that are whole or sharded over a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Never

import torch

from ..errors import ModuleInputError
from ..frontend import FusionDefinition
from ..frontend.detection import has_dtensor
from ..ir import DataType, TensorView
from ..mesh import DeviceMesh
from . import traced
from .dtensor_autograd import Given, Result, on_local_tensors
from .fused import PLAIN, FusedOp
from .mask_placement import in_dims_of_x, of_dtensor, with_leading_dims, with_mask
from .placed_spec import PlacedSpec
from .placement import TensorPlacement, define, give
from .settings import Setting, checked_module
from .twins import TwinnedModule

if TYPE_CHECKING:
    from .placement import Placements


class _Softmax(TwinnedModule):
    """What the two share."""

    _is_log = False
    dim: Setting[int] = Setting()
    scale: Setting[float] = Setting()
    _mask: TensorPlacement | None = None
    learns_mask = False
    """Has an added mask a gradient?"""
    twin_flag = "learns_mask"

    def __init__(
        self,
        dim: int = -1,
        scale: float = 1.0,
        *,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        mask: Placements | None = None,
    ) -> None:
        super().__init__()
        self.check_argument("scale", scale, math.isfinite(scale), "a finite number")
        self.dim, self.scale, self.mesh = dim, scale, mesh
        self._input = TensorPlacement.of_whole_values("input", input, mesh, type(self).__name__)
        said = TensorPlacement.of_whole_values("mask", mask, mesh, type(self).__name__)
        self._mask = None if mask is None else said
        self.describe()

    def settings(self) -> dict[str, object]:
        return {"dim": self.dim, "scale": self.scale, "mesh": self.mesh, "input": self._input, "mask": self._mask}

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, unsharded: Sequence[int] | None = None
    ) -> torch.Tensor:
        """x: at least one dim on a mesh (local) -> the same shape and dtype.

        mask: of a shape that broadcasts to x's, local as x is: of bool, True where an element takes part; or of a
        floating dtype, added to ``scale * x``, with a gradient where it requires one.  Where no element of a row takes
        part, its result is NaN and its gradient 0, as of torch's masked_fill.  One that requires a gradient, and has
        one element along a dim of which x has one on each rank, is placed as ``mask=`` of the module says.
        unsharded: x's shape as a whole, where local tensors are shards that differ in size.
        """
        if self.is_decomposed():
            self._check(x, mask)
            return traced.softmax(x, mask, self.dim, self.scale, is_log=self._is_log)
        if type(x) not in PLAIN and has_dtensor((x,)):
            given, shape = [Given("x", x, self._input)], tuple(x.shape)
            self.check_said(unsharded, shape, "x")
            if mask is not None:
                self._check(x, mask)
                placed = of_dtensor(x, mask, self._input.resolve("input", x.ndim))
                if self._wants_sum_of_shards(x, mask, placed):
                    self._refuse_gradient()
                given.append(Given("mask", mask, placed))
                here = partial(self._forward, unsharded=shape, placed=with_leading_dims(placed, x.ndim - mask.ndim))
            else:
                here = partial(self._forward, unsharded=shape)
            return on_local_tensors(here, self.mesh, given, [Result(shape, self._input, self._input)])
        return self._forward(x, mask, unsharded=unsharded)

    def _forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        unsharded: Sequence[int] | None,
        placed: TensorPlacement | None = None,
    ) -> torch.Tensor:
        """placed: how the mask is placed, by the dims of x, where it was a DTensor."""
        if x.ndim == 0 and self.mesh is None and self.dim in (-1, 0):  # a row of one element, as torch has it
            mask_of_row = mask if mask is None or mask.ndim else mask[None]
            self._check(x, mask)
            return self._forward(x[None], mask_of_row, unsharded=None)[0]
        if x.numel() == 0 and self._is_of_nothing(x, unsharded):
            self._check(x, mask)
            if mask is not None and _learns(mask):  # whose gradient is zeros, not none
                x = x + mask.to(x.dtype)
            return torch.log_softmax(x, self.dim) if self._is_log else torch.softmax(x, self.dim)
        if mask is None:
            return self.run((x,), unsharded)[0]
        if mask.ndim > x.ndim or has_dtensor((mask,)):
            self._check(x, mask)
        learns, given_dims = _learns(mask), mask.ndim
        mask = (mask if learns else mask.detach())[(None,) * (x.ndim - mask.ndim)]
        where = self._mask_placed(x, mask, given_dims, unsharded, placed) if learns else None
        cut = self._masked_in_full(x, unsharded)
        if any(mask.shape[d] == 1 != x.shape[d] for d in cut):
            self._check(x, mask)
            if learns and self.mesh is not None:
                self._refuse_gradient()
            mask = mask.expand([x.shape[d] if d in cut else n for d, n in enumerate(mask.shape)])
        if not learns:
            return self.run((x, mask), unsharded)[0]
        if torch.compiler.is_compiling():  # Dynamo would trace how the twin is made
            text = with_mask(self.twin_text, where)
            return self.library_op([x, mask], text, None if unsharded is None else list(unsharded))[0]
        return self.twin(mask=where).run((x, mask), unsharded)[0]

    def _mask_placed(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        given_dims: int,
        unsharded: Sequence[int] | None,
        placed: TensorPlacement | None,
    ) -> TensorPlacement | None:
        """How a mask with a gradient is placed, by the dims of x; None where its shape tells.

        mask: with as many dims as x, of which it was given the last ``given_dims``.  placed: as its DTensor says.
        Raises PlacementError and ModuleInputError, on all ranks alike.
        """
        if self.mesh is None:
            return None
        at, before = self._input.resolve("input", x.ndim), x.ndim - given_dims
        if placed is None and self._mask is not None:
            placed = in_dims_of_x(self._mask, given_dims, at, x.ndim)
        if placed is not None and unsharded is not None:  # all ranks' sizes decide, not this one's
            whole = [d for d in at.uneven_dims(self.mesh, unsharded) if d not in placed.cut_dims]
            if any(mask.shape[d] == 1 != unsharded[d] for d in whole):
                self._refuse_gradient()
        ambiguous = [d for d in self._single_dims(x, mask, unsharded) if d >= before]  # before: no dim of the mask
        if ambiguous and placed is None:
            found = "one element along a dim of which x has one on each rank, and a gradient that is wanted"
            advice = "make the module with mask=, how the mask is placed, or pass DTensors"
            raise ModuleInputError(type(self).__name__, "mask", found, "to be told whether ranks share it", advice)
        return placed if ambiguous else None

    def _single_dims(self, x: torch.Tensor, mask: torch.Tensor, unsharded: Sequence[int] | None) -> list[int]:
        """Sharded dims of which x and the mask have one element on each rank: the same of the mask on all, or not.

        mask: with as many dims as x.
        """
        at, full = self._input.resolve("input", x.ndim), self._masked_in_full(x, unsharded)
        cut = [d for d in at.cut_dims if at.parts(self.mesh, d) > 1 and d not in full]
        return [d for d in cut if x.shape[d] == 1 == mask.shape[d]]

    def _wants_sum_of_shards(self, x: torch.Tensor, mask: torch.Tensor, beside: TensorPlacement) -> bool:
        """Is the gradient of a DTensor, the mask, a sum over shards of x?  All ranks answer alike."""
        before, cut = x.ndim - mask.ndim, self._masked_in_full(x, x.shape)
        at = self._input.resolve("input", x.ndim)
        pieces = {d for d, own in zip(at.shards, beside.shards, strict=True) if d is not None and own is None}
        ones = {d for d in cut if d < before or mask.shape[d - before] == 1}
        return _learns(mask) and any(x.shape[d] != 1 or d in pieces for d in ones)

    def _refuse_gradient(self) -> Never:
        found = "one element along a dim whose shards differ in size, or whose rows are promised their bits in any "
        found += "batch, and a gradient that is wanted"
        expected = "a mask as long as x along that dim"
        advice = "expand it and place it as x is, or pass mask.detach() where it learns nothing"
        raise ModuleInputError(type(self).__name__, "mask", found, expected, advice)

    def _is_of_nothing(self, x: torch.Tensor, unsharded: Sequence[int] | None) -> bool:
        """Has ``dim`` no element on any rank?  Of a piece that is alone in its call this rank cannot tell."""
        if not -x.ndim <= self.dim < x.ndim or x.shape[self.dim]:
            return False
        sizes = () if self.mesh is None else self.mesh.shape
        shards = self._input.resolve("x", x.ndim).shards
        is_cut = any(n > 1 and d == self.dim % x.ndim for n, d in zip(sizes, shards, strict=False))
        return not is_cut or (unsharded is not None and len(unsharded) == x.ndim and unsharded[self.dim] == 0)

    def _masked_in_full(self, x: torch.Tensor, unsharded: Sequence[int] | None) -> frozenset[int]:
        """Dims of which a piece of one element may be all of a mask's or one of many: there, masks are as long as x.

        So are those of rows that are promised the same bits in any batch: one of a single row may be that row's own.
        """
        rows: frozenset[int] = frozenset()
        if self.promises is not None and self.promises.batch:
            rows = frozenset(range(x.ndim)) - {self.dim % x.ndim}
        if self.mesh is None or unsharded is None:
            return rows
        return rows.union(self._input.resolve("input", x.ndim).uneven_dims(self.mesh, unsharded))

    def _check(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        name = type(self).__name__
        self.check_plain(x=x, mask=None if mask is None or mask.dtype is torch.bool else mask)
        dims = x.ndim or int(self.mesh is None)
        if not -dims <= self.dim < dims:
            raise ModuleInputError(name, "x", f"{x.ndim} dims", f"a dim {self.dim}", "pass another dim=")
        if mask is not None and has_dtensor((mask,)) and not has_dtensor((x,)):
            raise ModuleInputError(
                name, "mask", "a DTensor", "this rank's local tensor, as x is", "pass mask.to_local()"
            )
        if mask is not None and (
            mask.ndim > x.ndim
            or any(n not in (1, size) for n, size in zip(mask.shape[::-1], x.shape[::-1], strict=False))
        ):
            found, expected = f"shape {tuple(mask.shape)}", f"one that broadcasts to {tuple(x.shape)}"
            raise ModuleInputError(name, "mask", found, expected, "pass this rank's part of it")

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        x, *masks = tensors
        self._check(x, masks[0] if masks else None)
        spec = SoftmaxSpec(
            ndim=x.ndim,
            dim=self.dim % x.ndim,
            is_log=self._is_log,
            scale=self.scale,
            mesh=self.mesh,
            placement=self._input.resolve("input", x.ndim).for_shape(self.mesh, unsharded),
            dtype=self.check_dtype("x", x),
            mask_dtype=DataType.from_torch(masks[0].dtype) if masks else None,
            mask_shape=self._mask_shape(x, masks[0], unsharded) if masks else (),
            learns_mask=self.learns_mask,
        )
        return softmax_op(spec)

    def _mask_shape(self, x: torch.Tensor, mask: torch.Tensor, unsharded: Sequence[int] | None) -> tuple[int, ...]:
        cut = self._masked_in_full(x, unsharded)
        if self.learns_mask and self._mask is not None:  # of a twin, by the dims of x
            cut = cut.union(d for d in self._single_dims(x, mask, unsharded) if d in self._mask.cut_dims)
        return tuple(1 if n == 1 and d not in cut else -1 for d, n in enumerate(mask.shape))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, scale={self.scale}"


def _learns(mask: torch.Tensor) -> bool:
    return mask.requires_grad and torch.is_grad_enabled() and mask.dtype is not torch.bool


@checked_module
class Softmax(_Softmax):
    """Softmax along ``dim``, as torch.nn.Softmax: exp(x) / sum(exp(x)).

    scale: x is multiplied by it first.
    mesh, input: on a mesh, how x and the result are placed: Shard or Replicate; ``dim`` may be sharded too, for one
    exchange of two numbers a row, and one number a row backward.
    mask: on a mesh, how a mask with a gradient is placed, by its own dims.  It is asked for where x has one element of
    a sharded dim on each rank, as of one head a rank: that of the mask may be one of many, or the same on all ranks,
    whose gradient is the sum over ranks.
    x: float64, float32, bfloat16 or float16, computed in float32 or float64 and rounded once.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.
    """

    family = "softmax"


@checked_module
class LogSoftmax(_Softmax):
    """The logarithm of ``Softmax``, as torch.nn.LogSoftmax.  Arguments are those of ``Softmax``."""

    family = "log_softmax"
    _is_log = True


@dataclass(frozen=True, kw_only=True)
class SoftmaxSpec(PlacedSpec):
    """All that the fusions depend on.

    mask_dtype: None without a mask.  mask_shape: its unsharded sizes, 1 where it is broadcast.
    """

    dim: int
    is_log: bool
    scale: float
    mask_dtype: DataType | None
    mask_shape: tuple[int, ...]
    learns_mask: bool = False

    @property
    def other_dtypes(self) -> tuple[DataType | None, ...]:
        return (self.mask_dtype,)

    @property
    def mask(self) -> TensorPlacement:
        """Where the mask lives: with x, whole along the dims in which it is broadcast."""
        shards = [None if d is None or self.mask_shape[d] == 1 else d for d in self.placement.shards]
        return replace(self.placement, shards=tuple(shards))


@lru_cache(maxsize=256)
def softmax_op(spec: SoftmaxSpec) -> FusedOp:
    """(x[, mask]) -> (result); the backward reads the result, and the mask where that is of bool."""
    masks = () if spec.mask_dtype is None else (spec.mask,)
    arguments = (spec.placement, *masks)
    saved = (len(arguments), 1) if spec.mask_dtype is DataType.Bool else (len(arguments),)
    order = (0, 1) if spec.learns_mask else (0,)
    return FusedOp(_forward(spec), _backward(spec), 1, saved, arguments, (spec.placement,), order)


def _mask(fd: FusionDefinition, spec: SoftmaxSpec, dtype: DataType) -> TensorView:
    return define(fd, spec.mesh, spec.mask, spec.mask_shape, dtype)


def _operand(fd: FusionDefinition, spec: SoftmaxSpec) -> TensorView:
    return fd.ops.cast(define(fd, spec.mesh, spec.placement, [-1] * spec.ndim, spec.dtype), dtype=spec.compute)


def _forward(spec: SoftmaxSpec) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = _operand(fd, spec)
        x = fd.ops.mul(x, spec.scale) if spec.scale != 1 else x
        if spec.mask_dtype is not None:
            mask = _mask(fd, spec, spec.mask_dtype)
            if spec.mask_dtype is DataType.Bool:
                x = fd.ops.where(mask, x, -math.inf)
            else:
                x = fd.ops.add(x, fd.ops.cast(mask, dtype=spec.compute))
        shifted = fd.ops.sub(x, fd.ops.max(x, [spec.dim], keepdim=True))
        weights = fd.ops.exp(shifted)
        total = fd.ops.sum(weights, [spec.dim], keepdim=True)
        result = fd.ops.sub(shifted, fd.ops.log(total)) if spec.is_log else fd.ops.div(weights, total)
        give(fd, fd.ops.cast(result, dtype=spec.dtype), spec.mesh, spec.placement)
    return fd


def _backward(spec: SoftmaxSpec) -> FusionDefinition:
    """(gradient g, result y[, mask of bool]) -> scale * d[, d summed to the shape of an added mask].

    d is y * (g - sum(g * y)), or g - exp(y) * sum(g) of a logarithm, and 0 where an element takes no part.
    """
    with FusionDefinition() as fd:
        gradient, y = _operand(fd, spec), _operand(fd, spec)
        if spec.is_log:
            total = fd.ops.sum(gradient, [spec.dim], keepdim=True)
            d_x = fd.ops.sub(gradient, fd.ops.mul(fd.ops.exp(y), total))
        else:
            total = fd.ops.sum(fd.ops.mul(gradient, y), [spec.dim], keepdim=True)
            d_x = fd.ops.mul(y, fd.ops.sub(gradient, total))
        if spec.mask_dtype is DataType.Bool:
            # of a row in which nothing takes part y is NaN; of a NaN among what takes part so is the gradient
            d_x = fd.ops.where(_mask(fd, spec, spec.mask_dtype), d_x, 0.0)
        d_sum, d_x = d_x, fd.ops.mul(d_x, spec.scale) if spec.scale != 1 else d_x
        give(fd, fd.ops.cast(d_x, dtype=spec.dtype), spec.mesh, spec.placement)
        if spec.learns_mask and spec.mask_dtype is not None:
            over = [d for d, n in enumerate(spec.mask_shape) if n == 1]
            d_mask = fd.ops.sum(d_sum, over, keepdim=True) if over else d_sum
            give(fd, fd.ops.cast(d_mask, dtype=spec.mask_dtype), spec.mesh, spec.mask)
    return fd
