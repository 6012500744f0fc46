"""Builders of reductions, scans and sorting."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OperandError, Words
from ..ir.call import AlongAxis, Argsort, TopK
from ..ir.dtype import DataType
from ..ir.op import Reduce, ReductionKind, SizeOf
from ..ir.scalar import Scalar
from ..ir.tensor_view import TensorView
from .build_shapes import ShapeBuilder
from .builder import Operand, dim_of_any, normalize_dim, normalize_dims, typed
from .promotion import real_type

Dims = Sequence[int] | int | None


class ReductionBuilder(ShapeBuilder):
    """Reductions over ``dims`` (all where left out, none where they are ``[]``), scans and sorting."""

    def _reduce(
        self, op: ReductionKind, x: TensorView, dims: Dims, keepdim: bool, dtype: DataType, called: str | None = None
    ) -> TensorView:
        """``called``: the op of the caller's line, where that has another name."""
        self._tensor(called or op, x)
        axes = normalize_dims(called or op, x, dims)
        if not axes:
            return self._cast(x, dtype) if dtype is not x.dtype else self.set(x)
        rest = [n for k, n in enumerate(x.shape) if k not in axes]
        out = self._unary(Reduce(op, axes), x, rest, dtype)
        return self.broadcast(out, [k in axes for k in range(x.ndim)]) if keepdim else out

    def sum(self, x: TensorView, dims: Dims = None, keepdim: bool = False, dtype: DataType | None = None) -> TensorView:
        """Sum over ``dims`` (all where left out), accumulated in float32, float64 or int64; integers sum to Int."""
        return self._accumulate("sum", x, dims, keepdim, dtype)

    def prod(
        self, x: TensorView, dims: Dims = None, keepdim: bool = False, dtype: DataType | None = None
    ) -> TensorView:
        """Product over ``dims``; types as for ``sum``."""
        return self._accumulate("prod", x, dims, keepdim, dtype)

    def _accumulate(
        self, op: ReductionKind, x: TensorView, dims: Dims, keepdim: bool, dtype: DataType | None
    ) -> TensorView:
        self._tensor(op, x)
        if dtype is not None:
            self._data_type(op, dtype)
        result = dtype or (DataType.Int if x.dtype.is_integral else x.dtype)
        if dtype is not None and dtype.is_complex != x.dtype.is_complex:
            x = self._cast(x, dtype)
        if dtype is not None and dtype.is_integral and not x.dtype.is_integral:
            x = self._cast(x, dtype)
        return self._reduce(op, x, dims, keepdim, result)

    def max(self, x: TensorView, dims: Dims = None, keepdim: bool = False) -> TensorView:
        """The largest element over ``dims``; NaN where there is one."""
        return self._reduce("max", x, dims, keepdim, self._ordered("max", x).dtype)

    def min(self, x: TensorView, dims: Dims = None, keepdim: bool = False) -> TensorView:
        """The smallest element over ``dims``; NaN where there is one."""
        return self._reduce("min", x, dims, keepdim, self._ordered("min", x).dtype)

    def _ordered(self, op: str, x: TensorView, *, is_bool_ordered: bool = True) -> TensorView:
        is_bool = self._tensor(op, x).dtype is DataType.Bool
        if x.dtype.is_complex or (is_bool and not is_bool_ordered):
            raise OperandError(op, x.name, typed(x), "a type that has an order")
        return x

    def amax(self, x: TensorView, dims: Dims = None, keepdim: bool = False) -> TensorView:
        """The largest element over ``dims``; NaN where there is one."""
        return self._reduce("max", x, dims, keepdim, self._ordered("amax", x).dtype, "amax")

    def amin(self, x: TensorView, dims: Dims = None, keepdim: bool = False) -> TensorView:
        """The smallest element over ``dims``; NaN where there is one."""
        return self._reduce("min", x, dims, keepdim, self._ordered("amin", x).dtype, "amin")

    def any(self, x: TensorView, dims: Dims = None, keepdim: bool = False) -> TensorView:
        """Whether some element over ``dims`` is nonzero."""
        return self._reduce("any", x, dims, keepdim, DataType.Bool)

    def all(self, x: TensorView, dims: Dims = None, keepdim: bool = False) -> TensorView:
        """Whether all elements over ``dims`` are nonzero."""
        return self._reduce("all", x, dims, keepdim, DataType.Bool)

    def mean(
        self, x: TensorView, dims: Dims = None, keepdim: bool = False, dtype: DataType | None = None
    ) -> TensorView:
        """Mean over ``dims``; of integers in Float.  Of narrow floats in float32, rounded once."""
        self._tensor("mean", x)
        if dtype is not None:
            self._data_type("mean", dtype)
            if dtype.is_integral:
                raise OperandError("mean", "dtype", dtype, "floats or complex numbers")
        result = dtype or (DataType.Float if x.dtype.is_integral else x.dtype)
        rounded = self._cast(x, result)
        wide = self._cast(rounded, result.compute)
        return self._cast(self._mean(wide, normalize_dims("mean", x, dims), keepdim), result)

    def _mean(self, wide: TensorView, axes: tuple[int, ...], keepdim: bool) -> TensorView:
        """Of elements in the type that they are computed in."""
        return self._tensors("div", self.sum(wide, axes, keepdim), self._count(wide, axes))

    def var_mean(
        self, x: TensorView, dims: Dims = None, correction: float = 1, keepdim: bool = False
    ) -> tuple[TensorView, TensorView]:
        """Variance and mean; the sum of squares is divided by ``count - correction`` (0 where that is negative).

        Two passes, so that a mean of 1e4 costs no digits.  Of complex elements the variance of both parts.  Of narrow
        floats in float32: only the two results are rounded.
        """
        return self._var_mean("var_mean", x, dims, correction, keepdim)

    def _var_mean(
        self, op: str, x: TensorView, dims: Dims, correction: float, keepdim: bool
    ) -> tuple[TensorView, TensorView]:
        axes, mean, squares = self._moments(op, x, dims)
        count = self._count(x, axes)
        below = self._pointwise("maximum", [self._pointwise("sub", [count, correction]), 0]) if correction else count
        var = self._cast(self._tensors("div", squares, below), real_type(x.dtype))
        mean = self._cast(mean, x.dtype)
        if keepdim:
            return self.broadcast(var, [k in axes for k in range(x.ndim)]) if axes else var, mean
        return var, self.squeeze(mean, axes) if axes else mean

    def var(self, x: TensorView, dims: Dims = None, correction: float = 1, keepdim: bool = False) -> TensorView:
        """The first of ``var_mean``."""
        return self._var_mean("var", x, dims, correction, keepdim)[0]

    def welford(self, x: TensorView, dims: Dims = None) -> tuple[TensorView, TensorView, TensorView]:
        """Mean, sum of squared deviations, and count (Int, of the same shape).  Of narrow floats as ``var_mean``."""
        axes, mean, squares = self._moments("welford", x, dims)
        mean, squares = self._cast(mean, x.dtype), self._cast(squares, real_type(x.dtype))
        count = self.full_like(squares, self._count(x, axes), DataType.Int)
        return self.squeeze(mean, axes) if axes else mean, squares, count

    def _moments(self, op: str, x: TensorView, dims: Dims) -> tuple[tuple[int, ...], TensorView, TensorView]:
        """Axes, mean with the axes kept, and sum of squared deviations without them, in the type of computation."""
        if self._tensor(op, x).dtype.is_integral:
            raise OperandError(op, x.name, typed(x), "floats or complex numbers: cast it first")
        axes = normalize_dims(op, x, dims)
        wide = self._cast(x, x.dtype.compute)
        mean = self._mean(wide, axes, keepdim=True)
        off = self._tensors("sub", wide, mean)
        squares = self._tensors("square", self._tensors("abs", off) if x.dtype.is_complex else off)
        total = self.sum(squares, axes) if axes else self._cast(squares, real_type(wide.dtype))
        return axes, mean, total

    def _count(self, x: TensorView, axes: Sequence[int]) -> Operand:
        """Elements under ``axes``: a literal where the sizes are static."""
        n = 1
        for k in axes:
            n = -1 if n < 0 or x.shape[k] < 0 else n * x.shape[k]
        if n >= 0:
            return n
        out = self._fusion.new_scalar(DataType.Int)
        self._fusion.record(SizeOf(tuple(axes)), [x], out)
        return out

    def size(self, x: TensorView, dim: int | Sequence[int]) -> Operand:
        """The unsharded extent of ``dim``; of several dims the product."""
        return self._count(self._tensor("size", x), normalize_dims("size", x, dim))

    def shape(self, x: TensorView) -> list[Operand]:
        """The unsharded extents: numbers where they are static, else scalars."""
        return [self.size(x, k) for k in range(self._tensor("shape", x).ndim)]

    # along one axis

    def _along(self, op: str, x: TensorView, dim: int, dtype: DataType) -> TensorView:
        if op not in ("cumsum", "cumprod"):
            self._ordered(op, x)
        at = dim_of_any(op, self._tensor(op, x), dim)
        return self._call(AlongAxis(op, at), [x], [dtype])[0]

    def cumsum(self, x: TensorView, dim: int) -> TensorView:
        """Running sum along ``dim``, accumulated in float32; integers sum to Int."""
        return self._along("cumsum", x, dim, DataType.Int if x.dtype.is_integral else x.dtype)

    def cumprod(self, x: TensorView, dim: int) -> TensorView:
        """Running product along ``dim``."""
        return self._along("cumprod", x, dim, DataType.Int if x.dtype.is_integral else x.dtype)

    def cummax(self, x: TensorView, dim: int) -> TensorView:
        """Running maximum along ``dim``."""
        return self._along("cummax", x, dim, x.dtype)

    def cummin(self, x: TensorView, dim: int) -> TensorView:
        """Running minimum along ``dim``."""
        return self._along("cummin", x, dim, x.dtype)

    def argsort(self, x: TensorView, dim: int = -1, descending: bool = False, stable: bool = False) -> TensorView:
        """The indices that sort ``dim``."""
        at = dim_of_any("argsort", self._ordered("argsort", x), dim)
        return self._call(Argsort(at, descending, stable), [x], [DataType.Int])[0]

    def topk(
        self, x: TensorView, k: int | Scalar, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[TensorView, TensorView]:
        """The ``k`` largest (or smallest) along ``dim``, and their indices."""
        at = dim_of_any("topk", self._ordered("topk", x, is_bool_ordered=False), dim)
        (k,) = self._sizes("topk", "k", [k])
        most = x.shape[at] if x.ndim else 1
        if isinstance(k, int) and (k < 0 or (most >= 0 and k > most)):
            raise OperandError("topk", "k", k, f"0 to {most}, the size of axis {at}" if most >= 0 else "0 or more")
        values, indices = self._call(TopK(k, at, largest, sorted), [x], [x.dtype, DataType.Int])
        return values, indices

    def argmax(self, x: TensorView, dim: int | None = None, keepdim: bool = False) -> TensorView:
        """The index of the largest along ``dim``; of the flattened tensor where left out."""
        return self._arg("argmax", x, dim, keepdim)

    def argmin(self, x: TensorView, dim: int | None = None, keepdim: bool = False) -> TensorView:
        """The index of the smallest along ``dim``."""
        return self._arg("argmin", x, dim, keepdim)

    def _arg(self, op: str, x: TensorView, dim: int | None, keepdim: bool) -> TensorView:
        self._ordered(op, x, is_bool_ordered=False)
        at = None if dim is None else normalize_dim(op, x, dim)
        if 0 in (x.shape if at is None else x.shape[at : at + 1]):
            raise OperandError(op, x.name, Words(f"of shape {list(x.shape)}"), "at least one element to choose from")
        (out,) = self._call(AlongAxis(op, at), [x], [DataType.Int])
        gone = [at is None or k == at for k in range(x.ndim)]
        return self.broadcast(out, gone) if keepdim else out
