# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Reductions of aten, and what is made of them, as ops of shardfuse."""

from __future__ import annotations

import math
from itertools import takewhile
from typing import Any, cast

import torch
from torch.fx import Node

from ..ir.dtype import DataType
from ..ir.tensor_view import TensorView
from .compile_errors import UntranslatableError
from .one_of_each_row import one_of_each_row
from .translation import (
    Rule,
    Translation,
    Value,
    argument,
    check_arguments,
    data_type,
    hinted,
    literal_number,
    tensor_of,
)

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims
FEW = 64
"""Elements: of fewer side by side, much of what is fetched belongs to other rows."""


def reduction_table() -> dict[object, Rule]:
    """The ops around which regions are made."""
    table: dict[object, Rule] = {
        aten.sum.default: _accumulated("sum"),
        aten.sum.dim_IntList: _accumulated("sum"),
        aten.mean.default: _accumulated("mean"),
        aten.mean.dim: _accumulated("mean"),
        aten.prod.default: _accumulated("prod"),
        aten.prod.dim_int: _accumulated("prod"),
        aten.var.correction: _var,
        aten.var_mean.correction: _var_mean,
        aten._softmax.default: _softmax,
        aten._log_softmax.default: _log_softmax,
        aten.native_layer_norm.default: _layer_norm,
    }
    for name in ("amax", "amin"):
        table[getattr(aten, name).default] = _extreme(name)
    for name in ("max", "min"):
        table[getattr(aten, name).default] = _extreme(name)
    for name in ("any", "all"):
        for overload in ("default", "dim", "dims"):
            table[getattr(getattr(aten, name), overload)] = _extreme(name)
    online = getattr(prims, "prepare_softmax_online", None)  # made by Inductor, where that is imported
    if online is not None:
        table[online.default] = _prepare_softmax
    return table


def _reduced(t: Translation, node: Node) -> tuple[TensorView, list[int] | None, bool]:
    """What is reduced, over which axes, and whether they stay."""
    x = t.tensor(node.args[0])
    if x.ndim == 0:
        raise UntranslatableError(f"what {node.target} reduces", "a tensor without dims", "one that has some")
    return x, t.literal_axes(argument(node, 1, "dim")), bool(argument(node, 2, "keepdim", False))


def _accumulated(name: str) -> Rule:
    def rule(t: Translation, node: Node) -> TensorView:
        check_arguments(node, 3, "dtype", "dim", "keepdim")
        x, axes, keepdim = _reduced(t, node)
        if name != "mean" and node.kwargs.get("dtype") is not None:
            x = t.ops.cast(x, data_type(node.kwargs["dtype"]))
        dtype = data_type(tensor_of(node).dtype)
        found = one_of_each_row(t, node) if name == "sum" else None
        return getattr(t.ops, name)(x, axes, keepdim, dtype=dtype) if found is None else t.ops.cast(found, dtype)

    return rule


def _extreme(name: str) -> Rule:
    def rule(t: Translation, node: Node) -> TensorView:
        check_arguments(node, 3, "dim", "keepdim")
        x, axes, keepdim = _reduced(t, node)
        if name in ("any", "all") and argument(node, 1, "dim") == []:  # which torch reads as none, and else as all
            axes = []
        return getattr(t.ops, name)(x, axes, keepdim)

    return rule


def _correction(node: Node) -> float:
    found = literal_number(node.kwargs.get("correction", 1))
    return float(found) if isinstance(found, float) else int(found.real)


def _var(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 2, "correction", "keepdim")
    x, axes, _ = _reduced(t, node)
    return t.ops.var(x, axes, _correction(node), bool(node.kwargs.get("keepdim", False)))


def _var_mean(t: Translation, node: Node) -> Value:
    check_arguments(node, 2, "correction", "keepdim")
    x, axes, _ = _reduced(t, node)
    keepdim = bool(node.kwargs.get("keepdim", False))
    inner, outer = scattered_axes(node)
    if not inner or _correction(node) != 0 or not x.dtype.is_floating:
        return t.ops.var_mean(x, axes, _correction(node), keepdim)
    var, mean = t.ops.var_mean(x, outer, 0, True)
    whole = t.ops.mean(mean, inner, True)
    off = t.ops.sub(mean, whole)
    total = t.ops.mean(t.ops.add(var, t.ops.mul(off, off)), inner, True)
    gone = sorted((*inner, *outer))
    return (total, whole) if keepdim else (t.ops.squeeze(total, gone), t.ops.squeeze(whole, gone))


def scattered_axes(node: Node) -> tuple[list[int], list[int]]:
    """What a reduction of an image in channels-last takes in two steps: a group's channels, behind its pixels.

    Few channels of a group lie side by side, and the next pixel's behind those of all groups: a kernel that has a group
    at a time fetches the others' too.  By channel the pixels are columns, next to each other.  Both empty where rows
    are long or whole.
    """
    source, given = tensor_of(cast(Node, node.args[0])), argument(node, 1, "dim")
    axes = [d % source.ndim for d in given] if isinstance(given, list | tuple) else list(range(source.ndim))
    moving = [d for d in range(source.ndim) if hinted(source.shape[d]) != 1]
    inward = sorted(moving, key=lambda d: (hinted(source.stride(d)), -d))
    inner = list(takewhile(axes.__contains__, inward))
    outer = [d for d in axes if d not in inner and d in moving]
    if not inner or not outer or math.prod(hinted(source.shape[d]) for d in inner) >= FEW:
        return [], []
    return inner, outer


def _prepare_softmax(t: Translation, node: Node) -> Value:
    """The largest of a row, and the sum of the exponentials of what is below it."""
    x, axis = t.tensor(node.args[0]), node.args[1]
    assert isinstance(axis, int), "its schema says so"
    largest = t.ops.amax(x, [axis], True)
    return largest, t.ops.sum(t.ops.exp(t.ops.sub(x, largest)), [axis], True)


def _below_largest(t: Translation, node: Node) -> tuple[TensorView, int]:
    x, axis, half_to_float = t.tensor(node.args[0]), node.args[1], node.args[2]
    assert isinstance(axis, int), "its schema says so"
    if x.ndim == 0:
        raise UntranslatableError(f"what {node.target} is of", "a tensor without dims", "one that has some")
    wide = t.ops.cast(x, DataType.Float if half_to_float else x.dtype.compute)
    return t.ops.sub(wide, t.ops.amax(wide, [axis], True)), axis


def _softmax(t: Translation, node: Node) -> TensorView:
    off, axis = _below_largest(t, node)
    power = t.ops.exp(off)
    return t.ops.cast(t.ops.div(power, t.ops.sum(power, [axis], True)), data_type(tensor_of(node).dtype))


def _log_softmax(t: Translation, node: Node) -> TensorView:
    off, axis = _below_largest(t, node)
    total = t.ops.log(t.ops.sum(t.ops.exp(off), [axis], True))
    return t.ops.cast(t.ops.sub(off, total), data_type(tensor_of(node).dtype))


def _layer_norm(t: Translation, node: Node) -> Value:
    """Output, mean and reciprocal deviation, which are in float32 where the input is narrow."""
    x, shape, weight, bias, eps = node.args
    narrow, meta = t.tensor(x), node.meta["val"]
    wide = t.ops.cast(narrow, narrow.dtype.compute)
    count = len(shape) if isinstance(shape, list | tuple) else 1
    var, mean = t.ops.var_mean(wide, list(range(-count, 0)), 0, True)
    rstd = t.ops.rsqrt(t.ops.add(var, literal_number(eps)))
    out = t.ops.mul(t.ops.sub(wide, mean), rstd)
    if weight is not None:
        out = t.ops.mul(out, t.tensor(weight))
    if bias is not None:
        out = t.ops.add(out, t.tensor(bias))
    return tuple(t.ops.cast(v, data_type(m.dtype)) for v, m in zip((out, mean, rstd), meta, strict=True))
