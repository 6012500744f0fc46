"""Builders of random tensors: torch's generator, or a seed of the caller's; a counter by the unsharded index."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OperandError
from ..ir.dtype import DataType
from ..ir.op import Random, RandomKind
from ..ir.scalar import Scalar, Size
from ..ir.tensor_view import TensorView
from .build_calls import CallBuilder
from .builder import Operand, static


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
        if not 0 <= p < 1:
            raise OperandError("dropout", "p", p, "a probability below 1")
        shape = [_size(n) for n in self.shape(x)]
        drawn = self.uniform(0.0, 1.0, shape, rng_seed, rng_offset)
        kept = self._tensors("ge", drawn, p)
        return self._tensors("where", kept, self._tensors("mul", x, 1 / (1 - p)), 0.0)

    def _shape_of(self, op: str, x: TensorView) -> list[Size]:
        """For random numbers of the type of ``x``."""
        if not _is_drawn(self._tensor(op, x).dtype):
            raise OperandError(op, x.name, f"a tensor of {x.dtype.name}", "Double, Float, Half or BFloat16")
        return [_size(n) for n in self.shape(x)]

    def _draw(
        self,
        op: RandomKind,
        parameters: Sequence[Operand],
        shape: Sequence[Size],
        key: Sequence[Operand | None],
        dtype: DataType,
    ) -> TensorView:
        self._data_type(op, dtype)
        if not _is_drawn(dtype):
            raise OperandError(op, "dtype", dtype, "Double, Float, Half or BFloat16")
        seed, offset = key
        if (seed is None) != (offset is None):
            raise OperandError(op, "rng_seed and rng_offset", (seed, offset), "both of them or none")
        values = [self._scalar(op, k, v) for k, v in enumerate(parameters)]
        values += self._drawn() if seed is None else [self._scalar(op, 3, seed), self._scalar(op, 4, offset)]
        sizes = self._shape_argument(op, shape)
        out = self._fusion.new_tensor(static(sizes), dtype)
        self._fusion.record(Random(op, tuple(sizes), drawn=seed is None), values, out)
        return out

    def _scalar(self, op: str, k: int, v: object) -> Scalar:
        value = self._operand(op, k, v)
        if not isinstance(value, Scalar) or value.dtype.is_complex:
            raise OperandError(op, f"operand {k}", v, "a real number or scalar")
        return value


def _is_drawn(dtype: DataType) -> bool:
    return dtype.is_floating and dtype.itemsize > 1


def _size(value: object) -> Size:
    assert isinstance(value, int | Scalar), "a size is a number or a scalar"
    return value
