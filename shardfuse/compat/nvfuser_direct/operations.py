"""``ops``: nvFuser's signatures over shardfuse's builders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from shardfuse.compat.nvfuser_direct.nvfuser_errors import NvFuserError, translated
from shardfuse.compat.nvfuser_direct.nvfuser_promotion import common_type
from shardfuse.compat.nvfuser_direct.values import handle, plain
from shardfuse.errors import OperandError
from shardfuse.ir.dtype import DataType
from shardfuse.ir.fusion import Fusion
from shardfuse.ir.op import Expand
from shardfuse.ir.scalar import Scalar
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Operand, Ops
from shardfuse.ops.table import POINTWISE

_NAMES = {"mod": "fmod", "complex": "complex"}


def _reduction(op: str) -> Callable[..., Any]:
    """The method: over ``dims``, or ``dim``."""

    @translated
    def reduced(
        self: Operations,
        arg: Any,
        dims: Any = None,
        keepdim: bool = False,
        dtype: DataType | None = None,
        *,
        dim: Any = None,
    ) -> Any:
        return self.reduced(op, arg, dims if dim is None else dim, keepdim, dtype)

    return reduced


class Operations:
    """The ops of one fusion.  Takes and gives handles; numbers and lists of numbers are taken too."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._ops = Ops(fusion)

    @translated
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
        values = self._narrowed([cast(Operand, plain(v)) for v in operands])
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

    def _narrowed(self, values: list[Operand]) -> list[Operand]:
        """An axis that `expand` made takes the extent of one of another extent that it meets, as nvFuser has it."""
        tensors = [v for v in values if isinstance(v, TensorView)]
        for k, v in enumerate(values):
            clash = _clashes(v, tensors) if isinstance(v, TensorView) else []
            made = next((r for r in self._fusion.records if v in r.outputs), None) if clash else None
            if made is not None and isinstance(made.op, Expand):
                wide, shape = cast(TensorView, made.inputs[0]), made.op.shape
                sizes = [1 if d in clash and wide.shape[d] == 1 else n for d, n in enumerate(shape)]
                values[k] = self._ops.expand(wide, sizes)
        return values

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

    def reduced(self, op: str, arg: object, dims: object, keepdim: bool, dtype: DataType | None) -> Any:
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
            return self._showing(x, given, keepdim, self._call(op, x, given, keepdim, chosen))
        out = self._call(op, x, given, keepdim)
        return self._showing(x, given, keepdim, self.cast(out, chosen) if chosen is not None else out)

    @staticmethod
    def _showing(x: object, dims: object, keepdim: bool, out: Any) -> Any:
        """``out`` with the axes that were reduced where nvFuser's loop domains have them."""
        if isinstance(x, TensorView) and not keepdim:
            given = cast("list[int]", dims if isinstance(dims, list) else [dims])
            axes = sorted(range(x.ndim) if dims is None else [d % x.ndim for d in given])
            cast(TensorView, plain(out)).show_reduced([(d, x.shape[d]) for d in axes])
        return out

    sum = _reduction("sum")
    prod = _reduction("prod")
    max = _reduction("max")
    min = _reduction("min")
    amax = max
    amin = min

    @translated
    def var(self, arg: Any, dims: Any, correction: float = 1, keepdim: bool = False) -> Any:
        axes = _axes(arg, dims)
        return self._showing(plain(arg), axes, keepdim, self._call("var", arg, axes, correction, keepdim))

    @translated
    def var_mean(self, arg: Any, dims: Any, correction: float = 1, keepdim: bool = False) -> Any:
        axes = _axes(arg, dims)
        found = self._call("var_mean", arg, axes, correction, keepdim)
        return tuple(self._showing(plain(arg), axes, keepdim, out) for out in found)

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
        _check_slice(arg, *(cast("list[object] | None", plain(v)) for v in (start_indices, end_indices, strides)))
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
        """A weight of three dims is one linear for each of its first: ``[d, *batch, n]``."""
        weight = plain(arg2)
        if isinstance(weight, TensorView) and weight.ndim == 3:
            return self._linears(cast(TensorView, plain(arg1)), weight, cast("TensorView | None", plain(bias)))
        return _contracted(self._call("linear", arg1, arg2, bias), arg1)

    def _linears(self, x: TensorView, weight: TensorView, bias: TensorView | None) -> Any:
        ops, batch = self._ops, x.ndim - 1

        def widened(t: TensorView, new: int) -> TensorView:
            """With ``new`` axes of 1 after the first."""
            return ops.broadcast(t, [False, *[True] * new, *[False] * (t.ndim - 1)])

        out = ops.matmul(ops.unsqueeze(x, 0), widened(ops.permute(weight, [0, 2, 1]), max(batch - 1, 0)))
        if bias is not None:
            out = ops.cast(ops.add(out, widened(bias, batch)), x.dtype)
        return handle(out, self._fusion)

    @translated
    def matmul(self, arg1: Any, arg2: Any) -> Any:
        return _contracted(self._call("matmul", arg1, arg2), arg1)

    @translated
    def sdpfa_fwd(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """The output is laid out as the query is."""
        found = self._call("sdpfa_fwd", query, key, value, *args, **kwargs)
        self._lay_out(found[0], query)
        return found

    @translated
    def sdpfa_bwd(self, grad_output: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Gradients are laid out as what they are of."""
        found = self._call("sdpfa_bwd", grad_output, query, key, value, *args, **kwargs)
        for gradient, operand in zip(found, (query, key, value), strict=True):
            self._lay_out(gradient, operand)
        return found

    def _lay_out(self, out: Any, operand: Any) -> None:
        """Give ``out`` the order of axes in memory that was declared of the input ``operand``."""
        found, x = plain(out), plain(operand)
        places = next((i.stride_order for i in self._fusion.inputs if i.val is x), ())
        if isinstance(found, TensorView) and len(places) == found.ndim:
            order = sorted(range(found.ndim), key=lambda d: -places[d])
            found.set_allocation_domain([found.domain.logical[d] for d in order])

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


def _clashes(tv: TensorView, others: Sequence[TensorView]) -> list[int]:
    """The axes of ``tv`` that meet an axis of another extent, neither being 1."""

    def met(d: int) -> list[int]:
        return [t.shape[d - tv.ndim] for t in others if tv.ndim - d <= t.ndim]

    return [d for d, n in enumerate(tv.shape) if n > 1 and any(m > 1 and m != n for m in met(d))]


def _contracted(out: Any, first: Any) -> Any:
    """``out`` with the axis that a matrix product sums over, last."""
    found, x = plain(out), plain(first)
    if isinstance(found, TensorView) and isinstance(x, TensorView) and x.ndim:
        found.show_reduced([(found.ndim, x.shape[-1])])
    return out


def _no_quantisation(op: str, block: int) -> None:
    if block:
        raise OperandError(op, "output_block_scale_size", block, "0: results are not quantised")


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


def _check_slice(arg: Any, starts: list[object] | None, ends: list[object] | None, steps: list[object] | None) -> None:
    """Raises NvFuserError, in the words that programs written for nvFuser look for, and with what was given."""
    starts, ends = starts or [], ends or []
    given = f"start_indices is {starts}, end_indices is {ends}, strides is {steps or 'left out'}"
    numbers = [(a, b) for a, b in zip(starts, ends, strict=False) if isinstance(a, int) and isinstance(b, int)]
    if len(starts) != len(ends):
        wrong = (
            "Slice start_indices and strides don't match!"
            if steps is not None and len(steps) == len(ends)
            else "Slice indexing attribute dimensions don't match!"
        )
    elif steps is not None and len(steps) != len(starts):
        wrong = "Slice start_indices and strides don't match!"
    elif len(starts) != arg.ndim:
        wrong = f"Number of tensor dimensions does not match slice dimensions! The tensor has {arg.ndim},"
    elif any(isinstance(a, int) and a < 0 for a in starts):
        wrong = "Slice operation start_indices must be greater than or equal to 0."
    elif any(b < a for a, b in numbers):
        wrong = "Slice operation end_indices must be greater than or equal to start_indices."
    elif any(isinstance(n, int) and n != 1 for n in steps or []):
        wrong = "nvFuser Limitation: All slice operation strides must be of const size 1 (shardfuse's own: any)."
    else:
        return
    raise NvFuserError(f"{wrong} {given}")
