"""Builders of ops that rearrange elements, and of tensors made from a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from ..errors import OperandError, Words
from ..ir.call import Cat, Flip, Pad, Select, Slice
from ..ir.dtype import DataType
from ..ir.op import Broadcast, Expand, Full, Iota, Permute, Reshape, Set, Squeeze
from ..ir.scalar import Number, Scalar, Size
from ..ir.tensor_view import TensorView
from .builder import Builder, Operand, literal, normalize_dim, normalize_dims, place_of, static
from .promotion import promote


class ShapeBuilder(Builder):
    """Copies, views, slices, and factories."""

    def set(self, x: TensorView) -> TensorView:
        """A copy; where the result is given another sharding or allocation domain, that change of layout."""
        return self._unary(Set(), self._tensor("set", x), x.shape, x.dtype)

    def segment_set(self, x: TensorView) -> TensorView:
        """A copy."""
        return self.set(x)

    def stride_order(self, x: TensorView, stride_order: Sequence[int]) -> TensorView:
        """A copy laid out with dim d at place ``stride_order[d]`` in memory, 0 innermost."""
        ndim = self._tensor("stride_order", x).ndim
        places = [k % ndim if -ndim <= k < ndim else k for k in stride_order]
        if sorted(places) != list(range(ndim)):
            raise OperandError("stride_order", "stride_order", stride_order, f"a permutation of {ndim} places")
        out = self.set(x)
        order = sorted(range(ndim), key=lambda d: -places[d])
        out.set_allocation_domain([out.domain.logical[d] for d in order])
        return out

    def broadcast(self, x: TensorView, is_broadcast_dim: Sequence[bool]) -> TensorView:
        """New axes of extent 1 where ``is_broadcast_dim``; the others are ``x``'s, in order."""
        flags = tuple(bool(f) for f in is_broadcast_dim)
        if len([f for f in flags if not f]) != self._tensor("broadcast", x).ndim:
            raise OperandError("broadcast", "is_broadcast_dim", flags, f"{x.ndim} entries that are False")
        if not any(flags):
            return x
        rest = iter(x.shape)
        return self._unary(Broadcast(flags), x, [1 if f else next(rest) for f in flags], x.dtype)

    def broadcast_in_dim(self, x: TensorView, shape: Sequence[Size], broadcast_dims: Sequence[int]) -> TensorView:
        """``x`` expanded to ``shape``; its axis k becomes axis ``broadcast_dims[k]``."""
        if len(broadcast_dims) != self._tensor("broadcast_in_dim", x).ndim:
            raise OperandError("broadcast_in_dim", "broadcast_dims", broadcast_dims, f"{x.ndim} axes")
        dims = [d + len(shape) if d < 0 else d for d in broadcast_dims]
        if any(not 0 <= d < len(shape) for d in dims) or sorted(dict.fromkeys(dims)) != dims:
            raise OperandError(
                "broadcast_in_dim", "broadcast_dims", dims, f"ascending axes of a shape of {len(shape)} dims"
            )
        wide = self.broadcast(x, [k not in dims for k in range(len(shape))])
        return self._expanded("broadcast_in_dim", wide, shape)

    def expand(self, x: TensorView, shape: Sequence[Size]) -> TensorView:
        """Axes of 1 repeated to ``shape``, -1 keeps an axis."""
        return self._expanded("expand", x, shape)

    def _expanded(self, op: str, x: TensorView, shape: Sequence[Size]) -> TensorView:
        """op: that of the caller's line."""
        if len(shape) != self._tensor(op, x).ndim:
            raise OperandError(op, "shape", shape, f"{x.ndim} sizes")
        wanted = self._sizes(op, "shape", shape)
        sizes = [-1 if isinstance(n, Scalar) else old if n == -1 else n for n, old in zip(wanted, x.shape, strict=True)]
        for k, (n, old) in enumerate(zip(sizes, x.shape, strict=True)):
            if old not in (1, -1, n) and n != -1:
                raise OperandError(op, f"shape[{k}]", n, f"{old}, the size of that axis, which is not 1")
        return self._unary(Expand(tuple(wanted), op), x, sizes, x.dtype)

    def squeeze(self, x: TensorView, dims: Sequence[int] | int, squeeze_expanded: bool = False) -> TensorView:
        """Without the axes ``dims``, which are 1; with ``squeeze_expanded`` also expanded ones, taken at index 0."""
        axes = normalize_dims("squeeze", self._tensor("squeeze", x), dims)
        if squeeze_expanded:
            for k in reversed(axes):
                x = self.select(x, 0, k) if x.shape[k] != 1 else self.squeeze(x, k)
            return x
        for k in axes:
            if x.shape[k] > 1:
                raise OperandError(
                    "squeeze", f"axis {k} of {x.name}", Words(f"of extent {x.shape[k]}"), "an axis of extent 1"
                )
        return self._unary(Squeeze(axes), x, [n for k, n in enumerate(x.shape) if k not in axes], x.dtype)

    def unsqueeze(self, x: TensorView, dim: int) -> TensorView:
        """A new axis of 1 at ``dim``."""
        ndim = self._tensor("unsqueeze", x).ndim + 1
        at = place_of("unsqueeze", x, dim, ndim, "new")
        return self.broadcast(x, [k == at for k in range(ndim)])

    def permute(self, x: TensorView, dims: Sequence[int]) -> TensorView:
        """Axis k of the result is axis ``dims[k]`` of ``x``."""
        order = tuple(normalize_dim("permute", self._tensor("permute", x), d) for d in dims)
        if sorted(order) != list(range(x.ndim)):
            raise OperandError("permute", "dims", dims, f"a permutation of {x.ndim} axes")
        return self._unary(Permute(order), x, [x.shape[d] for d in order], x.dtype)

    def transpose(self, x: TensorView, dim0: int, dim1: int) -> TensorView:
        """``x`` with two axes swapped."""
        order = list(range(x.ndim))
        a, b = (normalize_dim("transpose", x, d) for d in (dim0, dim1))
        order[a], order[b] = b, a
        return self.permute(x, order)

    def reshape(self, x: TensorView, new_shape: Sequence[Size]) -> TensorView:
        """The same elements in row-major order under ``new_shape``; one size may be -1."""
        shape = self._sizes("reshape", "new_shape", new_shape)
        asked = [n for n in shape if isinstance(n, int)]
        if any(n < -1 for n in asked) or asked.count(-1) > 1:
            raise OperandError("reshape", "new_shape", list(new_shape), "sizes of 0 or more, and one -1 at most")
        sizes = static(shape)
        have = x.shape
        if min((*have, *sizes), default=0) >= 0 and _product(have) != _product(sizes):
            raise OperandError(
                "reshape", "new_shape", sizes, f"{_product(have)} elements, those of {x.name} {list(have)}"
            )
        return self._unary(Reshape(tuple(shape)), x, sizes, self._tensor("reshape", x).dtype)

    # parts

    def slice(
        self,
        x: TensorView,
        start_indices: Sequence[Size],
        end_indices: Sequence[Size],
        strides: Sequence[Size] | None = None,
    ) -> TensorView:
        """The elements from start to end by steps, which are constants, for each axis; indices as in Python."""
        ndim = self._tensor("slice", x).ndim
        steps = [1] * ndim if strides is None else [literal(n) for n in strides]
        starts = self._sizes("slice", "start_indices", start_indices)
        stops = self._sizes("slice", "end_indices", end_indices)
        for name, given in (("start_indices", starts), ("end_indices", stops), ("strides", steps)):
            if len(given) != ndim:
                raise OperandError("slice", name, given, f"{ndim} of them, one for each axis")
        if any(isinstance(n, int) and n < 1 for n in steps):
            raise OperandError("slice", "strides", steps, "steps of 1 or more")
        by = tuple(n for n in steps if isinstance(n, int))
        if len(by) != ndim:
            raise OperandError("slice", "strides", steps, "numbers")
        return self._call(Slice(tuple(starts), tuple(stops), by), [x], [x.dtype])[0]

    def pad(self, x: TensorView, pad_widths: Sequence[Size], value: Operand | None = None) -> TensorView:
        """``value`` (0 where left out) before and after axes: widths in pairs, the last axis first, as torch has it."""
        ndim = self._tensor("pad", x).ndim
        given = self._sizes("pad", "pad_widths", pad_widths)
        if len(given) % 2 or len(given) > 2 * ndim:
            raise OperandError("pad", "pad_widths", given, f"a pair for each of at most {ndim} axes")
        pairs = [(given[k], given[k + 1]) for k in range(0, len(given), 2)]
        pairs = [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]
        fill = self._number_for("pad", "value", _zero(x.dtype) if value is None else value, x.dtype)
        widths = tuple(n for pair in pairs for n in pair)
        return self._call(Pad(widths), [x, fill], [x.dtype])[0]

    def cat(self, tensors: Sequence[TensorView], dim: int = 0) -> TensorView:
        """The tensors concatenated along ``dim``, in their common type."""
        if not tensors:
            raise OperandError("cat", "tensors", list(tensors), "at least one")
        first = self._tensor("cat", tensors[0])
        at = normalize_dim("cat", first, dim)
        for k, t in enumerate(tensors):
            if self._tensor("cat", t, k).ndim != first.ndim:
                raise OperandError("cat", f"operand {k}", t, f"a tensor of {first.ndim} dims")
            for d, (n, m) in enumerate(zip(t.shape, first.shape, strict=True)):
                if d != at and n != m and min(n, m) >= 0:
                    raise OperandError("cat", f"axis {d} of operand {k}", n, f"{m}, as in the first")
        dtype = promote(list(tensors))
        return self._call(Cat(at), [self._cast(t, dtype) for t in tensors], [dtype])[0]

    def flip(self, x: TensorView, dims: Sequence[int] | int) -> TensorView:
        """The axes ``dims`` in reverse."""
        return self._call(Flip(normalize_dims("flip", self._tensor("flip", x), dims)), [x], [x.dtype])[0]

    def select(self, x: TensorView, index: Size, dim: int) -> TensorView:
        """Index ``index`` of ``dim``, without that axis."""
        at = normalize_dim("select", self._tensor("select", x), dim)
        place = self._operand("select", 1, index)
        if not isinstance(place, Scalar):
            raise OperandError("select", "index", place, "a number or a scalar")
        n = x.shape[at]
        if n >= 0 and isinstance(place.value, int) and not -n <= place.value < n:
            raise OperandError(
                "select", "index", place.value, f"one from {-n} to {n - 1}, axis {at} of {x.name} has {n}"
            )
        return self._call(Select(at), [x, place], [x.dtype])[0]

    # factories

    def full(self, shape: Sequence[Size], fill_value: Operand, dtype: DataType) -> TensorView:
        """``fill_value`` everywhere."""
        self._data_type("full", dtype)
        sizes = self._shape_argument("full", shape)
        fill = self._number_for("full", "fill_value", fill_value, dtype)
        out = self._fusion.new_tensor(static(sizes), dtype)
        self._fusion.record(Full(tuple(sizes)), [fill], out)
        return out

    def full_like(self, x: TensorView, fill_value: Operand, dtype: DataType | None = None) -> TensorView:
        """``fill_value`` in the shape and the sharding of ``x``."""
        if dtype is not None:
            self._data_type("full_like", dtype)
        result = dtype or self._tensor("full_like", x).dtype
        if not isinstance(fill_value, TensorView) or (fill_value.dtype.is_complex and not result.is_complex):
            fill_value = self._number_for("full_like", "fill_value", fill_value, result)
        probe = self._tensors("ne", self._tensor("full_like", x), x)
        return self._cast(self._tensors("where", probe, fill_value, fill_value), result)

    def iota(self, length: Size, start: Operand = 0, step: Operand = 1, dtype: DataType = DataType.Int) -> TensorView:
        """``start + step * k``; k is the unsharded index, however the tensor is sharded."""
        self._data_type("iota", dtype)
        if not (dtype.is_integral or dtype.is_floating) or dtype is DataType.Bool:
            raise OperandError("iota", "dtype", dtype, "an integer or floating type")
        (n,) = self._shape_argument("iota", [length])
        first, by = (self._step("iota", name, v, dtype) for name, v in (("start", start), ("step", step)))
        if not isinstance(by, Scalar) and by == 0:
            raise OperandError("iota", "step", step, "a step that is not 0")
        out = self._fusion.new_tensor(static([n]), dtype)
        self._fusion.record(Iota((n,), first, by), [], out)
        return out

    def _step(self, op: str, name: str, value: Operand, dtype: DataType) -> Number | Scalar:
        """The value of a constant; a scalar of the fusion as it is.  Nothing that ``dtype`` does not hold."""
        given = self._operand(op, name, value)
        number = given.value if isinstance(given, Scalar) and given.is_literal else None
        is_lossy = given.dtype.is_complex or (dtype.is_integral and not given.dtype.is_integral)
        if not isinstance(given, Scalar) or is_lossy or (isinstance(number, float) and not math.isfinite(number)):
            raise OperandError(op, name, value, f"a finite number that is a {dtype.name}")
        return given if number is None else number

    def _shape_argument(self, op: str, shape: Sequence[Size]) -> list[Size]:
        sizes = self._sizes(op, "shape", shape)
        for k, n in enumerate(sizes):
            if isinstance(n, int) and n < 0:
                raise OperandError(op, f"shape[{k}]", n, "0 or more")
        return sizes


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for n in sizes:
        total *= n
    return total


def _zero(dtype: DataType) -> Number:
    return cast(Number, 0 if dtype.is_integral else 0.0)
