# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false
"""What a node of a graph is: a kernel, a part of one, a change of a tensor; and the bytes that it gives."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .aten_table import aten_ops, is_view, is_widening
from .translation import hinted


def is_kernel(n: Node) -> bool:
    """Is it computed by a kernel that is not one of pointwise ops?"""
    is_other = is_view(n) or is_fusable(n) or n.target is operator.getitem or n.target in aten_ops().factories
    return n.op == "call_function" and not is_other and bool(tensors_of(n)) and "inductor_" not in str(n.target)


def is_mutation(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return node.op == "call_function" and target is not operator.getitem and node.is_impure()


def tensors_of(n: Node) -> list[torch.Tensor]:
    """The results of a node."""
    value: object = n.meta.get("val")
    values = cast("Sequence[object]", value) if isinstance(value, tuple | list) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def is_pointwise(node: Node) -> bool:
    """Is it an op whose elements follow from elements of its inputs, as torch's tag for such ops says?"""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def is_fusable(node: Node) -> bool:
    """Is it part of a pointwise kernel of Inductor, so that it need not be stored for its readers?"""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_random = node.target.name() in ("prims::inductor_random", "prims::inductor_randint", "shardfuse::image_rand_v1")
    is_moved = node.target in _PLACED
    return is_random or is_moved or is_pointwise(node) or is_widening(node)


_PLACED = (
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.flip.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten.index.Tensor,
)
"""Ops without the tag whose elements Inductor computes where they are read."""


def op_name(node: Node) -> str:
    """``erf`` of ``aten.erf.default``; an item of a result has none."""
    return f"{node.target}.".split(".")[1]


def elements(node: Node) -> int:
    """How many elements a node's tensor has, at the sizes of the call for which the graph was made; 0 of others."""
    value = node.meta.get("val")
    return math.prod(map(hinted, value.shape)) if isinstance(value, torch.Tensor) else 0


def is_sized(node: Node) -> bool:
    """Does the call for which the graph was made tell the sizes of the node's tensors, and numbers that it gives?"""
    value: object = node.meta.get("val")
    leaves = cast("list[object]", tree_leaves(value))
    sizes = [n for v in leaves for n in (v.shape if isinstance(v, torch.Tensor) else [v])]
    return value is not None and all(n.node.has_hint() for n in sizes if isinstance(n, torch.SymInt))


def nbytes(node: Node, size: Callable[[int | torch.SymInt], int] = hinted) -> int:
    """Bytes of a node's tensor, at the sizes of the call for which the graph was made, or at what ``size`` says."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    count = 1
    for n in value.shape:
        count *= size(n)
    return count * value.dtype.itemsize


NOMINAL = 64
"""A symbol of the graph's sizes counts as this in what ranks decide alike."""


def nominal(size: int | torch.SymInt) -> int:
    """A size as a number that all ranks have alike: with ``NOMINAL`` for each symbol."""
    found = expression_of(size)
    return int(found.subs(dict.fromkeys(found.free_symbols, NOMINAL)))


def expression_of(size: int | torch.SymInt) -> Any:
    """A size as sympy has it."""
    return size.node.expr if isinstance(size, torch.SymInt) else cast(Any, sympy).Integer(size)


def shape_of(node: Node) -> list[Any]:
    """The sizes of a tensor as sympy has them: equal where they are known to be the same."""
    return [expression_of(n) for n in cast(torch.Tensor, node.meta["val"]).shape]


PARTS = (torch.ops.aten.slice.Tensor, torch.ops.aten.select.int)
"""Views that are parts of a tensor."""
