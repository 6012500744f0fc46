# pyright: reportUnknownMemberType=false
"""Sums of rows that are 0 but for one element, as the gradient of a picked label's logarithm is summed.

before::

    %eq = aten.eq(%label, %iota)
    %where = aten.where(%eq, -1.0, 0)
    %mul = aten.mul(%where, %scale)
    %sum = aten.sum(%mul, [1], True)

recorded as, with no walk over the row::

    T4 = where(0 <= T0 < 50257, -1.0, 0); T5 = mul(T4, T1); T6 = mul(0, T1); T7 = add(T5, T6)

T0: %label, T1: %scale.  T6, the other elements, is NaN where the scale is not finite.  Casts on the way, as autocast
puts them behind the product, are those of the one element, which they round as they would have in the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from ..ir.dtype import DataType
from ..ir.scalar import Number
from ..ir.tensor_view import TensorView
from .translation import Translation, argument, data_type, is_same_size, known, tensor_of

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PLACES = (torch.int32, torch.int64)
"""Of a row of any length."""
_VIEWS = (aten.view.default, aten.reshape.default, aten.expand.default, aten.unsqueeze.default)


def one_of_each_row(t: Translation, node: Node) -> TensorView | None:
    """The sum ``node``; ``None`` where it is not of that form."""
    x, dims = cast(Node, node.args[0]), argument(node, 1, "dim")
    shape = tensor_of(x).shape
    axes = cast("list[int]", dims) if isinstance(dims, list | tuple) else []
    if len(axes) != 1:
        return None
    at = axes[0] % len(shape)
    x, steps = _steps_to(x, at, len(shape))
    products = [factor for factor, _ in steps if factor is not None]
    if x.target is not aten.where.self or known(shape[at]) < 0:
        return None
    test, one, other = (cast(Node, a) for a in x.args)
    index, value = _index(test, at, shape), _number(one, tensor_of(x).dtype)
    if index is None or value is None or _number(other, tensor_of(other).dtype) != 0:
        return None
    place, scales = t.values.get(index), [t.values.get(f) for f in products]
    if not all(isinstance(v, TensorView) for v in (place, *scales)):
        return None
    if not _reach([tensor_of(n) for n in (index, *products)], at, shape):
        return None
    dtype = data_type(tensor_of(x).dtype)
    place = t.ops.cast(t.tensor(index), DataType.Int)  # a narrow type does not hold the length of the row
    inside = t.ops.logical_and(t.ops.ge(place, 0), t.ops.lt(place, known(shape[at])))
    rest = t.ops.full([], 0, dtype) if dtype is not DataType.Bool else t.ops.full([], False, dtype)
    found = t.ops.where(inside, t.ops.full([], value, dtype), rest)
    for factor, made in reversed(steps):
        scaled = (v if factor is None else t.ops.mul(v, t.tensor(factor)) for v in (found, rest))
        found, rest = (t.ops.cast(v, data_type(made)) for v in scaled)
    if found.dtype.is_floating:
        # the sum of the other elements: NaN where a factor is not finite, and else a zero that is not below 0
        found = t.ops.add(found, t.ops.add(rest, 0.0))
    return found if argument(node, 2, "keepdim", False) else t.ops.squeeze(found, [at])


def _steps_to(x: Node, at: int, ndim: int) -> tuple[Node, list[tuple[Node | None, torch.dtype]]]:
    """What ``x`` is made of by products and casts of floats, the last first: the factor, which has one value for each
    row, or None of a cast, and the type of the result."""
    steps: list[tuple[Node | None, torch.dtype]] = []
    while True:
        made = tensor_of(x).dtype
        if x.target is prims.convert_element_type.default:
            source = cast(Node, x.args[0])
            if not (made.is_floating_point and tensor_of(source).dtype.is_floating_point):
                return x, steps
            steps.append((None, made))
            x = source
            continue
        sides = [a for a in x.args if isinstance(a, Node)]
        along = [a for a in sides if _is_along(a, at, ndim)]
        if x.target is not aten.mul.Tensor or len(sides) != 2 or len(along) != 1 or made == torch.bool:
            return x, steps
        steps += [(a, made) for a in sides if a not in along]
        (x,) = along


def _reach(tensors: Sequence[torch.Tensor], at: int, shape: torch.Size) -> bool:
    """Are ``tensors``, broadcast together, as long as ``shape`` along each axis but ``at``?"""
    for k, size in enumerate(shape):
        places = [k - len(shape) + x.ndim for x in tensors]
        own = [x.shape[place] for x, place in zip(tensors, places, strict=True) if place >= 0]
        if k != at and not any(is_same_size(n, size) for n in own):
            return False
    return True


def _is_along(n: Node, at: int, ndim: int) -> bool:
    """Has ``n``, broadcast to ``ndim`` axes, elements of its own along axis ``at``?"""
    shape = tensor_of(n).shape
    own = at - (ndim - len(shape))
    return own >= 0 and known(shape[own]) != 1


def _index(test: Node, at: int, shape: torch.Size) -> Node | None:
    """What is compared with the places along axis ``at``, if it is one number for each row."""
    if test.target is not aten.eq.Tensor:
        return None
    sides = [cast(Node, a) for a in test.args]
    for a, b in (sides, sides[::-1]):
        if _is_iota(b, at, shape):
            while a.target is aten.expand.default and _is_along(a, at, len(shape)):
                a = cast(Node, a.args[0])
            own = tensor_of(a)
            is_place = own.dtype in _INTEGERS and own.ndim == len(shape)
            return a if is_place and not _is_along(a, at, len(shape)) else None
    return None


def _is_iota(n: Node, at: int, shape: torch.Size) -> bool:
    """Is it 0, 1, 2, ... along axis ``at``, the same for all rows?"""
    own = tensor_of(n).shape
    if len(own) > len(shape) or not _is_along(n, at, len(shape)):
        return False
    while n.target in _VIEWS:
        n = cast(Node, n.args[0])
    if n.target is not prims.iota.default or tensor_of(n).dtype not in _PLACES:
        return False
    if (n.kwargs.get("start"), n.kwargs.get("step")) != (0, 1):
        return False
    made, moving = ([known(k) for k in sizes if known(k) != 1] for sizes in (tensor_of(n).shape, own))
    return made == moving == [known(shape[at])]


def _number(n: Node, dtype: torch.dtype) -> Number | None:
    """Of which number is it full?  None where it is none, or of another dtype than ``dtype``."""
    place = {aten.full.default: 1, aten.scalar_tensor.default: 0}.get(n.target)
    given = None if place is None else n.args[place]
    if not isinstance(given, bool | int | float) or tensor_of(n).dtype != dtype or dtype.is_complex:
        return None
    if dtype not in (torch.bool, *_INTEGERS):
        return float(given) if dtype.itemsize > 2 else torch.tensor(given, dtype=dtype, device="cpu").item()
    if not isinstance(given, int) and not math.isfinite(given):
        return None
    whole = int(given)
    if dtype == torch.bool:
        return bool(given)
    return whole if torch.iinfo(dtype).min <= whole <= torch.iinfo(dtype).max else None
