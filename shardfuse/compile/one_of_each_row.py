# pyright: reportUnknownMemberType=false
"""Sums of rows that are 0 but for one element, as the gradient of a picked label's logarithm is summed.

before::

    %eq = aten.eq(%label, %iota)
    %where = aten.where(%eq, -1.0, 0)
    %mul = aten.mul(%where, %scale)
    %sum = aten.sum(%mul, [1], True)

recorded as, with no walk over the row::

    T4 = where(0 <= T0 < 50257, -1.0, 0); T5 = mul(T4, T1)          T0: %label, T1: %scale
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Node

from ..ir.tensor_view import TensorView
from .translation import Translation, argument, known, literal_number, tensor_of

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims

_VIEWS = (aten.view.default, aten.reshape.default, aten.expand.default, aten.unsqueeze.default)


def one_of_each_row(t: Translation, node: Node) -> TensorView | None:
    """The sum ``node``; ``None`` where it is not of that form."""
    x, dims = cast(Node, node.args[0]), argument(node, 1, "dim")
    shape = tensor_of(x).shape
    axes = cast("list[int]", dims) if isinstance(dims, list | tuple) else []
    if len(axes) != 1:
        return None
    at = axes[0] % len(shape)
    factors: list[Node] = []
    while x.target is aten.mul.Tensor:
        sides = [a for a in x.args if isinstance(a, Node)]
        along = [a for a in sides if _is_along(a, at, len(shape))]
        if len(sides) != 2 or len(along) != 1:
            return None
        factors += [a for a in sides if a not in along]
        (x,) = along
    if x.target is not aten.where.self or known(shape[at]) < 0:
        return None
    test, one, other = (cast(Node, a) for a in x.args)
    index, value = _index(test, at, shape), _number(one)
    if index is None or value is None or _number(other) != 0:
        return None
    place, scales = t.values.get(index), [t.values.get(f) for f in factors]
    if not all(isinstance(v, TensorView) for v in (place, *scales)):
        return None
    inside = t.ops.logical_and(t.ops.ge(place, 0), t.ops.lt(place, known(shape[at])))
    found = t.ops.where(inside, value, 0.0)
    for scale in reversed(scales):
        found = t.ops.mul(found, scale)
    found = t.ops.add(found, 0.0)  # the other elements' sum: no zero of a row is below 0
    return found if argument(node, 2, "keepdim", False) else t.ops.squeeze(found, [at])


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
            same = len(tensor_of(a).shape) == len(shape)
            return a if same and not _is_along(a, at, len(shape)) else None
    return None


def _is_iota(n: Node, at: int, shape: torch.Size) -> bool:
    """Is it 0, 1, 2, ... along axis ``at``, the same for all rows?"""
    own = tensor_of(n).shape
    if len(own) > len(shape) or not _is_along(n, at, len(shape)):
        return False
    while n.target in _VIEWS:
        n = cast(Node, n.args[0])
    if n.target is not prims.iota.default or (n.kwargs.get("start"), n.kwargs.get("step")) != (0, 1):
        return False
    made, moving = ([known(k) for k in sizes if known(k) != 1] for sizes in (tensor_of(n).shape, own))
    return made == moving == [known(shape[at])]


def _number(n: Node) -> float | None:
    """Of which number is it full?"""
    place = {aten.full.default: 1, aten.scalar_tensor.default: 0}.get(n.target)
    return None if place is None else float(literal_number(n.args[place]).real)
