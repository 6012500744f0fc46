"""``fd.ops``: each op checks its operands, works out type and rank, and records itself in the fusion.

Sizes are mostly unknown here; that operands fit is checked when sizes are bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import cast

from ..arguments import checked
from ..errors import OperandError, UnknownOpError
from ..ir.dtype import DataType
from ..ir.tensor_view import TensorView
from .build_random import RandomBuilder
from .builder import Operand, Size, broadcast_shape, normalize_dims
from .host import python_number
from .table import POINTWISE
from .torch_calls import TORCH_CALLS

ALIASES = {
    "true_divide": "div",
    "truediv": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "mod": "fmod",
}
"""Other names, and the op that each stands for."""


def _refused(op: str, argument: str, found: object, expected: str) -> OperandError:
    return OperandError(op, argument, found, DataType.expected(found) if "a DataType" in expected else expected)


@checked(_refused, adapt=python_number)
class Ops(RandomBuilder):
    """Every op of shardfuse.  Pointwise ones take TensorViews, scalars and Python numbers, as numpy broadcasts."""

    def __getattr__(self, name: str) -> Callable[..., TensorView]:
        op = ALIASES.get(name, name)
        if op not in POINTWISE:
            known = [*POINTWISE, *TORCH_CALLS, *ALIASES, *(n for n in dir(type(self)) if not n.startswith("_"))]
            raise UnknownOpError(name, difflib.get_close_matches(name, known, n=2))

        def call(*operands: Operand, **named: object) -> TensorView:
            for argument, value in named.items():
                raise OperandError(name, f"argument {argument!r}", value, "operands by their places, without names")
            return cast(TensorView, self._pointwise(op, operands, name))

        return call

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *POINTWISE, *ALIASES]

    def clamp(self, x: Operand, min: Operand | None = None, max: Operand | None = None) -> TensorView:
        """``x`` between ``min`` and ``max``, either of which may be left out; NaN stays."""
        return self._between("clamp", x, min, max)

    def clip(self, x: Operand, min: Operand | None = None, max: Operand | None = None) -> TensorView:
        """As ``clamp``."""
        return self._between("clip", x, min, max)

    def _between(self, op: str, x: Operand, min: Operand | None = None, max: Operand | None = None) -> TensorView:
        """``op``: the name by which ``clamp`` was called."""
        places = ("x", "min", "max")
        out = x if min is None else self._pointwise("maximum", [x, min], op, places[:2])
        return cast(TensorView, out if max is None else self._pointwise("minimum", [out, max], op, places[::2]))

    def addcmul(self, x: Operand, a: Operand, b: Operand, value: Operand = 1) -> TensorView:
        """``x + value * a * b``."""
        return cast(TensorView, self._pointwise("addcmul", [x, a, b, value]))

    def triu(self, x: TensorView, diagonal: int = 0) -> TensorView:
        """The last two axes from ``diagonal`` upwards, 0 below."""
        return self._triangle("triu", x, diagonal, "ge")

    def tril(self, x: TensorView, diagonal: int = 0) -> TensorView:
        """The last two axes from ``diagonal`` downwards, 0 above."""
        return self._triangle("tril", x, diagonal, "le")

    def _triangle(self, op: str, x: TensorView, diagonal: Size, compare: str) -> TensorView:
        ndim = self._tensor(op, x).ndim
        if ndim < 2:
            normalize_dims(op, x, [-2])
        rows, columns = (cast(Size, self.size(x, k)) for k in (-2, -1))
        i = self.broadcast(self.iota(rows), [False, True])
        j = self.iota(columns)
        kept = self._tensors(compare, j, self._tensors("add", i, diagonal))
        zero = False if x.dtype is DataType.Bool else 0 if x.dtype.is_integral else 0.0
        return self._tensors("where", kept, x, zero)


__all__ = ["Operand", "Ops", "Size", "broadcast_shape", "normalize_dims"]
