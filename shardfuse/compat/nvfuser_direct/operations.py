"""``ops``: nvFuser's signatures over shardfuse's builders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from shardfuse.compat.nvfuser_direct.errors import NvFuserError, translated
from shardfuse.compat.nvfuser_direct.promotion import common_type
from shardfuse.compat.nvfuser_direct.values import handle, plain
from shardfuse.errors import OperandError
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import Scalar
from shardfuse.ir.fusion import Fusion
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Operand, Ops
from shardfuse.ops.table import POINTWISE

_NAMES = {"mod": "fmod", "complex": "complex"}
_REDUCTIONS = ("sum", "prod", "max", "min")


class Operations:
    """The ops of one fusion.  Takes and gives handles; numbers and lists of numbers are taken too."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._ops = Ops(fusion)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        native = _NAMES.get(name, name)
        if native in POINTWISE or name == "truediv":
            return translated(lambda *operands: self._pointwise(name, native, operands))
        return self._wrapped(_method(self._ops, name))

    def _wrapped(self, function: Callable[..., object]) -> Callable[..., Any]:
        @translated
        def call(*args: object, **kwargs: object) -> object:
            found = function(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()})
            return handle(found, self._fusion)

        return call

    def _call(self, name: str, *args: object, **kwargs: object) -> Any:
        return self._wrapped(_method(self._ops, name))(*args, **kwargs)

    # pointwise

    def _pointwise(self, name: str, native: str, operands: Sequence[object]) -> object:
        values = [cast(Operand, plain(v)) for v in operands]
        promoted = values[1:] if native == "where" else values
        if any(isinstance(v, TensorView) for v in values):
            dtype = common_type(name, promoted)
            self._check(name, values, dtype)
            cast_to = [self._ops.cast(v, dtype) if isinstance(v, TensorView) else v for v in promoted]
            if not any(isinstance(v, TensorView) for v in promoted):  # numbers alone keep their width
                cast_to = [self._ops.full([], v, dtype) for v in promoted if not isinstance(v, TensorView)]
            values = [*values[: len(values) - len(promoted)], *cast_to]
        else:
            dtype = DataType.Int if all(_is_integral(v) for v in promoted) else DataType.Double
        if name == "div" and dtype.is_integral:
            native = "trunc_div"
        native = "div" if native == "truediv" else native
        return handle(_method(self._ops, native)(*values), self._fusion)

    @staticmethod
    def _check(name: str, values: Sequence[Operand], dtype: DataType) -> None:
        if name == "nextafter" and dtype not in (DataType.Float, DataType.Double):
            raise OperandError(name, "the common type", dtype, "Float or Double")
        if name == "where":
            condition = values[0]
            if isinstance(condition, TensorView | Scalar) and condition.dtype is not DataType.Bool:
                raise OperandError(name, "operand 0", condition.dtype, "Bool")
        if name.startswith("bitwise") and not dtype.is_integral:
            raise OperandError(name, "the common type", dtype, "integers or Bool")

    @translated
    def cast(self, arg: object, dtype: DataType) -> Any:
        if not isinstance(dtype, DataType):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OperandError("cast", "dtype", dtype, "a DataType")
        return handle(self._ops.cast(cast(Operand, plain(arg)), dtype), self._fusion)

    # reductions: dim or dims, and types that may be Null

    def _reduced(self, op: str, arg: object, dims: object, keepdim: bool, dtype: DataType | None) -> Any:
        x = plain(arg)
        if not isinstance(x, TensorView):
            raise NvFuserError(f"ops.{op}: operand 0 is {x!r}, expected a TensorView")
        given = plain(dims)
        chosen = None if dtype is None else dtype
        if given == []:
            given = list(range(x.ndim))
        if isinstance(given, DataType):  # (arg, dtype): over all axes
            chosen, given = given, list(range(x.ndim))
        if op in ("sum", "prod"):
            return self._call(op, x, given, keepdim, chosen)
        out = self._call(op, x, given, keepdim)
        return self.cast(out, chosen) if chosen is not None else out

    @translated
    def sum(
        self, arg: Any, dims: Any = None, keepdim: bool = False, dtype: DataType | None = None, *, dim: Any = None
    ) -> Any:
        return self._reduced("sum", arg, _one_of(dims, dim), keepdim, dtype)

    @translated
    def prod(
        self, arg: Any, dims: Any = None, keepdim: bool = False, dtype: DataType | None = None, *, dim: Any = None
    ) -> Any:
        return self._reduced("prod", arg, _one_of(dims, dim), keepdim, dtype)

    @translated
    def max(
        self, arg: Any, dims: Any = None, keepdim: bool = False, dtype: DataType | None = None, *, dim: Any = None
    ) -> Any:
        return self._reduced("max", arg, _one_of(dims, dim), keepdim, dtype)

    @translated
    def min(
        self, arg: Any, dims: Any = None, keepdim: bool = False, dtype: DataType | None = None, *, dim: Any = None
    ) -> Any:
        return self._reduced("min", arg, _one_of(dims, dim), keepdim, dtype)

    amax = max
    amin = min

    @translated
    def var(self, arg: Any, dims: Any, correction: float = 1, keepdim: bool = False) -> Any:
        return self._call("var", arg, _axes(arg, dims), correction, keepdim)

    @translated
    def var_mean(self, arg: Any, dims: Any, correction: float = 1, keepdim: bool = False) -> Any:
        return self._call("var_mean", arg, _axes(arg, dims), correction, keepdim)

    @translated
    def topk(self, arg: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = False) -> Any:
        return self._call("topk", arg, k, dim, largest, sorted)

    @translated
    def cumsum(self, arg: Any, dim: int, init: Any = None) -> Any:
        return self._call("cumsum", arg, _scan_dim("cumsum", arg, dim))

    @translated
    def cumprod(self, arg: Any, dim: int, init: Any = None) -> Any:
        return self._call("cumprod", arg, _scan_dim("cumprod", arg, dim))

    # shapes

    @translated
    def slice(
        self, arg: Any, start_indices: Any, end_indices: Any, strides: Any = None, manual_normalization: bool = False
    ) -> Any:
        for name, given in (("start_indices", start_indices), ("end_indices", end_indices)):
            if any(isinstance(n, int) and n < 0 for n in cast("list[object]", plain(given))):
                raise OperandError("slice", name, given, "indices of 0 or more")
        pairs = zip(cast("list[object]", plain(start_indices)), cast("list[object]", plain(end_indices)), strict=False)
        if any(isinstance(a, int) and isinstance(b, int) and b < a for a, b in pairs):
            raise OperandError("slice", "end_indices", end_indices, f"indices of at least {start_indices}, the start")
        steps = cast("list[object] | None", plain(strides))
        if steps is not None and any(isinstance(n, int) and n != 1 for n in steps):
            raise OperandError(
                "slice", "strides", steps, "steps of 1, as in nvFuser; shardfuse's own slice takes others"
            )
        return self._call("slice", arg, start_indices, end_indices, strides)

    @translated
    def cat(self, tensors: Sequence[Any], dim: int = 0, manual_padding: bool = False) -> Any:
        return self._call("cat", tensors, dim)

    @translated
    def pad(self, arg: Any, pad_widths: Any, value: Any = None) -> Any:
        x, fill = plain(arg), plain(value)
        if isinstance(x, TensorView) and fill is not None and x.dtype.is_complex != _is_complex(fill):
            raise OperandError("pad", "value", value, f"a number of the kind of {x.name}, {x.dtype.name}")
        return self._call("pad", arg, pad_widths, value)

    @translated
    def permute(self, arg: Any, dims: Any) -> Any:
        if any(not isinstance(d, int) for d in cast("Sequence[object]", dims)):
            raise TypeError(f"ops.permute: dims are {dims}, expected integers")
        return self._call("permute", arg, dims)

    @translated
    def reshape(self, arg: Any, new_shape: Any) -> Any:
        return self._call("reshape", arg, _list("reshape", new_shape))

    @translated
    def broadcast_in_dim(self, arg: Any, shape: Any, broadcast_dims: Any) -> Any:
        return self._call("broadcast_in_dim", arg, shape, broadcast_dims)

    @translated
    def full(self, shape: Any, fill_value: Any, dtype: DataType) -> Any:
        return self._call("full", _list("full", shape), fill_value, dtype)

    @translated
    def iota(self, length: Any, start: Any = None, step: Any = None, dtype: DataType = DataType.Int) -> Any:
        return self._call("iota", length, 0 if start is None else start, 1 if step is None else step, dtype)

    @translated
    def embedding_fwd(
        self,
        input: Any,
        weight: Any,
        padding_idx: Any = None,
        max_norm: Any = None,
        norm_type: Any = None,
        scale_grad_by_freq: Any = None,
        sparse: Any = None,
    ) -> Any:
        """The last two parameters are of the gradient and change nothing here."""
        return self._call("embedding", input, weight, padding_idx, max_norm, norm_type)

    @translated
    def triu(self, arg: Any, diagonal: Any = 0) -> Any:
        return self._call("triu", arg, diagonal)

    # matrices

    @translated
    def linear(self, arg1: Any, arg2: Any, bias: Any = None) -> Any:
        return self._call("linear", arg1, arg2, bias)

    @translated
    def grouped_mm(
        self, mat1: Any, mat2: Any, offsets: Any, scale1: Any = None, scale2: Any = None, alpha: Any = None,
        bias: Any = None, beta: Any = None, dtype: DataType | None = None, output_block_scale_size: int = 0,
        output_block_scale_dtype: DataType = DataType.BFloat16, output_gamma: bool = False,
    ) -> Any:  # fmt: skip
        """With scales a tuple of the result and, for the scales of a quantised one, None twice."""
        _no_quantisation("grouped_mm", output_block_scale_size)
        if scale1 is None:
            return self._call("grouped_mm", mat1, mat2, offsets)
        result = dtype or DataType.BFloat16
        out = self._call("scaled_grouped_mm", mat1, mat2, offsets, scale1, scale2, alpha, bias, beta, result)
        return out, None, None

    @translated
    def scaled_mm(
        self, mat1: Any, mat2: Any, scale1: Any, scale2: Any, alpha: Any = None, bias: Any = None, beta: Any = None,
        dtype: DataType = DataType.BFloat16, output_block_scale_size: int = 0,
        output_block_scale_dtype: DataType = DataType.BFloat16, output_gamma: bool = False,
    ) -> Any:  # fmt: skip
        _no_quantisation("scaled_mm", output_block_scale_size)
        return self._call("block_scaled_mm", mat1, mat2, scale1, scale2, alpha, bias, beta, dtype), None, None


def _method(ops: Ops, name: str) -> Callable[..., object]:
    return cast("Callable[..., object]", getattr(ops, name))


def _no_quantisation(op: str, block: int) -> None:
    if block:
        raise OperandError(op, "output_block_scale_size", block, "0: results are not quantised")


def _one_of(dims: object, dim: object) -> object:
    return dims if dim is None else dim


def _axes(arg: object, dims: object) -> object:
    """All axes where none is named."""
    x, given = plain(arg), plain(dims)
    return list(range(x.ndim)) if given == [] and isinstance(x, TensorView) else given


def _scan_dim(op: str, arg: object, dim: object) -> object:
    """A float is a TypeError and a tensor without dims has none, as in nvFuser."""
    x = plain(arg)
    if not isinstance(dim, int):
        raise TypeError(f"ops.{op}: dim is {dim!r}, expected an int")
    if isinstance(x, TensorView) and not x.ndim:
        raise OperandError(op, "operand 0", x, "a tensor of at least 1 dim")
    return dim


def _list(op: str, shape: object) -> object:
    if not isinstance(shape, list | tuple):
        raise TypeError(f"ops.{op}: the shape is {shape!r}, expected a list or tuple")
    return plain(cast("object", shape))


def _is_integral(value: object) -> bool:
    return value.dtype.is_integral if isinstance(value, Scalar) else isinstance(value, int)


def _is_complex(value: object) -> bool:
    return value.dtype.is_complex if isinstance(value, Scalar) else isinstance(value, complex)
