"""Types, literals and operations as Triton text.

Narrow floats are carried as float32 and rounded to their own dtype after each op whose result they may not hold, so
that a value does not depend on where a fusion is cut into kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.scalar import Number, Scalar
from ..ops.promotion import types
from ..ops.table import POINTWISE, Rule

TRITON_TYPE: dict[DataType, str] = {
    DataType.Double: "tl.float64",
    DataType.Float: "tl.float32",
    DataType.Half: "tl.float16",
    DataType.BFloat16: "tl.bfloat16",
    DataType.Float8_e4m3fn: "tl.float8e4nv",
    DataType.Float8_e5m2: "tl.float8e5",
    DataType.Int: "tl.int64",
    DataType.Int32: "tl.int32",
    DataType.Int16: "tl.int16",
    DataType.Int8: "tl.int8",
    DataType.UInt8: "tl.uint8",
    DataType.UInt16: "tl.uint16",
    DataType.UInt32: "tl.uint32",
    DataType.UInt64: "tl.uint64",
    DataType.Bool: "tl.int1",
}

_ON_BOOL = {
    "add": "{0} | {1}", "mul": "{0} & {1}", "maximum": "{0} | {1}", "minimum": "{0} & {1}", "relu": "{0}", "abs": "{0}",
}  # fmt: skip
"""One-bit integers are signed and wrap: what the table's arithmetic on them would get wrong."""
_ORDERED = ("lt", "le", "gt", "ge")
_WHOLE = ("floor", "ceil")

LIBDEVICE = {
    False: "from triton.language.extra import libdevice\n",
    True: "from shardfuse.kernel_functions.interpreted import libdevice\n",
}
"""Where a kernel has CUDA's math library from: on a GPU, and under the interpreter."""


def converted(text: str, found: DataType, wanted: DataType) -> str:
    """``text``, carried as ``found``, in the type ``wanted`` (both of them types that values are carried in)."""
    return text if found is wanted else f"{atom(text)}.to({TRITON_TYPE[wanted]})"


def atom(text: str) -> str:
    """``text`` so that a method can be called on it."""
    return text if text.replace("_", "").isalnum() or _is_call(text) else f"({text})"


def _is_call(text: str) -> bool:
    """One call, or a chain of them, up to the last character: ``tl.exp(T0)``, ``T0.to(tl.int32)``."""
    if not text.endswith(")") or not text[0].isalpha():
        return False
    depth = 0
    for c in text:
        depth += (c in "([") - (c in ")]")
        if depth == 0 and c in " ":
            return False
    return True


def literal(value: Number, dtype: DataType) -> str:
    """``value`` as text of the type ``dtype``.  Float64 is spelled out: Triton reads a bare number as float32."""
    if dtype.is_floating:
        assert not isinstance(value, complex)
        return _float_literal(float(value), is_double=dtype is DataType.Double)
    if dtype is DataType.Bool:
        return f"tl.full([], {int(bool(value))}, tl.int1)"
    assert not isinstance(value, complex)
    is_unsigned = dtype.name.startswith("UInt")
    return repr(int(value) % (1 << 8 * dtype.itemsize) if is_unsigned else int(value))


_SMALLEST_NORMAL, _BEYOND_FLOAT = 2.0**-126, 2.0**128 - 2.0**104
"""Of float32: below the first it is a denormal, from the second on it rounds to infinity."""


def _float_literal(number: float, *, is_double: bool) -> str:
    """Triton takes a zero for +0, and what float32 holds only as a denormal, or not at all, for float64."""
    if number == 0 and math.copysign(1, number) < 0:
        width = 64 if is_double else 32
        return f"tl.full([], {-(1 << width - 1)}, tl.int{width}).to(tl.float{width}, bitcast=True)"
    if not is_double and not _SMALLEST_NORMAL <= abs(number) < _BEYOND_FLOAT:
        number = torch.tensor(number, dtype=torch.float64, device="cpu").float().item()
    text = repr(number) if math.isfinite(number) else f'float("{number}")'
    if is_double:
        return f"tl.full([], {text}, tl.float64)"
    return f"tl.full([], {text}, tl.float32)" if 0 < abs(number) < _SMALLEST_NORMAL else text


def pointwise_form(
    expr: Expr, operands: Sequence[str], carried: Sequence[DataType], *, is_precise: bool, is_rough: bool = False,
    is_rounded: bool = False,
) -> tuple[str, list[str], DataType]:  # fmt: skip
    """The op's text with places for operands, ``operands`` converted to the type that it computes in, and its own type.

    ``is_rounded``: a product is rounded before anything is added to it.
    """
    op = POINTWISE[expr.op.name]
    compute, result = types(op, expr.inputs)
    texts: list[str] = []
    for k, (text, found) in enumerate(zip(operands, carried, strict=True)):
        wanted = DataType.Bool if op.rule is Rule.WHERE and k == 0 else compute
        if wanted is DataType.Bool and op.name in _ORDERED:
            wanted = DataType.Int32
        texts.append(converted(text, found, wanted))
    form = op.precise if is_precise and op.precise and result is DataType.Float else op.triton
    if op.on_floats and compute.is_floating:
        form = op.on_floats
    if is_rough and op.rough and result is DataType.Float:
        form = op.rough
    form = op.by_its_number(expr.inputs) or form
    assert form is not None, f"{op.name} has no Triton text"
    if compute is DataType.Bool:
        form = _ON_BOOL.get(op.name, form)
    if op.name in _WHOLE and compute.is_integral:
        form = "{0}"
    if is_rounded:
        a, b = form.split(" * ")
        form = f"{'rounded_product' if compute is DataType.Float else 'libdevice.mul_rn'}({a}, {b})"
    return form, texts, result.compute


def must_round(expr: Expr) -> bool:
    """May the result of the pointwise ``expr`` be no number of its narrow dtype?"""
    result = expr.output.dtype
    if not result.is_low_precision:
        return False
    op = POINTWISE[expr.op.name]
    if not op.exact:
        return True
    values = expr.inputs[1:] if op.rule is Rule.WHERE else expr.inputs
    return not all(_fits(v, result) for v in values)


def _fits(value: BoundTensor | Scalar, dtype: DataType) -> bool:
    if isinstance(value, BoundTensor):
        return value.dtype is dtype
    number = value.value
    if not value.is_literal or number is None or isinstance(number, complex):
        return False
    largest = 16 if dtype.itemsize > 1 else 8
    return not math.isfinite(number) or (number == int(number) and abs(number) <= largest)


_ON_FLOAT32 = ("erf", "sigmoid")
"""Functions that are faster than Triton's own of these names."""
_WITH_ASSEMBLY = ("sigmoid",)
"""What Triton's interpreter does not run."""
_CALLED = ("power_of_two", "erf_for_one", "rough_erfc", "rough_gelu_slope", "gelu", "philox_uniform")
"""What forms call by these names."""


def own_functions(form: str, dtype: DataType, *, interpret: bool) -> tuple[str, list[str]]:
    """``form`` of an op whose type is ``dtype``, with own functions instead of Triton's, and those that it calls."""
    found: list[str] = []
    for name in _ON_FLOAT32:
        if dtype is DataType.Float and f"tl.{name}(" in form and not (interpret and name in _WITH_ASSEMBLY):
            form = form.replace(f"tl.{name}(", f"{name}(")
            found.append(name)
    if form.startswith("rounded_product("):
        found.append("rounded_product")
    return form, found + [name for name in _CALLED if f"{name}(" in form]


def number_text(value: Number, dtype: DataType, *, interpret: bool) -> tuple[str, list[str]]:
    """``value`` as text of the type ``dtype``, and the functions that the text calls.

    LLVM crashes where it folds a function of a denormal.
    """
    if interpret or not dtype.is_floating or dtype is DataType.Double or isinstance(value, complex):
        return literal(value, dtype), []
    single = torch.tensor(float(value), dtype=torch.float64, device="cpu").float()
    if not 0 < single.abs().item() < torch.finfo(torch.float32).tiny:
        return literal(value, dtype), []
    return f"denormal({single.view(torch.int32).item()})", ["denormal"]
