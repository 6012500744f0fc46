"""Builders of random tensors: torch's generator, or a seed of the caller's; a counter by the unsharded index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from ..errors import OperandError
from ..ir.dtype import DataType
from ..ir.op import Random, RandomKind
from ..ir.scalar import Scalar, Size
from ..ir.tensor_view import TensorView
from .build_calls import CallBuilder
from .builder import Operand, static, typed


class RandomBuilder(CallBuilder):
    """Random numbers.  Element i does not depend on how the tensor is sharded."""

    def uniform(
        self,
        minval: Operand,
        maxval: Operand,
        shape: Sequence[Size],
        rng_seed: Operand | None = None,
        rng_offset: Operand | None = None,
        dtype: DataType = DataType.Float,
    ) -> TensorView:
        """Random numbers, uniform in [minval, maxval); without a seed, by torch's generator of the device."""
        return self._draw("uniform", (minval, maxval), shape, (rng_seed, rng_offset), dtype)

    def normal(
        self,
        mean: Operand,
        std: Operand,
        shape: Sequence[Size],
        rng_seed: Operand | None = None,
        rng_offset: Operand | None = None,
        dtype: DataType = DataType.Float,
    ) -> TensorView:
        """Random numbers of a normal distribution with a mean and a standard deviation."""
        return self._draw("normal", (mean, std), shape, (rng_seed, rng_offset), dtype)

    def philox_uniform(self, seed: Operand, index: Operand) -> TensorView:
        """A random number, uniform in [0, 1), float32, for each seed and index: integers, broadcast as others are."""
        given = [_wrapped(seed), _wrapped(index)]
        return cast(TensorView, self._pointwise("philox_uniform", given, places=("seed", "index")))

    def rand_like(self, x: TensorView) -> TensorView:
        """Random numbers, uniform in [0, 1), in the shape and type of ``x``."""
        return self._draw("uniform", (0.0, 1.0), self._shape_of("rand_like", x), (None, None), x.dtype)

    def randn_like(self, x: TensorView) -> TensorView:
        """Random numbers of a standard normal distribution, in the shape and type of ``x``."""
        return self._draw("normal", (0.0, 1.0), self._shape_of("randn_like", x), (None, None), x.dtype)

    def dropout(
        self, x: TensorView, p: float, rng_seed: Operand | None = None, rng_offset: Operand | None = None
    ) -> TensorView:
        """Elements kept with probability ``1 - p`` and scaled; the mask does not depend on the sharding."""
        if not 0 <= p <= 1:
            raise OperandError("dropout", "p", p, "a probability from 0 to 1")
        shape = [_size(n) for n in self.shape(x)]
        drawn = self._draw("uniform", (0.0, 1.0), shape, (rng_seed, rng_offset), DataType.Float, "dropout")
        kept = self._tensors("ge", drawn, p)
        # a product with the mask, as torch has it: a NaN that is dropped stays one
        return self._tensors("mul", self._tensors("mul", x, kept), 1 / (1 - p) if p < 1 else 0.0)

    def _shape_of(self, op: str, x: TensorView) -> list[Size]:
        """For random numbers of the type of ``x``."""
        if not _is_drawn(self._tensor(op, x).dtype):
            raise OperandError(op, x.name, typed(x), "Double, Float, Half or BFloat16")
        return [_size(n) for n in self.shape(x)]

    def _draw(
        self,
        op: RandomKind,
        parameters: Sequence[Operand],
        shape: Sequence[Size],
        key: Sequence[Operand | None],
        dtype: DataType,
        called: str | None = None,
    ) -> TensorView:
        """``called``: the op of the caller's line; left out, ``op``."""
        said = called or op
        self._data_type(said, dtype)
        if not _is_drawn(dtype):
            raise OperandError(said, "dtype", dtype, "Double, Float, Half or BFloat16")
        seed, offset = key
        both = "an integer: a seed and an offset are given together, or neither"
        if seed is not None and offset is None:
            raise OperandError(said, "rng_offset", None, both)
        if seed is None and offset is not None:
            raise OperandError(said, "rng_seed", None, both)
        names = ("minval", "maxval") if op == "uniform" else ("mean", "std")
        values = [self._number(said, name, v) for name, v in zip(names, parameters, strict=True)]
        _check_distribution(said, names, values, dtype)
        if seed is None or offset is None:
            values += self._drawn()
        else:
            values += [self._key(said, "rng_seed", seed), self._key(said, "rng_offset", offset)]
        sizes = self._shape_argument(said, shape)
        out = self._fusion.new_tensor(static(sizes), dtype)
        self._fusion.record(Random(op, tuple(sizes), drawn=seed is None), values, out)
        return out

    def _number(self, op: str, argument: str, v: object) -> Scalar:
        value = self._operand(op, argument, v)
        if not isinstance(value, Scalar) or value.dtype.is_complex:
            raise OperandError(op, argument, v, "a real number or scalar")
        return value

    def _key(self, op: str, argument: str, v: Operand) -> Scalar:
        value = self._operand(op, argument, _wrapped(v))
        if isinstance(value, TensorView):
            raise OperandError(op, argument, v, "an integer or a scalar; philox_uniform takes seeds that are tensors")
        if not value.dtype.is_integral:
            raise OperandError(op, argument, v, "an integer, or a scalar declared with dtype=DataType.Int")
        return value


def _check_distribution(op: str, names: Sequence[str], values: Sequence[Scalar], dtype: DataType) -> None:
    """Raises OperandError for constants that are no distribution's, as torch does; a call's scalars are not known."""
    first, second = (v.value.real if v.is_literal and v.value is not None else None for v in values)
    if "std" in names:
        if second is not None and not second >= 0:
            raise OperandError(op, "std", second, "a number of 0 or more")
        return
    largest = torch.finfo(dtype.torch).max
    for name, bound in zip(names, (first, second), strict=True):
        if bound is not None and not abs(bound) <= largest:
            raise OperandError(op, name, bound, f"a finite number that {dtype.name} holds")
    if first is None or second is None:
        return
    if first > second:
        raise OperandError(op, "minval", first, f"a number that is not above maxval, {second}")
    if second - first > largest:
        expected = f"one above minval, {first}, by {largest} at most, the largest number of {dtype.name}"
        raise OperandError(op, "maxval", second, expected)


def _wrapped(v: Operand) -> Operand:
    """A number as 64 bits of which none is a sign: a generator's seed may be 2^63 and more."""
    return v - 2**64 if isinstance(v, int) and 2**63 <= v < 2**64 else v


def _is_drawn(dtype: DataType) -> bool:
    return dtype.is_floating and dtype.itemsize > 1


def _size(value: object) -> Size:
    assert isinstance(value, int | Scalar), "a size is a number or a scalar"
    return value
