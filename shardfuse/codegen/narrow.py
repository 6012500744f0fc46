"""Narrow floats as torch rounds to them: Triton's interpreter rounds bfloat16 otherwise, and 8-bit floats saturate."""

from __future__ import annotations

import torch

from ..ir.dtype import DataType
from ..kernel_functions import texts_of
from .arithmetic import TRITON_TYPE, atom

_NAMES = {DataType.Float8_e4m3fn: "float8e4nv", DataType.Float8_e5m2: "float8e5"}

SATURATES = bool(torch.tensor(1e4, device="cpu").to(torch.float8_e4m3fn).float() == 448.0)
"""Does this torch give float8_e4m3fn's largest number for what is larger?  It has done so since 2.13, before NaN."""

_ON_GPU = {
    DataType.Float8_e4m3fn: '''@triton.jit
def to_float8e4nv(x):
    """Round float32 as torch does: {said} from where it would be more than 448."""
    return {text}.to(tl.float8e4nv)
'''.format(
        said="no more" if SATURATES else "NaN",
        text="x" if SATURATES else 'tl.where(tl.abs(x) > 464.0, float("nan"), x)',
    ),
    DataType.Float8_e5m2: '''@triton.jit
def to_float8e5(x):
    """Round float32 as torch does: infinity from where it would be more than 57344."""
    y = x.to(tl.float8e5).to(tl.int8, bitcast=True)
    over = tl.where(x > 0, 124, -4).to(tl.int8)
    return tl.where(tl.abs(x) >= 61440.0, over, y).to(tl.float8e5, bitcast=True)
''',
}

_BY_HAND = '''@triton.jit
def round_{name}(x):
    """The nearest {name}, ties to even, as float32: Triton's interpreter rounds otherwise."""
    a = tl.minimum(tl.abs(x), 131072.0)
    e = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 127, {least})
    step = ((e + {step}) << 23).to(tl.float32, bitcast=True)
    y = tl.where(a {over}, {beyond}, ((a / step + 8388608.0) - 8388608.0) * step)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return tl.where(x == x, (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), x)


@triton.jit
def to_{name}(x):
    """The bits of ``round_{name}``."""
    y = round_{name}(x)
    a = tl.abs(y)
    e = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 127, {least})
    step = ((e + {step}) << 23).to(tl.float32, bitcast=True)
    code = tl.where(a <= {largest}, a, 0.0) / step
    code = code.to(tl.int32) + ((e + {bias}) << {mantissa})
    code = tl.where(a <= {largest}, code, tl.where(a == float("inf"), 124, 127))
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 128
    return (code | sign).to(tl.uint8).to(tl.{name}, bitcast=True)
'''
_FORMS = {
    DataType.Float8_e4m3fn: {
        "least": -6, "step": 124, "over": "> 464.0", "beyond": "448.0" if SATURATES else 'float("nan")',
        "largest": 448.0, "bias": 6, "mantissa": 3,
    },
    DataType.Float8_e5m2: {
        "least": -14, "step": 125, "over": ">= 61440.0", "beyond": 'float("inf")',
        "largest": 57344.0, "bias": 14, "mantissa": 2,
    },
}  # fmt: skip
"""Of each 8-bit type: the exponent of its least normal number, float32's exponent field of 1.0's last place, when and
to what it overflows, its largest number, its bias and the bits of its mantissa."""


def helpers(dtype: DataType, *, interpret: bool) -> dict[str, str]:
    """Functions that round float32 to ``dtype``, by name, where Triton's conversion does not do."""
    if dtype is DataType.BFloat16 and interpret:
        return texts_of("to_bfloat16", interpret=True)
    if dtype not in _NAMES:
        return {}
    name = _NAMES[dtype]
    return {f"to_{name}": _BY_HAND.format(name=name, **_FORMS[dtype]) if interpret else _ON_GPU[dtype]}


def saturating(text: str, dtype: DataType) -> str:
    """``text`` converted as a GPU does: what is larger than the largest number of ``dtype`` is that number."""
    return f"{atom(text)}.to(tl.{_NAMES[dtype]})"


def rounded(text: str, dtype: DataType, *, interpret: bool) -> str:
    """The float32 ``text`` rounded to the narrow ``dtype``, as float32."""
    assert dtype.is_low_precision, f"{dtype.name} is not carried as float32"
    if interpret and dtype is DataType.BFloat16:
        return f"to_bfloat16({text})"
    if dtype in _NAMES:
        return f"round_{_NAMES[dtype]}({text})" if interpret else f"to_{_NAMES[dtype]}({text}).to(tl.float32)"
    return f"{atom(text)}.to({TRITON_TYPE[dtype]}).to(tl.float32)"


def stored(text: str, dtype: DataType, *, interpret: bool) -> str:
    """``text`` so that a store to ``dtype`` rounds it rightly."""
    if interpret and dtype is DataType.BFloat16:
        return f"{text}.to(tl.bfloat16)"
    return f"to_{_NAMES[dtype]}({text})" if dtype in _NAMES else text
