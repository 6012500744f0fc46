"""Exprs by torch on plain tensors: the semantics that generated kernels are held to.

``evaluate_local`` runs one Expr on one rank's logical-rank tensors.  Exprs that change a sharding are not its business:
they are collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import cast

import torch

from ..errors import IndexRangeError
from ..ir.call import Call, WithRoles
from ..ir.caller_lines import definitions_name
from ..ir.digits import Axis, Digit, cut_out, extent, parted
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.held_integers import is_narrow
from ..ir.layout import local_extent
from ..ir.op import (
    Broadcast,
    Cast,
    Expand,
    Full,
    Iota,
    Move,
    OfRank,
    Permute,
    Pick,
    Pointwise,
    Random,
    Reduce,
    Relabel,
    Reshape,
    Reshard,
    Set,
    Squeeze,
    Statistic,
    StreamCat,
    StreamSlice,
    ViewOp,
    Window,
)
from ..ir.scalar import Number, Scalar
from ..ir.stream import Stream
from ..ir.window import Read
from . import random
from .call_signature import Indexed
from .host import rounded_number
from .moved_bits import moved
from .promotion import types
from .reductions import REDUCTION_TABLE
from .table import POINTWISE, Rule
from .torch_calls import TORCH_CALLS

Environment = Mapping[BoundTensor, torch.Tensor]
Numbers = Mapping[Scalar, Number]


def evaluate_local(expr: Expr, env: Environment, numbers: Numbers, rank: int, device: torch.device) -> torch.Tensor:
    """The local output of ``expr`` on ``rank``, of the shape that its output's domain gives that rank."""
    return evaluate_all(expr, env, numbers, rank, device)[0]


def evaluate_all(
    expr: Expr, env: Environment, numbers: Numbers, rank: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """As ``evaluate_local``, every output."""
    inputs = [number(v, numbers) if isinstance(v, Scalar) else env[v] for v in expr.inputs]
    shapes = [t.domain.local_shape(rank) for t in expr.outputs]
    if isinstance(expr.op, Call):
        found = _called(expr, expr.op, inputs, rank, device)
        return tuple(t.reshape(shape) for t, shape in zip(found, shapes, strict=True))
    return (_evaluated(expr, inputs, shapes[0], rank, device),)


def _called(
    expr: Expr, op: Call, inputs: list[torch.Tensor | Number], rank: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The results of one call of torch."""
    call, values = TORCH_CALLS[op.name], _of_what_is_here(expr, op, inputs)
    if call.indexed is not None:
        _check_indices(expr, values, call.indexed(op))
    if call.evaluate_drawing is not None and isinstance(op, WithRoles):
        query = expr.inputs[op.roles.index("query")]
        assert isinstance(query, BoundTensor), "a query is a tensor"
        result = call.evaluate_drawing(values, op, lambda: _rows(query.domain, rank, device))
    else:
        result = call.evaluate(values, op)
    return (result,) if isinstance(result, torch.Tensor) else result


def _evaluated(
    expr: Expr, inputs: Sequence[torch.Tensor | Number], shape: tuple[int, ...], rank: int, device: torch.device
) -> torch.Tensor:
    """The one result of ``expr``, which is no call of torch."""
    op, out = expr.op, expr.output
    match op:
        case Pointwise():
            return pointwise(expr, inputs, device)
        case Full():
            return _operand(inputs[0], out.dtype, device).expand(shape).clone()
        case Iota():
            return _iota(op, out, rank, device)
        case Random():
            return _draw(op, out, cast(Sequence[Number], inputs), rank, device)
        case StreamCat(stream):
            return _put_together(stream, out, cast(Sequence[torch.Tensor], inputs), rank)
        case Call() | Reshard() | Move() | Statistic() | Pick() | OfRank():
            raise AssertionError(f"no evaluation of {op.name}")
        case _:
            return _of_one(expr, op, cast(torch.Tensor, inputs[0]), shape, rank)


def _of_one(
    expr: Expr,
    op: Cast | Set | ViewOp | Relabel | Window | Reduce | StreamSlice,
    x: torch.Tensor,
    shape: tuple[int, ...],
    rank: int,
) -> torch.Tensor:
    """The result of an op of one tensor."""
    out = expr.output
    match op:
        case Cast():
            return x.to(out.dtype.torch)
        case Set():
            return x.clone()
        case Relabel() | Reshape() | Squeeze() | Broadcast() | Expand() | Permute():
            return view_of(op, shape)(x)
        case Window():
            return _window(x, shape, op.reads)
        case Reduce():
            return REDUCTION_TABLE[op.kind].torch(x, op.axes, out.dtype).reshape(shape)
        case StreamSlice():
            return _stream_slice(expr, op.stream, x, rank).reshape(shape)


def view_of(op: ViewOp | Relabel, shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives the result of ``op``, of local ``shape``, for its one tensor; a call of it asks torch alone."""
    match op:
        case Relabel() | Reshape() | Squeeze():
            return lambda x: x.reshape(shape)
        case Broadcast():
            before = tuple(slice(None) if not new else None for new in op.new)
            return lambda x: x[before].expand(shape)
        case Expand():
            return lambda x: x.expand(shape)
        case Permute():
            return lambda x: x.permute(op.dims)


def _check_indices(expr: Expr, values: Sequence[torch.Tensor | Number], of: Indexed) -> None:
    """Raises IndexRangeError.  Of a GPU's indices nothing is read: that would have the host wait for it."""
    table, index = values[of.table], values[of.index]
    assert isinstance(table, torch.Tensor), "a number where a tensor stands"
    if isinstance(index, torch.Tensor):
        if index.device.type != "cpu" or index.numel() == 0:
            return
        ends = [int(end) for end in torch.aminmax(index)]
    else:
        ends = [int(index.real)]
    lowest, size = -table.shape[of.dim] if of.wraps else 0, table.shape[of.dim]
    for found in ends:
        if not lowest <= found < size:
            own, read = expr.inputs[of.index], definitions_name(str(expr.inputs[of.table]))
            is_number = isinstance(own, Scalar) and own.is_literal
            name = None if is_number else definitions_name(str(own))
            raise IndexRangeError(f"{expr.op.name} of {expr.output}", name, found, lowest, size, of.dim, read)


def _of_what_is_here(expr: Expr, op: Call, inputs: list[torch.Tensor | Number]) -> list[torch.Tensor | Number]:
    """Operands of a torch call of which this rank has a part of the same axes.

    Of an axis of one element that ranks share out, a rank may have none of one tensor, and all of another that is whole
    on every rank: of that it takes none.
    """
    if not any(parted(axis)[1] for t in expr.tensors for axis in t.domain.logical):
        return inputs
    shapes = [[extent(axis) for axis in t.domain.logical] for t in expr.tensors]
    names = iter(TORCH_CALLS[op.name].signature(shapes, op).inputs)
    named = [next(names) if isinstance(v, torch.Tensor) else () for v in inputs]
    empty = {
        name
        for own, v in zip(named, inputs, strict=True)
        if isinstance(v, torch.Tensor)
        for name, n in zip(own, v.shape, strict=True)
        if n == 0 and not name.endswith("*")
    }
    out = list(inputs)
    for j, (own, v) in enumerate(zip(named, inputs, strict=True)):
        if isinstance(v, torch.Tensor):
            at = tuple(
                slice(0, 0) if name in empty and n == 1 else slice(None) for name, n in zip(own, v.shape, strict=True)
            )
            out[j] = v[at] if at else v
    return out


def number(scalar: Scalar, numbers: Numbers) -> Number:
    """The value of ``scalar`` in this call."""
    return numbers[scalar] if scalar.value is None else scalar.value


def pointwise(expr: Expr, inputs: Sequence[torch.Tensor | Number], device: torch.device) -> torch.Tensor:
    """Operands are converted as promotion has it, so that torch's own rules for zero-dim tensors do not come in."""
    op = POINTWISE[expr.op.name]
    compute, result = types(op, expr.inputs)
    operands = [
        _operand(v, DataType.Bool if k == 0 and op.rule is Rule.WHERE else compute, device)
        for k, v in enumerate(inputs)
    ]
    return op.torch(*operands).to(result.torch)


def _operand(value: torch.Tensor | Number, dtype: DataType, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(dtype.torch)
    if isinstance(value, float | complex) and not dtype.is_integral:  # rounded as by a cast: too large is infinite
        wide = torch.complex128 if isinstance(value, complex) else torch.float64
        return torch.tensor(value, dtype=wide, device=device).to(dtype.torch)
    if isinstance(value, int) and is_narrow(dtype):  # wraps, where torch raises, as in the kernels
        return torch.full((), value, dtype=torch.int64, device=device).to(dtype.torch)
    return torch.full((), rounded_number(value, dtype.torch), dtype=dtype.torch, device=device)


def _window(x: torch.Tensor, shape: tuple[int, ...], reads: Sequence[Read]) -> torch.Tensor:
    """``x`` at other places along some axes, none of which is sharded; 0 where there is nothing."""
    for r in reads:
        out = x.new_zeros([shape[r.axis] if k == r.axis else n for k, n in enumerate(x.shape)])
        if r.start < r.stop:
            indices = torch.arange(r.start, r.stop, device=x.device) * r.step + r.offset
            found = moved(partial(torch.index_select, dim=r.axis, index=indices), x)
            out.narrow(r.axis, r.start, r.stop - r.start).copy_(found)
        x = out
    return x


def place_in(axis: Axis, digits: Axis) -> tuple[Axis, Axis] | None:
    """What stands above and below ``digits`` in ``axis``; ``None`` where it does not hold them, one next to another."""
    found = cut_out(axis, digits[0])
    for d in digits[1:]:
        below = cut_out(found[1], d) if found is not None else None
        if found is None or below is None or below[0]:
            return None
        found = found[0], below[1]
    return found


def chunked(domain: BoundDomain, digits: Axis, rank: int) -> tuple[int, tuple[int, int, int]]:
    """The local dim that holds ``digits``, and its sizes above them, of them and below."""
    coordinates = domain.coordinates(rank)
    for k, axis in enumerate(domain.local_axes()):
        found = place_in(axis, digits)
        if found is not None:
            above, below = (prod(local_extent(d, coordinates) for d in part) for part in found)
            return k, (above, extent(digits), below)
    raise AssertionError(f"{digits} are not in {domain.logical}")


def _stream_slice(expr: Expr, stream: Stream, x: torch.Tensor, rank: int) -> torch.Tensor:
    source = expr.tensors[0].domain
    assert expr.chunk is not None, "a slice is of a chunk"
    if any(digits == stream.digits for _, digits in source.sharding):
        return x  # the rank's own piece
    at, sizes = chunked(source, stream.digits, rank)
    parts = cast(torch.Tensor, x.unflatten(at, sizes))  # pyright: ignore[reportUnknownMemberType]
    return parts.select(at + 1, stream.chunk(expr.chunk, rank))


def _put_together(stream: Stream, out: BoundTensor, stages: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    chunks = stream.by_chunk(stages, rank)
    at, (above, _, below) = chunked(out.domain, stream.digits, rank)
    if above == 1:
        return torch.cat(chunks, at)
    parts = [cast(torch.Tensor, x.unflatten(at, (above, below))) for x in chunks]  # pyright: ignore[reportUnknownMemberType]
    return torch.stack(parts, at + 1).flatten(at, at + 2)


def _iota(op: Iota, out: BoundTensor, rank: int, device: torch.device) -> torch.Tensor:
    start, step = op.counting
    index = unsharded_index(out.domain, 0, rank, device)
    if out.dtype.is_floating:
        index = index.double()
    return (start + step * index).to(out.dtype.torch)


def _rows(query: BoundDomain, rank: int, device: torch.device) -> torch.Tensor:
    """The unsharded numbers of the rows that this rank has of the query."""
    number = torch.zeros((), dtype=torch.int64, device=device)
    for k, axis in enumerate(query.logical[:-2]):
        number = number.unsqueeze(-1) * extent(axis) + unsharded_index(query, k, rank, device)
    return number.reshape(-1)


def _draw(op: Random, out: BoundTensor, inputs: Sequence[Number], rank: int, device: torch.device) -> torch.Tensor:
    """Random numbers by the row-major unsharded index of each element."""
    first, second, seed, offset = inputs
    index = torch.zeros((), dtype=torch.int64, device=device)
    for k, axis in enumerate(out.domain.logical):
        index = index.unsqueeze(-1) * extent(axis) + unsharded_index(out.domain, k, rank, device)
    index = index.reshape(out.domain.local_shape(rank))
    key, count = int(cast(int, seed)), int(cast(int, offset))
    dtype = out.dtype.torch
    if op.name == "uniform":
        drawn = random.uniform(key, count, index, dtype)
        return random.between(drawn, cast(float, first), cast(float, second))
    wide = dtype if dtype == torch.float64 else torch.float32
    return (cast(float, first) + cast(float, second) * random.normal(key, count, index, wide)).to(dtype)


def unsharded_index(domain: BoundDomain, k: int, rank: int, device: torch.device) -> torch.Tensor:
    """For each local index along axis ``k`` the unsharded one: mesh digits at ``rank``'s coordinate."""
    axis, local = domain.logical[k], domain.local_axes()[k]
    coordinates = {d: at for d, at in domain.coordinates(rank).items() if holds_digit(axis, d)}
    index = torch.zeros((), dtype=torch.int64, device=device)
    for mesh_digit, at in coordinates.items():
        index = index + weight_in(axis, mesh_digit) * at
    for d in local:
        steps = torch.arange(local_extent(d, coordinates), device=device) * weight_in(axis, d)
        index = index.unsqueeze(-1) + steps
    return index.reshape(-1) if domain.local_shape(rank)[k] else index.new_empty((0,))


def holds_digit(axis: Axis, digit: Digit) -> bool:
    """Is ``digit`` a part of ``axis``?"""
    return any(
        digit.base == d or (digit.base == d.base and d.weight <= digit.weight < d.weight * d.extent) for d in axis
    ) or (isinstance(digit.base, Digit) and holds_digit(axis, digit.base))


def weight_in(axis: Axis, digit: Digit) -> int:
    """How far one step of ``digit``, a part of ``axis``, moves along the axis."""
    for k, d in enumerate(axis):
        if digit == d:
            return extent(axis[k + 1 :])
        if digit.base == d:  # an uneven cut of a whole digit
            return digit.weight * extent(axis[k + 1 :])
        if digit.base == d.base and d.weight <= digit.weight < d.weight * d.extent:
            return digit.weight // d.weight * extent(axis[k + 1 :])
    if isinstance(digit.base, Digit):  # an uneven cut of a part of a digit
        return digit.weight * weight_in(axis, digit.base)
    raise AssertionError(f"{digit} is not in {axis}")
