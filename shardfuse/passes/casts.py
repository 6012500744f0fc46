"""combine_casts: a cast of a widening cast is a cast of the original.

before::

    inputs: T0[i0]:BFloat16
    T1[i0]:Float = cast(T0, dtype=DataType.Float)
    T2[i0]:BFloat16 = cast(T1, dtype=DataType.BFloat16)
    T3[i0]:BFloat16 = neg(T2)
    T4[i0]:Float = exp(T1)
    outputs: T3, T4

after::

    inputs: T0[i0]:BFloat16
    T1[i0]:Float = cast(T0, dtype=DataType.Float)
    T3[i0]:BFloat16 = neg(T0)
    T4[i0]:Float = exp(T1)
    outputs: T3, T4

Narrowing casts stay: they round.  A tensor to which its author gave a sharding or an allocation stays too.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import BoundFusion, BoundTensor, Expr
from ..ir.op import Cast, Set

_EXACT_IN = {
    DataType.Half: (DataType.Float, DataType.Double),
    DataType.BFloat16: (DataType.Float, DataType.Double),
    DataType.Float8_e4m3fn: (DataType.Half, DataType.BFloat16, DataType.Float, DataType.Double),
    DataType.Float8_e5m2: (DataType.Half, DataType.BFloat16, DataType.Float, DataType.Double),
    DataType.Float: (DataType.Double,),
    DataType.Int32: (DataType.Int, DataType.Double),
}
"""The types that hold every value of a type."""


def combine_casts(fusion: BoundFusion) -> None:
    stands_for: dict[BoundTensor, BoundTensor] = {}
    made_by: dict[BoundTensor, Expr] = {}
    exprs: list[Expr] = []
    for expr in fusion.exprs:
        inputs = tuple(stands_for.get(v, v) if isinstance(v, BoundTensor) else v for v in expr.inputs)
        if isinstance(expr.op, Cast):
            source = inputs[0]
            assert isinstance(source, BoundTensor), "a cast is of a tensor"
            before = made_by.get(source)
            if before is not None and isinstance(before.op, Cast) and _is_plain(source):
                original = before.tensors[0]
                if source.dtype in _EXACT_IN.get(original.dtype, ()):
                    inputs = (original,)
            if inputs[0].dtype is expr.output.dtype and expr.output not in fusion.outputs and _is_plain(expr.output):
                assert isinstance(inputs[0], BoundTensor), "a cast is of a tensor"
                stands_for[expr.output] = inputs[0]
                continue
        expr = replace(expr, op=Set() if _is_copy(expr, inputs) else expr.op, inputs=inputs)
        made_by[expr.output] = expr
        exprs.append(expr)
    fusion.exprs = exprs


def _is_plain(tensor: BoundTensor) -> bool:
    return tensor.domain.mesh is None and tensor.domain.allocation is None


def _is_copy(expr: Expr, inputs: tuple[object, ...]) -> bool:
    return isinstance(expr.op, Cast) and isinstance(inputs[0], BoundTensor) and inputs[0].dtype is expr.output.dtype
