"""nvFuser's enumerations."""

from __future__ import annotations

from enum import Enum

from shardfuse.ir import dtype as native


class _Types(type):
    """``isinstance`` is shardfuse's DataType's; what is missing says so."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, native.DataType)

    def __getattr__(cls, name: str) -> native.DataType:
        if name.startswith("Float4"):
            raise AttributeError(f"DataType.{name}: 4-bit floats are not supported by shardfuse")
        raise AttributeError(f"DataType has no {name}")


class DataType(metaclass=_Types):
    """shardfuse's DataType under nvFuser's names; ``Null`` is no type, ``Index`` is Int."""

    Double = native.DataType.Double
    Float = native.DataType.Float
    Half = native.DataType.Half
    BFloat16 = native.DataType.BFloat16
    Int = native.DataType.Int
    Int32 = native.DataType.Int32
    UInt64 = native.DataType.UInt64
    Index = native.DataType.Int
    Bool = native.DataType.Bool
    Float8_e4m3fn = native.DataType.Float8_e4m3fn
    Float8_e5m2 = native.DataType.Float8_e5m2
    Float8_e8m0fnu = native.DataType.Float8_e8m0fnu
    ComplexFloat = native.DataType.ComplexFloat
    ComplexDouble = native.DataType.ComplexDouble
    Null = None


class CommunicatorBackend(Enum):
    """What carries collectives.  shardfuse takes torch.distributed's NCCL or gloo."""

    nccl = "nccl"
    ucc = "ucc"
    cuda = "cuda"


class MemoryType(Enum):
    """Where a TensorView lies; shardfuse decides by itself."""

    tensor = "tensor"
    local = "local"
    shared = "shared"
    global_ = "global"
    symmetric = "symmetric"


class SchedulerType(Enum):
    """What runs a segment."""

    none = "none"
    no_op = "no_op"
    pointwise = "pointwise"
    matmul = "matmul"
    reduction = "reduction"
    inner_persistent = "inner_persistent"
    inner_outer_persistent = "inner_outer_persistent"
    outer_persistent = "outer_persistent"
    transpose = "transpose"
    expr_eval = "expr_eval"
    resize = "resize"
