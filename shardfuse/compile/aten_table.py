# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The table of aten ops that regions are made of: which op of shardfuse each is, and what kind of op it is."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from ..base_error import ShardfuseError
from .aten_collectives import collective_table
from .aten_pointwise import COSTLY, pointwise_table
from .aten_reductions import reduction_table
from .aten_shapes import factory_table, shape_table, view_table
from .compile_errors import UntranslatableError
from .random_op import random_table
from .translation import Rule, Translation, checked, known, tensor_of


@dataclass(frozen=True)
class AtenOps:
    """``rules``: of every op.  ``reductions``: those that a region is made around.  ``views``: what moves no element.

    ``factories``: what is made of numbers alone.  ``pointwise``: what is computed for each element.  ``costly``: of
    these, what a region is made around where no reduction has taken it.
    """

    rules: Mapping[object, Rule]
    reductions: frozenset[object]
    views: frozenset[object]
    factories: frozenset[object]
    pointwise: frozenset[object]
    costly: frozenset[object]


@functools.cache
def aten_ops() -> AtenOps:
    """Asked for where a graph is compiled: by then Inductor has made its own prims."""
    pointwise, reductions = pointwise_table(), reduction_table()
    views, shapes, factories = view_table(), shape_table(), factory_table()
    rules = {**pointwise, **reductions, **views, **shapes, **collective_table(), **random_table()}
    kinds = map(frozenset, (reductions, views, factories, pointwise, COSTLY))
    return AtenOps(rules, *kinds)


def translate(t: Translation, node: Node) -> None:
    """Record ``node``.  Raises ``UntranslatableError``."""
    if node.target is operator.getitem:
        source, k = node.args
        values = t.values.get(cast(Node, source))
        if not isinstance(values, tuple) or not isinstance(k, int):
            raise UntranslatableError("an item", node.name, "one of a result that is in the region")
        t.values[node] = values[k]
        return
    rule = aten_ops().rules.get(node.target)
    if node.op != "call_function" or rule is None:
        raise UntranslatableError("an op", str(node.target), "one of the table")
    t.values[node] = checked(node, rule(t, node), node.meta.get("val"))


def why_not(node: Node) -> str | None:
    """Why ``node`` ends a region; None where it can be in one.

    It is tried: recorded alone in a definition of its own, whose inputs are the node's.
    """
    if node.op != "call_function":
        return f"{node.op}s are no ops"
    if node.target is operator.getitem:
        return why_not(node.args[0]) if isinstance(node.args[0], Node) else "an item of no node"
    if node.target not in aten_ops().rules:
        return f"{node.target} is not in the table"
    try:
        for tensor in _tensors(node):
            _check_tensor(node, tensor)
        t = Translation()
        with t.fd:
            for n in node.all_input_nodes:
                add_argument(t, n)
            translate(t, node)
    except ShardfuseError as error:
        return str(error).splitlines()[0]
    return None


def add_argument(t: Translation, node: Node) -> None:
    """An input of a region: a tensor, or an integer."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        t.add_input(node)
    elif isinstance(value, torch.SymInt):
        t.add_number(node)
    else:
        raise UntranslatableError(node.name, type(value).__name__, "a tensor or an integer")


def _tensors(node: Node) -> list[torch.Tensor]:
    """Of the node and its inputs."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    listed = [
        v
        for value in values
        for v in (cast(tuple[object, ...], value) if isinstance(value, tuple | list) else (value,))
    ]
    return [v for v in listed if isinstance(v, torch.Tensor)]


def _check_tensor(node: Node, tensor: torch.Tensor) -> None:
    """On the device of the node, or one number on the CPU; with strides, and with elements."""
    where = next((v.device for v in _tensors(node) if v.device.type != "cpu"), torch.device("cpu"))
    if tensor.device != where and not (tensor.device.type == "cpu" and tensor.ndim == 0):
        raise UntranslatableError("a device", str(tensor.device), str(where))
    if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_quantized:
        raise UntranslatableError("a tensor", f"{tensor.layout}, {tensor.dtype}", "a strided one of real numbers")
    for n in (*tensor.shape, *tensor.stride()):
        if isinstance(n, torch.SymInt) and not n.node.has_hint():
            raise UntranslatableError("a size", "one that only the run tells", "one that the inputs' sizes tell")
    if any(known(n) == 0 for n in tensor.shape):
        raise UntranslatableError("a size", 0, "1 or more elements")


def is_view(node: Node) -> bool:
    return node.target in aten_ops().views


def is_widening(node: Node) -> bool:
    """Is it a cast to a type that holds all values of the input's, and takes more bytes?"""
    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    source, result = tensor_of(cast(Node, node.args[0])).dtype, tensor_of(node).dtype
    return source.itemsize < result.itemsize and torch.promote_types(source, result) == result
