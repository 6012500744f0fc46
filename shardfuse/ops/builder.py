"""What all builders share: operands, records, and pointwise ops by the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, overload

from ..errors import AxisError, OperandError, Words
from ..ir.call import Call
from ..ir.dtype import DataType
from ..ir.fusion import Fusion
from ..ir.held_integers import integers_of
from ..ir.op import Broadcast, Cast, Expand, Permute, Pointwise, Reduce, Reshape, Set, Squeeze
from ..ir.scalar import Number, Scalar, Size
from ..ir.tensor_view import TensorView
from .call_extents import check_fits
from .host import host_type, python_number, wide_type
from .promotion import types
from .table import POINTWISE, Rule, computes
from .torch_calls import TORCH_CALLS

Operand = TensorView | Scalar | Number
Unary = Cast | Set | Broadcast | Expand | Squeeze | Permute | Reshape | Reduce
"""Ops of one tensor, whose parameters say all else."""

INTEGERS_ONLY = (
    *("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "gcd"),
    *("bitwise_left_shift", "bitwise_right_shift", "logical_right_shift"),
    "philox_uniform",
)


class Builder:
    """Records ops in ``fusion``."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion

    def _pointwise(
        self, name: str, operands: Sequence[Operand], called: str | None = None, places: Sequence[str] = ()
    ) -> TensorView | Scalar:
        """``called``, ``places``: the op of the caller's line, and its operands' names there; left out, ``name`` and
        their numbers."""
        op, said = POINTWISE[name], called or name
        if len(operands) != op.arity:
            raise OperandError(said, "the argument list", operands, f"{op.arity} operands")
        named = places or range(len(operands))
        values = [self._operand(said, k, v) for k, v in zip(named, operands, strict=True)]
        if name in INTEGERS_ONLY:
            self._check_integral(said, dict(zip(named, values, strict=True)))
        compute, dtype = types(op, values)
        common = "the common type of the operands"
        if all(isinstance(v, Scalar) for v in values):
            return self._host(name, cast(list[Scalar], values))
        self._check_integers(said, list(zip(named, values, strict=True))[op.rule is Rule.WHERE :], compute)
        if op.rule is Rule.COMPLEX and any(v.dtype.is_complex for v in values):
            raise OperandError(said, common, Words("complex"), "real parts and imaginary parts")
        if (compute.is_complex or compute.is_integral) and not computes(name, compute):
            raise OperandError(said, common, Words(compute.name), "one that this op has in torch: cast them first")
        tensors = [v for v in values if isinstance(v, TensorView)]
        out = self._fusion.new_tensor(broadcast_shape([t.shape for t in tensors]), dtype)
        self._fusion.record(Pointwise(name), values, out)
        return out

    def _check_integral(self, op: str, values: Mapping[int | str, TensorView | Scalar]) -> None:
        for k, v in values.items():
            if not v.dtype.is_integral:
                found = v.value if isinstance(v, Scalar) and v.is_literal else v
                raise OperandError(op, _place(k), found, "an integer or Bool: cast it first")

    def _tensors(self, name: str, *operands: Operand) -> TensorView:
        """As ``_pointwise`` where an operand is a tensor."""
        return cast(TensorView, self._pointwise(name, operands))

    def _host(self, name: str, values: list[Scalar]) -> Scalar:
        """Numbers stay on the host: known when sizes are bound, or worked out in every call."""
        out = self._fusion.new_scalar(host_type(name, values))
        self._fusion.record(Pointwise(name), values, out)
        return out

    def _operand(self, op: str, k: int | str, v: object) -> TensorView | Scalar:
        if isinstance(v, TensorView | Scalar):
            return v
        v = python_number(v)
        if isinstance(v, bool):
            return self._fusion.new_scalar(DataType.Bool, v, is_literal=True)
        if isinstance(v, int):
            if not -(2**63) <= v < 2**64:
                raise OperandError(op, _place(k), v, "an integer of 64 bits, or a float")
            return self._fusion.new_scalar(DataType.Int, v, is_literal=True)
        if isinstance(v, float):
            return self._fusion.new_scalar(DataType.Double, v, is_literal=True)
        if isinstance(v, complex):
            return self._fusion.new_scalar(DataType.ComplexDouble, v, is_literal=True)
        raise OperandError(op, _place(k), v, "a TensorView, a scalar of this fusion, or a number")

    def _tensor(self, op: str, v: object, k: int = 0) -> TensorView:
        if not isinstance(v, TensorView):
            raise OperandError(op, f"operand {k}", v, "a TensorView")
        return v

    def _number_for(self, op: str, argument: str, given: object, dtype: DataType) -> Scalar:
        """A number or a scalar that ``dtype`` can hold but for rounding."""
        value = self._operand(op, argument, given)
        if not isinstance(value, Scalar) or (value.dtype.is_complex and not dtype.is_complex):
            raise OperandError(op, argument, given, f"a number or a scalar for {dtype.name}")
        if not is_held(value, dtype):
            raise OperandError(op, argument, value, f"a number that {dtype.name} holds")
        self._fusion.hold(op, argument, value, dtype)
        return value

    def _check_integers(
        self, op: str, values: Sequence[tuple[int | str, TensorView | Scalar]], compute: DataType
    ) -> None:
        """Constants now, other scalars in every call."""
        for k, v in values:
            if not isinstance(v, Scalar):
                continue
            if not is_held(v, compute):
                wanted = f"a number that {compute.name}, in which the operands are computed, holds"
                raise OperandError(op, _place(k), v.value, f"{wanted}: cast the tensor first")
            self._fusion.hold(op, _place(k), v, compute)

    def _sizes(self, op: str, argument: str, sizes: Sequence[Size]) -> list[Size]:
        """Extents or indices: integers, and integer scalars whose value is not known yet."""
        found = [literal(n) for n in sizes]
        for k, n in enumerate(found):
            if not isinstance(n, int) and not (isinstance(n, Scalar) and n.dtype.is_integral):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise OperandError(op, f"{argument}[{k}]", n, "a number or an integer scalar")
        return found

    def _data_type(self, op: str, dtype: object) -> None:
        if not isinstance(dtype, DataType):
            raise OperandError(op, "dtype", dtype, DataType.expected(dtype))

    def _unary(self, op: Unary, x: TensorView, sizes: Sequence[int], result: DataType) -> TensorView:
        out = self._fusion.new_tensor(sizes, result)
        self._fusion.record(op, [self._tensor(op.name, x)], out)
        return out

    def _call(
        self, op: Call, values: Sequence[TensorView | Scalar], dtypes: Sequence[DataType]
    ) -> tuple[TensorView, ...]:
        """A torch call; ``dtypes``: of its outputs."""
        tensors = [v for v in values if isinstance(v, TensorView)]
        signature = TORCH_CALLS[op.name].signature([t.shape for t in tensors], op)
        sizes = dict(signature.extents)
        for t, names in zip(tensors, signature.inputs, strict=True):
            if len(names) != t.ndim:
                raise OperandError(op.name, t.name, ranked(t), f"one of {len(names)} dims")
            for name, n in zip(names, t.shape, strict=True):
                have = sizes.get(name, 1)
                sizes[name] = n if have == 1 or (have == -1 and n != 1) else have  # 1 beside any number is broadcast
        check_fits(op.name, [t.shape for t in tensors], signature.fits, lambda k: tensors[k].name)
        outputs = [
            self._fusion.new_tensor([sizes[name] for name in names], dtype)
            for names, dtype in zip(signature.outputs, dtypes, strict=True)
        ]
        self._fusion.record(op, values, outputs)
        return tuple(outputs)

    @overload
    def cast(self, x: TensorView, dtype: DataType) -> TensorView: ...

    @overload
    def cast(self, x: Operand, dtype: DataType) -> TensorView | Scalar: ...

    def cast(self, x: Operand, dtype: DataType) -> TensorView | Scalar:
        """``x`` rounded to ``dtype``; ``x`` itself where it has that type."""
        self._data_type("cast", dtype)
        value = self._operand("cast", 0, x)
        if isinstance(value, Scalar):
            out = self._fusion.new_scalar(wide_type(dtype))
            self._fusion.record(Cast(dtype), [value], out)
            return out
        if value.dtype is dtype:
            return value
        return self._unary(Cast(dtype), value, value.shape, dtype)

    def _cast(self, x: TensorView, dtype: DataType) -> TensorView:
        return self.cast(x, dtype)


def ranked(t: TensorView) -> Words:
    """Its number of dims, as an error has it."""
    return Words(f"a tensor of {t.ndim} dims")


def typed(t: TensorView) -> Words:
    """Its dtype, as an error has it."""
    return Words(f"a tensor of {t.dtype.name}")


def _place(k: int | str) -> str:
    return k if isinstance(k, str) else f"operand {k}"


def is_held(number: Scalar, dtype: DataType) -> bool:
    """Does ``dtype`` hold a literal?  Floats round; unsigned integers wrap negative numbers, as C and torch have it."""
    value = number.value
    if not dtype.is_integral or dtype is DataType.Bool or not number.is_literal or not isinstance(value, int | float):
        return True
    taken = integers_of(dtype)
    return taken.start - 1 < value < taken.stop


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> list[int]:
    """numpy's rule as far as sizes are known; -1 where they are not."""
    ndim = max(len(s) for s in shapes)
    out: list[int] = []
    for k in range(1, ndim + 1):
        known = [s[-k] for s in shapes if len(s) >= k and s[-k] != 1]
        out.insert(0, next((n for n in known if n >= 0), -1) if known else 1)
    return out


def normalize_dim(op: str, x: TensorView, dim: int) -> int:
    """Non-negative.  Raises ``AxisError``, and ``OperandError`` for what is no integer."""
    return place_of(op, x, dim, x.ndim)


def dim_of_any(op: str, x: TensorView, dim: int) -> int:
    """As ``normalize_dim``; a single number has, as in torch, dims 0 and -1 too."""
    return place_of(op, x, dim, max(x.ndim, 1))


def place_of(op: str, x: TensorView, dim: int, ndim: int, kind: str = "logical") -> int:
    """``dim`` of ``ndim``, non-negative.  Raises ``AxisError``, and ``OperandError`` for what is no integer."""
    if not isinstance(dim, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OperandError(op, "dim", dim, "an integer")
    if not -ndim <= dim < ndim:
        raise AxisError(f"ops.{op}: {x.name}", kind, dim, ndim)
    return dim % ndim


def normalize_dims(op: str, x: TensorView, dims: Sequence[int] | int | None) -> tuple[int, ...]:
    """Ascending, non-negative; all axes where ``dims`` is None.  Raises ``AxisError`` and ``OperandError``."""
    if dims is None:
        return tuple(range(x.ndim))
    given = [dims] if isinstance(dims, int) else list(dims)
    axes = sorted(normalize_dim(op, x, d) for d in given)
    if len(dict.fromkeys(axes)) != len(axes):
        raise OperandError(op, "dims", dims, "each axis once")
    return tuple(axes)


def static(sizes: Sequence[Size]) -> list[int]:
    """-1 where a size is a scalar of the fusion."""
    return [n if isinstance(n, int) else n.value if n.is_literal and isinstance(n.value, int) else -1 for n in sizes]


def literal(size: Size) -> Size:
    """The number of a constant scalar; any other scalar as it is."""
    if isinstance(size, Scalar) and size.is_literal and isinstance(size.value, int):
        return size.value
    return size
