"""Arithmetic on host scalars: sizes, and what is computed from scalar inputs."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..ir.dtype import DataType
from ..ir.op import Cast, Pointwise
from ..ir.scalar import Number, Scalar
from .table import POINTWISE, Rule

_WIDE = (DataType.Bool, DataType.Int, DataType.Double, DataType.ComplexDouble)
"""The types of host arithmetic, by category: Python's own."""

_DIRECT = cast(
    "dict[str, Callable[..., Number]]",
    {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "neg": operator.neg,
        "maximum": max,
        "minimum": min,
    },
)
"""What integers need no torch for."""


def python_number(value: Any) -> Any:
    """Python's own number of a NumPy scalar; anything else as it is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, cast(Any, numpy).generic) else value


def wide_type(dtype: DataType) -> DataType:
    """The host type that holds ``dtype``."""
    if dtype is DataType.Bool:
        return dtype
    return _WIDE[1 if dtype.is_integral else 2 if dtype.is_floating else 3]


def host_type(op: str, operands: Sequence[Scalar]) -> DataType:
    """The type of ``op`` on host scalars."""
    entry = POINTWISE[op]
    considered = operands[1:] if entry.rule is Rule.WHERE else operands
    common = max((wide_type(v.dtype) for v in considered), key=_WIDE.index)
    match entry.rule:
        case Rule.BOOL | Rule.LOGICAL:
            return DataType.Bool
        case Rule.DRAW:
            return DataType.Double
        case Rule.FLOAT:
            return DataType.Double if common.is_integral else common
        case Rule.REAL:
            return DataType.Double if common.is_complex else common
        case _:
            return common


def host_value(op: Pointwise | Cast, values: Sequence[Number], dtype: DataType) -> Number:
    """``op`` on numbers; ``dtype``: of the result.  Integers are 64 bits wide and division by 0 is torch's."""
    if isinstance(op, Cast):
        return to_number(values[0], dtype)
    if op.name in _DIRECT and not isinstance(values[0], bool) and DataType.Int is dtype:
        return _wrapped(cast(int, _DIRECT[op.name](*values)))
    entry = POINTWISE[op.name]
    compute = max((number_type(v) for v in (values[1:] if entry.rule is Rule.WHERE else values)), key=_WIDE.index)
    if entry.rule is Rule.FLOAT and compute.is_integral:
        compute = DataType.Double
    if entry.rule is Rule.LOGICAL:
        compute = DataType.Bool
    operands = [
        torch.tensor(v, dtype=torch.bool if entry.rule is Rule.WHERE and k == 0 else compute.torch, device="cpu")
        for k, v in enumerate(values)
    ]
    return cast(Number, entry.torch(*operands).to(dtype.torch).item())


def to_number(value: Number, dtype: DataType) -> Number:
    """``value`` as Python's number of ``dtype``'s category."""
    if dtype is DataType.Bool:
        return bool(value)
    if dtype.is_complex:
        return complex(value)
    real = value.real if isinstance(value, complex) else value
    if not dtype.is_integral:
        return float(real)
    if isinstance(real, float) and not abs(real) < 2.0**63:  # infinite, NaN or too large: what the CPU makes of it
        return cast(int, torch.tensor(real, dtype=torch.float64, device="cpu").to(torch.int64).item())
    return int(real)


def rounded_number(value: Number, dtype: torch.dtype) -> Number:
    """``value`` as a tensor of ``dtype`` has it after a cast: what is too large is infinite, where torch raises."""
    if dtype.is_floating_point and dtype.itemsize <= 2 and isinstance(value, int):
        value = torch.full((), value, dtype=torch.float32, device="cpu").item()
    if not (dtype.is_floating_point or dtype.is_complex) or not isinstance(value, float | complex):
        return value
    wide = torch.complex128 if isinstance(value, complex) else torch.float64
    return cast(Number, torch.tensor(value, dtype=wide, device="cpu").to(dtype).item())


def _wrapped(value: int) -> int:
    """The 64 bits of ``value``, as torch's int64."""
    return (value + 2**63) % 2**64 - 2**63


def number_type(value: Number) -> DataType:
    """The type of a host scalar that is ``value``."""
    if isinstance(value, bool):
        return DataType.Bool
    if isinstance(value, int):
        return DataType.Int
    return DataType.Double if isinstance(value, float) else DataType.ComplexDouble
