"""Integers that come with a call, or are worked out in it, beside tensors of a narrower integer type."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import OperandError
from ..source_line import SourceLine
from .dtype import DataType
from .scalar import Number, Scalar


def integers_of(dtype: DataType) -> range:
    """The integers that an integer type takes: its own, and of an unsigned one the negative ones that wrap."""
    info = torch.iinfo(dtype.torch)
    return range(info.min or -info.max, info.max + 1)


@dataclass(frozen=True)
class HeldInteger:
    """An op computes with a scalar in ``dtype``.  ``line``: of the op, in the caller's program."""

    op: str
    argument: str
    dtype: DataType
    line: SourceLine | None

    def check(self, scalar: Scalar, value: Number) -> None:
        """Raise ``OperandError`` where ``dtype`` does not hold ``value``."""
        if isinstance(value, int) and value not in integers_of(self.dtype):
            expected = f"an integer that {self.dtype.name}, in which the op computes, holds: cast the tensor first"
            error = OperandError(self.op, f"{self.argument}, {scalar.name},", value, expected)
            if self.line is not None:
                error.at([str(self.line)])
            raise error


def is_narrow(dtype: DataType) -> bool:
    """Is it an integer type that does not hold all 64-bit integers?"""
    return dtype.is_integral and dtype is not DataType.Bool and dtype.itemsize < DataType.Int.itemsize
