"""Builders: each op checks its operands, works out type and rank, and records itself in the fusion.

Sizes are mostly unknown here; that operands fit is checked when sizes are bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import cast

from ..errors import AxisError, OperandError, UnknownOpError
from ..ir.dtype import DataType
from ..ir.expr import Number, Scalar
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView
from .promotion import types
from .table import POINTWISE
from .torch_calls import TORCH_CALLS

Operand = TensorView | Scalar | Number
Size = int | Scalar

_ALIASES = {"true_divide": "div", "truediv": "div", "multiply": "mul", "subtract": "sub"}


class Ops:
    """``fd.ops``: every op of shardfuse.  Pointwise ones take TensorViews, scalars and Python numbers, as numpy broadcasts."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion

    def __getattr__(self, name: str) -> Callable[..., TensorView]:
        op = _ALIASES.get(name, name)
        if op not in POINTWISE:
            known = [*POINTWISE, *TORCH_CALLS, *(n for n in vars(type(self)) if not n.startswith("_"))]
            raise UnknownOpError(name, difflib.get_close_matches(name, known, n=2))
        return lambda *operands: cast(TensorView, self._pointwise(op, operands))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *POINTWISE]

    # pointwise

    def _pointwise(self, name: str, operands: Sequence[Operand]) -> TensorView | Scalar:
        op = POINTWISE[name]
        if len(operands) != op.arity:
            raise OperandError(name, "the argument list", operands, f"{op.arity} operands")
        values = [self._operand(name, k, v) for k, v in enumerate(operands)]
        if all(isinstance(v, Scalar) for v in values):
            return self._host(name, cast(list[Scalar], values))
        _, dtype = types(op, values)
        tensors = [v for v in values if isinstance(v, TensorView)]
        out = self._fusion.new_tensor(broadcast_shape([t.shape for t in tensors]), dtype)
        self._fusion.record(name, values, out)
        return out

    def _host(self, name: str, values: list[Scalar]) -> TensorView | Scalar:
        """Numbers known when sizes are bound stay on the host; what depends on a scalar input is a zero-dim tensor."""
        _, dtype = types(POINTWISE[name], values)
        inputs = [i.val for i in self._fusion.inputs]
        if any(v in inputs for v in values) or name not in ("add", "sub", "mul", "div", "neg", "reciprocal"):
            out = self._fusion.new_tensor((), dtype)
        else:
            out = self._fusion.new_scalar(dtype)
        self._fusion.record(name, values, out)
        return out

    def _operand(self, op: str, k: int, v: object) -> TensorView | Scalar:
        if isinstance(v, TensorView | Scalar):
            return v
        if isinstance(v, bool):
            return self._fusion.new_scalar(DataType.Bool, v, is_literal=True)
        if isinstance(v, int):
            return self._fusion.new_scalar(DataType.Int, v, is_literal=True)
        if isinstance(v, float):
            return self._fusion.new_scalar(DataType.Double, v, is_literal=True)
        if isinstance(v, complex):
            return self._fusion.new_scalar(DataType.ComplexDouble, v, is_literal=True)
        raise OperandError(op, f"operand {k}", v, "a TensorView, a scalar of this fusion, or a number")

    def _tensor(self, op: str, v: object) -> TensorView:
        if not isinstance(v, TensorView):
            raise OperandError(op, "operand 0", v, "a TensorView")
        return v

    def _unary(
        self, op: str, x: TensorView, sizes: Sequence[int], dtype: DataType, /, **attributes: object
    ) -> TensorView:
        out = self._fusion.new_tensor(sizes, dtype)
        self._fusion.record(op, [self._tensor(op, x)], out, attributes)
        return out

    def cast(self, x: TensorView, dtype: DataType) -> TensorView:
        """``x`` rounded to ``dtype``; ``x`` itself where it has that type."""
        if self._tensor("cast", x).dtype is dtype:
            return x
        return self._unary("cast", x, x.shape, dtype, dtype=dtype)

    def set(self, x: TensorView) -> TensorView:
        """A copy; where the result is given another sharding or allocation domain, that change of layout."""
        return self._unary("set", self._tensor("set", x), x.shape, x.dtype)

    def segment_set(self, x: TensorView) -> TensorView:
        return self.set(x)

    # reductions

    def _reduce(self, op: str, x: TensorView, dims: Sequence[int] | int | None, keepdim: bool, dtype: DataType) -> TensorView:
        self._tensor(op, x)
        axes = normalize_dims(op, x, dims)
        if not axes:
            return self.cast(x, dtype)
        rest = [n for k, n in enumerate(x.shape) if k not in axes]
        out = self._unary(op, x, rest, dtype, axes=axes)
        return self.broadcast(out, [k in axes for k in range(x.ndim)]) if keepdim else out

    def sum(
        self, x: TensorView, dims: Sequence[int] | int | None = None, keepdim: bool = False, dtype: DataType | None = None
    ) -> TensorView:
        """Sum over ``dims`` (all where left out); accumulated in float32, float64 or int64; bools and integers sum to Int."""
        result = dtype or (DataType.Int if x.dtype.is_integral else x.dtype)
        return self._reduce("sum", x, dims, keepdim, result)

    def prod(
        self, x: TensorView, dims: Sequence[int] | int | None = None, keepdim: bool = False, dtype: DataType | None = None
    ) -> TensorView:
        return self._reduce("prod", x, dims, keepdim, dtype or (DataType.Int if x.dtype.is_integral else x.dtype))

    def max(self, x: TensorView, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> TensorView:
        """The largest element over ``dims``; NaN where there is one."""
        return self._reduce("max", x, dims, keepdim, x.dtype)

    def min(self, x: TensorView, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> TensorView:
        return self._reduce("min", x, dims, keepdim, x.dtype)

    amax = max
    amin = min

    def any(self, x: TensorView, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> TensorView:
        return self._reduce("any", x, dims, keepdim, DataType.Bool)

    def all(self, x: TensorView, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> TensorView:
        return self._reduce("all", x, dims, keepdim, DataType.Bool)

    def mean(self, x: TensorView, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> TensorView:
        wide = x if x.dtype.is_floating else self.cast(x, DataType.Float)
        total = self.sum(wide, dims, keepdim)
        return cast(TensorView, self._pointwise("div", [total, self._count(x, normalize_dims("mean", x, dims))]))

    def var_mean(
        self, x: TensorView, dims: Sequence[int] | int | None = None, correction: int = 1, keepdim: bool = False
    ) -> tuple[TensorView, TensorView]:
        """Variance with ``count - correction`` below, and mean: two passes, so that a mean of 1e4 costs no digits."""
        axes = normalize_dims("var_mean", x, dims)
        mean = self.mean(x, axes, keepdim=True)
        off = self._pointwise("sub", [x, mean])
        squares = self.sum(cast(TensorView, self._pointwise("mul", [off, off])), axes, keepdim)
        count = self._count(x, axes)
        below = self._pointwise("sub", [count, correction]) if correction else count
        var = cast(TensorView, self._pointwise("div", [squares, below]))
        return var, mean if keepdim else self.squeeze(mean, axes)

    def var(
        self, x: TensorView, dims: Sequence[int] | int | None = None, correction: int = 1, keepdim: bool = False
    ) -> TensorView:
        return self.var_mean(x, dims, correction, keepdim)[0]

    def _count(self, x: TensorView, axes: Sequence[int]) -> Operand:
        """Elements under ``axes``: a literal where the sizes are static."""
        n = 1
        for k in axes:
            n = -1 if n < 0 or x.shape[k] < 0 else n * x.shape[k]
        if n >= 0:
            return n
        out = self._fusion.new_scalar(DataType.Int)
        self._fusion.record("size", [x], out, {"dims": tuple(axes)})
        return out

    def size(self, x: TensorView, dim: int | Sequence[int]) -> Operand:
        """The unsharded extent of ``dim``; of several dims the product."""
        return self._count(x, normalize_dims("size", x, dim))

    def shape(self, x: TensorView) -> list[Operand]:
        return [self.size(x, k) for k in range(x.ndim)]

    # shapes

    def broadcast(self, x: TensorView, is_broadcast_dim: Sequence[bool]) -> TensorView:
        """New axes of extent 1 where ``is_broadcast_dim``; the others are ``x``'s, in order."""
        flags = tuple(is_broadcast_dim)
        if len([f for f in flags if not f]) != self._tensor("broadcast", x).ndim:
            raise OperandError("broadcast", "is_broadcast_dim", flags, f"{x.ndim} entries that are False")
        rest = iter(x.shape)
        return self._unary("broadcast", x, [1 if f else next(rest) for f in flags], x.dtype, new=flags)

    def broadcast_in_dim(self, x: TensorView, shape: Sequence[Size], broadcast_dims: Sequence[int]) -> TensorView:
        """``x`` expanded to ``shape``; its axis k becomes axis ``broadcast_dims[k]``."""
        if len(broadcast_dims) != self._tensor("broadcast_in_dim", x).ndim:
            raise OperandError("broadcast_in_dim", "broadcast_dims", broadcast_dims, f"{x.ndim} axes")
        wide = self.broadcast(x, [k not in broadcast_dims for k in range(len(shape))])
        return self.expand(wide, shape)

    def expand(self, x: TensorView, shape: Sequence[Size]) -> TensorView:
        """Axes of 1 repeated to ``shape``, -1 keeps an axis."""
        if len(shape) != self._tensor("expand", x).ndim:
            raise OperandError("expand", "shape", shape, f"{x.ndim} sizes")
        sizes = [old if n == -1 else (n if isinstance(n, int) else -1) for n, old in zip(shape, x.shape, strict=True)]
        return self._unary("expand", x, sizes, x.dtype, shape=tuple(shape))

    def squeeze(self, x: TensorView, dims: Sequence[int] | int) -> TensorView:
        axes = normalize_dims("squeeze", x, dims)
        return self._unary("squeeze", x, [n for k, n in enumerate(x.shape) if k not in axes], x.dtype, axes=axes)

    def unsqueeze(self, x: TensorView, dim: int) -> TensorView:
        at = dim % (x.ndim + 1)
        return self.broadcast(x, [k == at for k in range(x.ndim + 1)])

    def permute(self, x: TensorView, dims: Sequence[int]) -> TensorView:
        order = tuple(d % x.ndim for d in dims)
        if sorted(order) != list(range(x.ndim)):
            raise OperandError("permute", "dims", dims, f"a permutation of {x.ndim} axes")
        return self._unary("permute", x, [x.shape[d] for d in order], x.dtype, dims=order)

    def transpose(self, x: TensorView, dim0: int, dim1: int) -> TensorView:
        order = list(range(x.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(x, order)

    def reshape(self, x: TensorView, new_shape: Sequence[Size]) -> TensorView:
        """The same elements in row-major order under ``new_shape``; one size may be -1."""
        sizes = [n if isinstance(n, int) else -1 for n in new_shape]
        return self._unary("reshape", x, sizes, self._tensor("reshape", x).dtype, shape=tuple(new_shape))

    # factories

    def full(self, shape: Sequence[Size], fill_value: Operand, dtype: DataType) -> TensorView:
        out = self._fusion.new_tensor([n if isinstance(n, int) else -1 for n in shape], dtype)
        self._fusion.record("full", [self._operand("full", 1, fill_value)], out, {"shape": tuple(shape)})
        return out

    def iota(self, length: Size, start: int = 0, step: int = 1, dtype: DataType = DataType.Int) -> TensorView:
        """``start + step * k``; k is the unsharded index, however the tensor is sharded."""
        out = self._fusion.new_tensor([length if isinstance(length, int) else -1], dtype)
        self._fusion.record("iota", [], out, {"shape": (length,), "start": start, "step": step})
        return out

    # torch calls

    def _call(self, op: str, operands: Sequence[TensorView], dtype: DataType) -> TensorView:
        *ins, outs = TORCH_CALLS[op].names([self._tensor(op, t).ndim for t in operands])
        sizes: dict[str, int] = {}
        for t, names in zip(operands, ins, strict=True):
            for name, n in zip(names, t.shape, strict=True):
                sizes[name] = n if sizes.get(name, 1) == 1 else sizes[name]
        out = self._fusion.new_tensor([sizes[name] for name in outs], dtype)
        self._fusion.record(op, operands, out)
        return out

    def matmul(self, a: TensorView, b: TensorView) -> TensorView:
        """torch.matmul; where the contracted axis is sharded, partial products and a collective."""
        return self._call("matmul", [a, b], a.dtype)

    def linear(self, x: TensorView, weight: TensorView, bias: TensorView | None = None) -> TensorView:
        """``x @ weight.T + bias``; x [..., k], weight [n, k], bias [n]."""
        return self._call("linear", [x, weight] if bias is None else [x, weight, bias], x.dtype)

    def embedding(self, index: TensorView, weight: TensorView) -> TensorView:
        """Rows of ``weight`` [v, d] at ``index`` (integers, any shape)."""
        return self._call("embedding", [index, weight], weight.dtype)


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> list[int]:
    """numpy's rule as far as sizes are known; -1 where they are not."""
    ndim = max(len(s) for s in shapes)
    out: list[int] = []
    for k in range(1, ndim + 1):
        known = [s[-k] for s in shapes if len(s) >= k and s[-k] != 1]
        out.insert(0, next((n for n in known if n >= 0), -1) if known else 1)
    return out


def normalize_dims(op: str, x: TensorView, dims: Sequence[int] | int | None) -> tuple[int, ...]:
    """Ascending, non-negative; all axes where ``dims`` is None.  Raises ``AxisError`` and ``OperandError``."""
    if dims is None:
        return tuple(range(x.ndim))
    given = [dims] if isinstance(dims, int) else list(dims)
    for d in given:
        if not -x.ndim <= d < x.ndim:
            raise AxisError(f"ops.{op}: {x.name}", "logical", d, x.ndim)
    axes = sorted(d % x.ndim for d in given)
    if len(dict.fromkeys(axes)) != len(axes):
        raise OperandError(op, "dims", dims, "each axis once")
    return tuple(axes)
