"""Exprs by torch on plain tensors: the semantics that generated kernels are held to.

``evaluate_local`` runs one Expr on one rank's logical-rank tensors.  Exprs that change a sharding are not its business:
they are collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from ..ir.digits import Axis, Digit, cut_out, extent
from ..ir.dtype import DataType
from ..ir.expr import REDUCTIONS, BoundTensor, Expr, Number, Scalar
from ..ir.layout import local_extent
from . import torch_calls
from .promotion import types
from .table import POINTWISE

Environment = Mapping[BoundTensor, torch.Tensor]
Numbers = Mapping[Scalar, Number]


def evaluate_local(expr: Expr, env: Environment, numbers: Numbers, rank: int, device: torch.device) -> torch.Tensor:
    """The local output of ``expr`` on ``rank``, of the shape that its output's domain gives that rank."""
    inputs = [number(v, numbers) if isinstance(v, Scalar) else env[v] for v in expr.inputs]
    out = expr.output
    if expr.op in POINTWISE:
        return pointwise(expr, inputs, device)
    if expr.op in torch_calls.TORCH_CALLS:
        result = torch_calls.TORCH_CALLS[expr.op].evaluate(cast(list[torch.Tensor], inputs), expr.attributes)
        return result.reshape(out.domain.local_shape(rank))
    if expr.op == "full":
        shape = out.domain.local_shape(rank)
        return torch.full(shape, cast(float, inputs[0]), dtype=out.dtype.torch, device=device)
    if expr.op == "iota":
        return _iota(expr, rank, device)
    x = cast(torch.Tensor, inputs[0])
    if expr.op in REDUCTIONS:
        axes = cast(tuple[int, ...], expr.attributes["axes"])
        return reduce(expr.op, x, axes, out.dtype).reshape(out.domain.local_shape(rank))
    return _shape_op(expr, x, out.domain.local_shape(rank))


def number(scalar: Scalar, numbers: Numbers) -> Number:
    """The value of ``scalar`` in this call."""
    return numbers[scalar] if scalar.value is None else scalar.value


def pointwise(expr: Expr, inputs: Sequence[torch.Tensor | Number], device: torch.device) -> torch.Tensor:
    """Operands are converted as promotion has it, so that torch's own rules for zero-dim tensors do not come in."""
    op = POINTWISE[expr.op]
    compute, result = types(op, expr.inputs)
    operands = [
        torch.as_tensor(v, device=device).to(DataType.Bool.torch if k == 0 and expr.op == "where" else compute.torch)
        for k, v in enumerate(inputs)
    ]
    return op.torch(*operands).to(result.torch)


def _shape_op(expr: Expr, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    match expr.op:
        case "cast":
            return x.to(expr.output.dtype.torch)
        case "set":
            return x.clone()
        case "relabel" | "reshape" | "squeeze":
            return x.reshape(shape)
        case "broadcast":
            for k, new in enumerate(cast(tuple[bool, ...], expr.attributes["new"])):
                x = x.unsqueeze(k) if new else x
            return x.expand(shape)
        case "expand":
            return x.expand(shape)
        case "permute":
            return x.permute(cast(tuple[int, ...], expr.attributes["dims"]))
        case _:
            raise AssertionError(f"no evaluation of {expr.op}")


def _iota(expr: Expr, rank: int, device: torch.device) -> torch.Tensor:
    """Global indices of the only axis, mesh digits at their coordinate, in the order of the local axis."""
    out = expr.output
    domain = out.domain
    start, step = (cast(int, expr.attributes[k]) for k in ("start", "step"))
    (axis,) = domain.logical
    coordinates = domain.coordinates(rank)
    index = torch.zeros((), dtype=torch.int64, device=device)
    (local,) = domain.local_axes()
    for mesh_digit, k in coordinates.items():
        index = index + weight_in(axis, mesh_digit) * k
    for d in local:
        steps = torch.arange(local_extent(d, coordinates), device=device) * weight_in(axis, d)
        index = index.unsqueeze(-1) + steps
    index = index.reshape(-1) if domain.local_shape(rank) != (0,) else index.new_empty((0,))
    return (start + step * index).to(out.dtype.torch)


def weight_in(axis: Axis, digit: Digit) -> int:
    """How far one step of ``digit``, a part of ``axis``, moves along the axis."""
    found = cut_out(axis, digit)
    assert found is not None, f"{digit} is not in {axis}"
    return extent(found[1])


def reduce(op: str, x: torch.Tensor, axes: tuple[int, ...], dtype: DataType) -> torch.Tensor:
    """``op`` over ``axes`` without keepdim; an empty extent gives the identity of ``op``."""
    accumulator = dtype.accumulator.torch
    match op:
        case "sum":
            return x.to(accumulator).sum(axes).to(dtype.torch) if axes else x.to(dtype.torch)
        case "prod":
            x = x.to(accumulator)
            for axis in sorted(axes, reverse=True):
                x = x.prod(axis)
            return x.to(dtype.torch)
        case "any" | "all":
            x = x.to(torch.bool)
            for axis in sorted(axes, reverse=True):
                x = x.any(axis) if op == "any" else x.all(axis)
            return x.to(dtype.torch)
        case "max" | "min":
            if not axes:
                return x
            if any(x.shape[a] == 0 for a in axes):
                shape = [n for k, n in enumerate(x.shape) if k not in axes]
                return torch.full(shape, identity(op, dtype), dtype=dtype.torch, device=x.device)
            if x.dtype == torch.bool:
                return x.to(torch.uint8).amax(axes).bool() if op == "max" else x.to(torch.uint8).amin(axes).bool()
            return x.amax(axes) if op == "max" else x.amin(axes)
        case _:
            raise AssertionError(f"no reduction {op}")


def identity(op: str, dtype: DataType) -> float | int | bool:
    """What ``op`` over nothing gives."""
    match op:
        case "sum" | "any":
            return 0
        case "prod" | "all":
            return 1
        case _:
            if dtype.is_floating:
                return float("-inf") if op == "max" else float("inf")
            if dtype is DataType.Bool:
                return op == "min"
            info = torch.iinfo(dtype.torch)
            return info.min if op == "max" else info.max
