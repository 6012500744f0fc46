"""The fusions of a rotary embedding: queries and keys in one kernel, and their gradients turned back in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..frontend import FusionDefinition
from ..ir import DataType, TensorView
from .fused import FusedOp
from .placed_spec import PlacedSpec
from .placement import TensorPlacement, define, give


@dataclass(frozen=True, kw_only=True)
class RotarySpec(PlacedSpec):
    """All that the fusions depend on.

    heads: unsharded number of heads of each tensor that is turned, queries first.  heads_dim: the dim that holds them.
    rotary_dim: how many of the ``head_dim`` features are turned, the first ones.
    table: unsharded sizes of cosines and sines, 1 where they are broadcast.
    """

    heads: tuple[int, ...]
    heads_dim: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    table: tuple[int, ...]
    table_dtype: DataType

    @property
    def other_dtypes(self) -> tuple[DataType | None, ...]:
        return (self.table_dtype,)

    @property
    def table_placement(self) -> TensorPlacement:
        """Where cosines and sines live: with the activations, whole along the dims in which they are broadcast."""
        shards = [None if d is None or self.table[d] == 1 else d for d in self.placement.shards]
        return replace(self.placement, shards=tuple(shards))

    def shape(self, heads: int) -> list[int]:
        sizes = [-1] * (self.ndim - 1) + [self.head_dim]
        sizes[self.heads_dim] = heads
        return sizes


@lru_cache(maxsize=256)
def rotary_op(spec: RotarySpec) -> FusedOp:
    """(queries[, keys], cosines, sines) -> the turned ones; only the gradients of the first are computed."""
    count = len(spec.heads)
    # Queries and keys are mostly views of one projection: they are read where they are.
    given = replace(spec.placement, strided=True)
    arguments = (*(given,) * count, *(replace(spec.table_placement, strided=True),) * 2)
    order = tuple(range(count))
    return FusedOp(
        forward=_turn(spec, is_back=False),
        backward=_turn(spec, is_back=True),
        results=count,
        saved=(count, count + 1),
        arguments=arguments,
        gradients=(spec.placement,) * count,
        order=order,
        follows=order,
    )


@lru_cache(maxsize=256)
def packed_rotary_op(spec: RotarySpec) -> FusedOp:
    """(queries, keys and values as one, cosines, sines) -> the same with the first two turned.

    The backward takes three gradients, which attention makes apart, and makes one, in one kernel: joined by autograd
    they would be copied once more.
    """
    given = replace(spec.placement, strided=True)
    return FusedOp(
        forward=_turn_packed(spec, is_back=False),
        backward=_turn_packed(spec, is_back=True),
        results=1,
        saved=(1, 2),
        arguments=(given, *(replace(spec.table_placement, strided=True),) * 2),
        gradients=(given,) * 3,
        order=(0,),
        follows=(0,),
    )


def _turn_packed(spec: RotarySpec, *, is_back: bool) -> FusionDefinition:
    """(queries, keys and values as one, or their gradients, cosines, sines) -> the first two turned, as one.

    The two halves of features are made for all heads, and values chosen: each element is loaded once, for both halves.
    """
    at, flags = replace(spec.placement, strided=True), [k != spec.heads_dim for k in range(spec.ndim - 1)]
    with FusionDefinition() as fd:
        given = spec.heads if is_back else (sum(spec.heads),)
        parts = [define(fd, spec.mesh, at, spec.shape(n), spec.dtype) for n in given]
        x = fd.ops.cat(parts, spec.heads_dim) if is_back else parts[0]
        cos, sin = _angles(fd, spec)
        sin = fd.ops.neg(sin) if is_back else sin
        heads = fd.ops.iota(sum(spec.heads), 0, 1, DataType.Int32)
        is_turned = fd.ops.broadcast(fd.ops.lt(heads, sum(spec.heads[:2])), [*flags, True])
        give(fd, _turned(fd, spec, x, cos, sin, is_turned), spec.mesh, spec.placement)
    return fd


def _angles(fd: FusionDefinition, spec: RotarySpec, *, strided: bool = True) -> list[TensorView]:
    """Cosines and sines, in the compute dtype."""
    at = replace(spec.table_placement, strided=strided)
    tables = [define(fd, spec.mesh, at, spec.table, spec.table_dtype) for _ in range(2)]
    return [fd.ops.cast(t, dtype=spec.compute) for t in tables]


def _turn(spec: RotarySpec, *, is_back: bool) -> FusionDefinition:
    """(tensors..., cosines, sines) -> the tensors turned by the angles; back by their negatives, for gradients."""
    with FusionDefinition() as fd:
        at = spec.placement if is_back else replace(spec.placement, strided=True)
        tensors = [define(fd, spec.mesh, at, spec.shape(n), spec.dtype) for n in spec.heads]
        cos, sin = _angles(fd, spec, strided=not is_back)
        sin = fd.ops.neg(sin) if is_back else sin
        for x in tensors:
            give(fd, _turned(fd, spec, x, cos, sin), spec.mesh, spec.placement)
    return fd


def _turned(
    fd: FusionDefinition,
    spec: RotarySpec,
    x: TensorView,
    cos: TensorView,
    sin: TensorView,
    where: TensorView | None = None,
) -> TensorView:
    """``x`` with each pair (a, b) of its first features replaced by (a cos - b sin, b cos + a sin), ``where`` given."""
    turned, half = spec.rotary_dim, spec.rotary_dim // 2
    if spec.interleaved:
        parts = [_part(fd, x, k, turned, 2) for k in (0, 1)]
    else:
        parts = [_part(fd, x, 0, half), _part(fd, x, half, turned)]
    first, second = (fd.ops.cast(part, dtype=spec.compute) for part in parts)
    a = fd.ops.sub(fd.ops.mul(first, cos), fd.ops.mul(second, sin))
    b = fd.ops.add(fd.ops.mul(second, cos), fd.ops.mul(first, sin))
    a, b = (fd.ops.cast(t, dtype=spec.dtype) for t in (a, b))
    if where is not None:
        a, b = (fd.ops.where(where, t, part) for t, part in zip((a, b), parts, strict=True))
    if spec.interleaved:
        pairs = fd.ops.cat([fd.ops.unsqueeze(t, -1) for t in (a, b)], -1)
        sizes = [fd.ops.size(x, k) for k in range(spec.ndim - 1)]
        pieces = [fd.ops.reshape(pairs, [*sizes, turned])]  # pyright: ignore[reportArgumentType]
    else:
        pieces = [a, b]
    if turned < spec.head_dim:
        pieces.append(_part(fd, x, turned, spec.head_dim))
    return fd.ops.cat(pieces, -1) if len(pieces) > 1 else pieces[0]


def _part(fd: FusionDefinition, x: TensorView, start: int, stop: int, step: int = 1) -> TensorView:
    """The features from ``start`` to ``stop``."""
    ends: Sequence[object] = [fd.ops.size(x, k) for k in range(x.ndim - 1)]
    rest = [0] * (x.ndim - 1)
    return fd.ops.slice(x, [*rest, start], [*ends, stop], [*[1] * (x.ndim - 1), step])  # pyright: ignore[reportArgumentType]
