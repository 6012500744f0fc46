"""How each reduction accumulates: its type, the identity that masked lanes get, and the text that combines."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.dtype import DataType
from ..ir.expr import Expr
from .arithmetic import TRITON_TYPE, atom, converted

HELPERS: dict[str, str] = {
    "maximum": '''@triton.jit
def maximum(a, b):
    """The larger; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "minimum": '''@triton.jit
def minimum(a, b):
    """The smaller; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "product": """@triton.jit
def product(a, b):
    return a * b
""",
}


@dataclass(frozen=True)
class Accumulator:
    """``dtype``: carried while reducing.  ``helper``: the combining function, "" for a sum.  ``identity``: text."""

    dtype: DataType
    helper: str
    identity: str
    is_logical: bool

    @property
    def is_exact(self) -> bool:
        """Is the result one of what was reduced?"""
        return self.helper in ("maximum", "minimum")

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
        case "online_softmax":
            return _extreme("max", expr.tensors[0].dtype), *(_sum(t.dtype) for t in expr.outputs[1:])
        case "welford":
            return _sum(expr.output.dtype), _sum(expr.output.dtype)
        case _:
            return (accumulator(expr),)


def accumulator(expr: Expr) -> Accumulator:
    """How the reduction ``expr`` accumulates."""
    match expr.op:
        case "sum":
            return _sum(expr.output.dtype)
        case "prod":
            dtype = expr.output.dtype.accumulator
            return Accumulator(dtype, "product", "1.0" if dtype.is_floating else "1", False)
        case "any":
            return Accumulator(DataType.Int32, "maximum", "0", True)
        case "all":
            return Accumulator(DataType.Int32, "minimum", "1", True)
        case "max" | "min":
            return _extreme(expr.op, expr.tensors[0].dtype)
        case _:
            raise AssertionError(f"{expr.op} is no reduction")


def _sum(result: DataType) -> Accumulator:
    dtype = result.accumulator
    return Accumulator(dtype, "", "0.0" if dtype.is_floating else "0", False)


def _extreme(op: str, source: DataType) -> Accumulator:
    helper = "maximum" if op == "max" else "minimum"
    if source is DataType.Bool:
        return Accumulator(DataType.Int32, helper, "0" if op == "max" else "1", True)
    if source.is_floating:
        return Accumulator(source.compute, helper, f'float("{"-inf" if op == "max" else "inf"}")', False)
    bits = 8 * source.itemsize
    is_signed = not source.name.startswith("UInt")
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    return Accumulator(source, helper, str(low if op == "max" else high), False)
