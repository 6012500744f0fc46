"""How each reduction accumulates: its type, the identity that masked lanes get, and the text that combines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ..ir.dtype import DataType
from ..ir.expr import Expr
from ..ir.op import Reduce, ReductionKind, Statistic
from ..ops.reductions import REDUCTION_TABLE
from .arithmetic import TRITON_TYPE, atom, converted


@dataclass(frozen=True)
class Accumulator:
    """``dtype``: carried while reducing.  ``helper``: the combining function, "" for a sum.  ``identity``: text.

    ``is_logical``: truth values are carried as numbers.  ``is_exact``: the result is one of what was reduced.
    """

    dtype: DataType
    helper: str
    identity: str
    is_logical: bool
    is_exact: bool

    def prepared(self, text: str, found: DataType) -> str:
        """One value, as it is combined."""
        if self.is_logical:
            text, found = (text, found) if found is DataType.Bool else (f"{atom(text)} != 0", DataType.Bool)
        return converted(text, found, self.dtype)

    def combined(self, a: str, b: str) -> str:
        return f"{self.helper}({a}, {b})" if self.helper else f"{a} + {b}"

    def reduced(self, text: str, axis: int) -> str:
        if not self.helper:
            return f"tl.sum({text}, axis={axis})"
        return f"tl.reduce({text}, {axis}, {self.helper})"

    def finished(self, text: str, wanted: DataType) -> str:
        """The reduced value, carried as ``wanted``."""
        if self.is_logical or wanted is DataType.Bool:
            return f"{atom(text)} != 0"
        return converted(text, self.dtype, wanted)

    @property
    def neutral(self) -> str:
        """The identity as an operand of ``tl.where``; small integers are spelled out, a bare one would widen them."""
        if self.dtype in (DataType.Float, DataType.Double, DataType.Int32, DataType.Int):
            return self.identity
        return f"tl.full([], {self.identity}, {TRITON_TYPE[self.dtype]})"

    def start(self, shape: str) -> str:
        if self.identity in ("0", "0.0"):
            return f"tl.zeros({shape}, {TRITON_TYPE[self.dtype]})"
        return f"tl.full({shape}, {self.identity}, {TRITON_TYPE[self.dtype]})"


def accumulators(expr: Expr) -> tuple[Accumulator, ...]:
    """How each output of the reduction ``expr`` is carried."""
    match expr.op:
        case Statistic("online_softmax"):
            source, *sums = (expr.tensors[0].dtype, *(t.dtype for t in expr.outputs[1:]))
            return _carried("max", source, source), *(_carried("sum", dtype, dtype) for dtype in sums)
        case Statistic("welford"):
            return (_carried("sum", expr.output.dtype, expr.output.dtype),) * 2
        case _:
            return (accumulator(expr),)


def accumulator(expr: Expr) -> Accumulator:
    """How the reduction ``expr`` accumulates."""
    assert isinstance(expr.op, Reduce), f"{expr.op.name} is no reduction"
    return _carried(expr.op.kind, expr.tensors[0].dtype, expr.output.dtype)


def _carried(op: ReductionKind, source: DataType, result: DataType) -> Accumulator:
    found = REDUCTION_TABLE[op]
    dtype = found.carried(source, result)
    identity, is_logical = found.identity(dtype), dtype is DataType.Bool
    if dtype.is_floating:
        text = f'float("{identity}")' if isinstance(identity, float) else f"{identity}.0"
    else:
        text = str(int(cast(int, identity)))
    return Accumulator(DataType.Int32 if is_logical else dtype, found.combine, text, is_logical, found.is_exact)
