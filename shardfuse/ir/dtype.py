"""Element types: nvFuser's names over torch's dtypes."""

from __future__ import annotations

from enum import Enum

import torch


class DataType(Enum):
    """The element type of a TensorView or scalar; ``.torch`` is torch's dtype."""

    Double = "Double"
    Float = "Float"
    Half = "Half"
    BFloat16 = "BFloat16"
    Float8_e4m3fn = "Float8_e4m3fn"
    Float8_e5m2 = "Float8_e5m2"
    Float8_e8m0fnu = "Float8_e8m0fnu"
    Int = "Int"
    Int32 = "Int32"
    Int16 = "Int16"
    Int8 = "Int8"
    UInt8 = "UInt8"
    UInt16 = "UInt16"
    UInt32 = "UInt32"
    UInt64 = "UInt64"
    Bool = "Bool"
    ComplexFloat = "ComplexFloat"
    ComplexDouble = "ComplexDouble"

    @property
    def torch(self) -> torch.dtype:
        return _TORCH[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _TORCH[self].itemsize

    @property
    def is_floating(self) -> bool:
        return _TORCH[self].is_floating_point

    @property
    def is_complex(self) -> bool:
        return _TORCH[self].is_complex

    @property
    def is_integral(self) -> bool:
        """Integers and bool."""
        return not (self.is_floating or self.is_complex)

    @property
    def is_low_precision(self) -> bool:
        """Floats of 16 bits or fewer, which kernels carry as float32."""
        return self.is_floating and self.itemsize <= 2

    @property
    def has_infinity(self) -> bool:
        """Is it a float that has infinities?  Of those of 8 bits two have only finite numbers and NaN."""
        return self.is_floating and self not in (DataType.Float8_e4m3fn, DataType.Float8_e8m0fnu)

    @property
    def compute(self) -> DataType:
        """What arithmetic on this type is done in: float32 for the narrow floats, else the type itself."""
        return DataType.Float if self.is_low_precision else self

    @property
    def accumulator(self) -> DataType:
        """What a sum or product over this type is accumulated in: float32, float64 or int64."""
        if self.is_integral:
            return DataType.Int
        return self.compute

    @staticmethod
    def expected(found: object) -> str:
        """What to pass instead of ``found``, which is no DataType."""
        name = str(found).removeprefix("torch.")
        meant = next((d for d in DataType if name in (str(d.torch).removeprefix("torch."), d.name)), DataType.Float)
        return f"a DataType, as DataType.{meant.name}"

    @staticmethod
    def from_torch(dtype: torch.dtype) -> DataType:
        """Raises ``KeyError`` for a dtype that shardfuse does not know."""
        return _FROM_TORCH[dtype]

    def __repr__(self) -> str:
        return f"DataType.{self.name}"


_TORCH: dict[DataType, torch.dtype] = {
    DataType.Double: torch.float64,
    DataType.Float: torch.float32,
    DataType.Half: torch.float16,
    DataType.BFloat16: torch.bfloat16,
    DataType.Float8_e4m3fn: torch.float8_e4m3fn,
    DataType.Float8_e5m2: torch.float8_e5m2,
    DataType.Float8_e8m0fnu: torch.float8_e8m0fnu,
    DataType.Int: torch.int64,
    DataType.Int32: torch.int32,
    DataType.Int16: torch.int16,
    DataType.Int8: torch.int8,
    DataType.UInt8: torch.uint8,
    DataType.UInt16: torch.uint16,
    DataType.UInt32: torch.uint32,
    DataType.UInt64: torch.uint64,
    DataType.Bool: torch.bool,
    DataType.ComplexFloat: torch.complex64,
    DataType.ComplexDouble: torch.complex128,
}
_FROM_TORCH = {dtype: data_type for data_type, dtype in _TORCH.items()}
