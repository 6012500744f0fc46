"""Host scalars of a definition: those whose value the sizes tell, and what is left to work out in every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.dtype import DataType
from ..ir.expr import HostExpr
from ..ir.held_integers import HeldInteger
from ..ir.op import Cast, HostOp, Pointwise
from ..ir.scalar import Number, Scalar
from ..ops.host import host_value, to_number


class HostScalars:
    """``numbers``: values of the scalar inputs that shapes depend on.

    ``held``: what computes in a narrower integer type with a scalar; ``OperandError`` where that does not hold it.
    """

    def __init__(self, numbers: Mapping[Scalar, Number], held: Mapping[Scalar, tuple[HeldInteger, ...]]) -> None:
        self._held = held
        self._known: dict[Scalar, Scalar] = {
            s: Scalar(s.name, s.dtype, to_number(value, s.dtype)) for s, value in numbers.items()
        }
        self.left: list[HostExpr] = []

    def value(self, scalar: Scalar) -> Scalar:
        """``scalar`` with its value, where that is known."""
        return self._known.get(scalar, scalar)

    def define(self, scalar: Scalar, value: Number) -> None:
        for op in self._held.get(scalar, ()):
            op.check(scalar, value)
        self._known[scalar] = Scalar(scalar.name, scalar.dtype, value)

    def compute(self, op: HostOp, operands: Sequence[Scalar], out: Scalar) -> None:
        """The value of ``out`` now, or a line of every call."""
        values = [v.value for v in operands if v.value is not None]
        if len(values) == len(operands) and isinstance(op, Pointwise | Cast):
            self.define(out, host_value(op, values, out.dtype))
            return
        fresh = Scalar(out.name, out.dtype)
        self._known[out] = fresh
        self.left.append(HostExpr(op, tuple(operands), fresh, self._held.get(out, ())))

    def number(self, scalar: Scalar) -> Number:
        """The number in place of ``scalar`` among the parameters of an op."""
        known = self.value(scalar)
        assert known.value is not None, f"{scalar} is not known when shapes are worked out"
        return int(known.value.real) if known.dtype.is_integral and known.dtype is not DataType.Bool else known.value
