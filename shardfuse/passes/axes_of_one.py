"""The axes of what an op makes of one tensor, where they follow from that tensor's axes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite, prod
from typing import cast

from ..errors import OperandError, ShapeError
from ..ir.base_op import numbers
from ..ir.call import AlongAxis, Call, Embedding, TopK
from ..ir.digits import Axis, CutError, extent, reshape
from ..ir.expr import BoundTensor
from ..ir.op import Broadcast, Cast, Expand, Full, Iota, Op, Permute, Random, Reduce, Reshape, Set, Squeeze, ViewOp

OneInput = Cast | Set | ViewOp | Reduce


def axes_of_one(
    op: OneInput, x: BoundTensor, fresh: Callable[[int], Axis], recorded: Op
) -> tuple[OneInput, list[Axis]]:
    """``op`` with every size known, and the axes of its output.

    fresh: an axis of that many elements under a new root.  recorded: the op with sizes as the definition has them.
    Raises ``ShapeError`` where ``op`` does not fit ``x``.
    """
    logical = x.domain.logical
    match op:
        case Cast() | Set():
            return op, list(logical)
        case Broadcast():
            rest = iter(logical)
            return op, [() if new else next(rest) for new in op.new]
        case Expand():
            have = [extent(axis) for axis in logical]
            shape = tuple(h if n == -1 else n for n, h in zip(numbers(op.shape), have, strict=True))
            return replace(op, shape=check_sizes(op.called, shape)), _expanded(op.called, x, shape, fresh)
        case Squeeze():
            return op, _squeezed(x, op.axes)
        case Permute():
            return op, [logical[d] for d in op.dims]
        case Reshape():
            shape = _whole_shape(numbers(op.shape), x)
            said = recorded.shape if isinstance(recorded, Reshape) else ()
            unsaid = [k for k, n in enumerate(said) if not isinstance(n, int) or n == -1]
            try:
                return Reshape(shape), list(reshape(logical, shape, unsaid))
            except CutError:
                return Reshape(shape), [fresh(n) for n in shape]
        case Reduce():
            if op.kind in ("max", "min") and any(extent(logical[k]) == 0 for k in op.axes):
                found = f"{x} of {[extent(axis) for axis in logical]} over axes {list(op.axes)}"
                remedy = f"nothing has no {op.kind}: leave these axes out"
                raise ShapeError(op.kind, found, "at least one element", remedy)
            return op, [axis for k, axis in enumerate(logical) if k not in op.axes]


def check_chosen(op: Call, operands: Sequence[BoundTensor]) -> None:
    """Raise ``ShapeError`` where the largest or smallest of nothing, or more than there are, are to be found, and
    where a row that an embedding leaves out is none of its rows."""
    if isinstance(op, TopK):
        x, k = operands[0], op.k
        sizes = [extent(axis) for axis in x.domain.logical]
        most = sizes[op.dim] if sizes else 1
        if isinstance(k, int) and not 0 <= k <= most:
            remedy = "ask for no more than there are"
            raise ShapeError(
                op.name, f"{x} of {sizes}, and k={k}", f"a k of 0 to {most}, the size of axis {op.dim}", remedy
            )
    if isinstance(op, AlongAxis) and op.name in ("argmax", "argmin"):
        x = operands[0]
        sizes = [extent(axis) for axis in x.domain.logical]
        if 0 in (sizes if op.dim is None else sizes[op.dim : op.dim + 1]):
            over = "" if op.dim is None else f" over axis {op.dim}"
            remedy = f"nothing has no {op.name}: leave such tensors out"
            raise ShapeError(op.name, f"{x} of {sizes}{over}", "at least one element", remedy)
    if isinstance(op, Embedding) and isinstance(op.padding_idx, int):
        weight, at = operands[1], op.padding_idx
        n = extent(weight.domain.logical[0])
        if n and not -n <= at < n:  # of no rows none is read
            found = f"padding_idx={at}, and {n} rows of {weight}"
            raise ShapeError(op.name, found, f"a row from {-n} to {n - 1}", "pass one of them, or leave it out")


def check_steps(op: Full | Iota | Random) -> None:
    """Raise ``OperandError`` for what a call has given as start or step and nothing counts by."""
    if isinstance(op, Iota):
        for name, value in zip(("start", "step"), op.counting, strict=True):
            if not isfinite(cast("float", value)):
                raise OperandError(op.name, name, value, "a finite number")


def _whole_shape(asked: tuple[int, ...], x: BoundTensor) -> tuple[int, ...]:
    """The shape that ``x`` is reshaped to, -1 resolved."""
    shape, have = list(asked), [extent(axis) for axis in x.domain.logical]
    known = prod(n for n in shape if n != -1)
    if -1 in shape and known and prod(have) % known == 0:
        shape[shape.index(-1)] = prod(have) // known
    found = f"{x} of {have} to {list(asked)}"
    if -1 in shape and not known and not prod(have):
        raise ShapeError("reshape", found, "a size in place of -1, as every size fits", "pass it")
    if prod(shape) != prod(have) or min(shape, default=0) < 0:
        fitting = [(0, k, n * prod(shape) // (prod(have) or 1)) for k, n in enumerate(have)]
        raise ShapeError("reshape", found, f"{prod(have)} elements", "correct the shape", fitting)
    return tuple(shape)


def check_sizes(op: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape``, which a call may have given by numbers.  Raises ``ShapeError`` for a size below 0."""
    if min(shape, default=0) < 0:
        raise ShapeError(op, f"shape {list(shape)}", "sizes of 0 or more", "correct the sizes")
    return shape


def _expanded(op: str, x: BoundTensor, shape: tuple[int, ...], fresh: Callable[[int], Axis]) -> list[Axis]:
    axes: list[Axis] = []
    for k, (axis, n) in enumerate(zip(x.domain.logical, shape, strict=True)):
        if extent(axis) not in (1, n):
            raise ShapeError(
                op,
                f"{extent(axis)} in axis {k} of {x} to {n}",
                "an axis of 1, or the same size",
                "correct the shape",
                [(0, k, n)],
            )
        axes.append(axis if axis and extent(axis) == n else fresh(n))
    return axes


def _squeezed(x: BoundTensor, gone: tuple[int, ...]) -> list[Axis]:
    for k in gone:
        if extent(x.domain.logical[k]) != 1:
            raise ShapeError(
                "squeeze",
                f"axis {k} of {x} of extent {extent(x.domain.logical[k])}",
                "extent 1",
                "squeeze another axis",
            )
    return [axis for k, axis in enumerate(x.domain.logical) if k not in gone]
