"""Text of a bound fusion: one token tells an axis, ``T4[i0/4@mesh_x, i0%4, i1]``."""

from __future__ import annotations

from collections.abc import Mapping

from .digits import Axis, Digit, cut_out
from .domain import BoundDomain
from .expr import BoundFusion, BoundTensor, Expr, Value
from .op import Reshard


def tensor_text(tensor: BoundTensor) -> str:
    """Name, axes with their mesh dimensions, and dtype."""
    axes = ", ".join(axis_text(axis, tensor.domain) for axis in tensor.domain.logical)
    return f"{tensor.name}[{axes}]:{tensor.dtype.name}"


def axis_text(axis: Axis, domain: BoundDomain) -> str:
    if not axis:
        return "1"
    on = {d: p for p, digits in domain.sharding for d in digits}
    pieces: list[Axis] = [axis]
    for d in on:
        for k, piece in enumerate(pieces):
            found = cut_out(piece, d) if piece != (d,) else None
            if found is not None:
                pieces[k : k + 1] = [p for p in (found[0], (d,), found[1]) if p]
                break
    return " ".join(_digit_text(d, on) for piece in pieces for d in piece)


def _digit_text(d: Digit, on: Mapping[Digit, object]) -> str:
    return f"{d}@{on[d]}" if d in on else repr(d)


def expr_text(expr: Expr) -> str:
    outs = ", ".join(tensor_text(t) for t in expr.outputs)
    args = [_value_text(v) for v in expr.inputs]
    told = expr.op.arguments()
    told += [("partial", expr.partial)] if expr.partial else []
    told += [("chunk", expr.chunk)] if expr.chunk is not None else []
    told += [("stream", expr.op.stream)] if isinstance(expr.op, Reshard) and expr.op.stream is not None else []
    return f"{outs} = {expr.op.name}({', '.join([*args, *(f'{name}={value}' for name, value in told)])})"


def _value_text(value: Value) -> str:
    return value.name if isinstance(value, BoundTensor) else repr(value)


def fusion_text(fusion: BoundFusion) -> str:
    inputs = ", ".join(tensor_text(v) if isinstance(v, BoundTensor) else v.name for v in fusion.inputs)
    lines = [f"inputs: {inputs}", *(expr_text(e) for e in fusion.exprs)]
    return "\n".join([*lines, f"outputs: {', '.join(t.name for t in fusion.outputs)}"])
