"""Host scalars of a definition: those whose value the sizes tell, and what is left to work out in every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ..ir.dtype import DataType
from ..ir.expr import HostExpr, Number, Scalar
from ..ir.fusion import Record
from ..ops.host import host_value, to_number


class HostScalars:
    """``numbers``: values of the scalar inputs that shapes depend on."""

    def __init__(self, numbers: Mapping[Scalar, Number]) -> None:
        self._known: dict[Scalar, Scalar] = {
            s: Scalar(s.name, s.dtype, to_number(value, s.dtype)) for s, value in numbers.items()
        }
        self.left: list[HostExpr] = []

    def value(self, scalar: Scalar) -> Scalar:
        """``scalar`` with its value, where that is known."""
        return self._known.get(scalar, scalar)

    def define(self, scalar: Scalar, value: Number) -> None:
        self._known[scalar] = Scalar(scalar.name, scalar.dtype, value)

    def compute(self, record: Record, operands: Sequence[Scalar], out: Scalar) -> None:
        """The value of ``out`` now, or a line of every call."""
        values = [v.value for v in operands]
        if all(v is not None for v in values) and record.op not in ("rng_seed", "rng_offset"):
            self.define(out, host_value(record.op, cast(list[Number], values), out.dtype))
            return
        fresh = Scalar(out.name, out.dtype)
        self._known[out] = fresh
        self.left.append(HostExpr(record.op, tuple(operands), fresh))

    def resolve(self, attributes: Mapping[str, object]) -> dict[str, object]:
        """``attributes`` with numbers in place of host scalars."""
        return {k: self._resolved(v) for k, v in attributes.items()}

    def _resolved(self, value: object) -> object:
        if isinstance(value, Scalar):
            known = self.value(value)
            assert known.value is not None, f"{value} is not known when shapes are worked out"
            return (
                int(known.value.real) if known.dtype.is_integral and known.dtype is not DataType.Bool else known.value
            )
        if isinstance(value, tuple):
            return tuple(self._resolved(v) for v in cast(tuple[object, ...], value))
        return value
