# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Views, slices, factories and the picking of one element a row, as ops of shardfuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from ..ir.dtype import DataType
from ..ir.scalar import Number
from ..ir.tensor_view import TensorView
from .compile_errors import UntranslatableError
from .translation import (
    Rule,
    Size,
    Translation,
    argument,
    check_arguments,
    data_type,
    known,
    literal_number,
    tensor_of,
)  # fmt: skip

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims


def view_table() -> dict[object, Rule]:
    """Ops whose result is the storage of their input under other strides; nothing runs."""
    return {
        aten.view.default: _reshape,
        aten.reshape.default: _reshape,
        aten._unsafe_view.default: _reshape,
        aten.expand.default: _expand,
        aten.permute.default: _permute,
        aten.transpose.int: _transpose,
        aten.t.default: _t,
        aten.unsqueeze.default: _unsqueeze,
        aten.squeeze.default: _squeeze,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.slice.Tensor: _slice,
        aten.select.int: _select,
        aten.as_strided.default: _as_strided,
    }


def shape_table() -> dict[object, Rule]:
    """Ops that rearrange or make elements."""
    return {
        aten.cat.default: _cat,
        aten.constant_pad_nd.default: _pad,
        aten.select_scatter.default: _select_scatter,
        aten.slice_scatter.default: _slice_scatter,
        aten.flip.default: _flip,
        aten.gather.default: _pick,
        **factory_table(),
    }


def factory_table() -> dict[object, Rule]:
    """Tensors made of numbers alone."""
    return {
        aten.full.default: _full,
        aten.scalar_tensor.default: _scalar_tensor,
        prims.iota.default: _iota,
        aten.arange.start_step: _arange,
    }


def _reshape(t: Translation, node: Node) -> TensorView:
    """Of sizes that the graph does not know, a single one follows from the others; several are named."""
    x = t.tensor(node.args[0])
    shape = tensor_of(node).shape
    unknown = [k for k, n in enumerate(shape) if known(n) < 0]
    if len(unknown) <= 1:
        return t.ops.reshape(x, [known(n) for n in shape])
    sizes: list[Size] = []
    for given, n in zip(cast(Sequence[object], node.args[1]), shape, strict=True):
        sizes.append(known(n) if known(n) >= 0 else t.size(given))
    return t.ops.reshape(x, sizes)


def _expand(t: Translation, node: Node) -> TensorView:
    """New axes come first; a size that is kept need not be named."""
    x, meta = t.tensor(node.args[0]), tensor_of(node)
    source = tensor_of(cast(Node, node.args[0]))
    new = meta.ndim - x.ndim
    sizes: list[Size] = []
    for k, given in enumerate(cast(Sequence[object], node.args[1])):
        n = meta.shape[k]
        if known(n) >= 0:
            sizes.append(known(n))
        else:
            kept = k >= new and known(source.shape[k - new]) < 0
            sizes.append(-1 if kept else t.size(given))
    return t.ops.broadcast_in_dim(x, sizes, list(range(new, meta.ndim)))


def _permute(t: Translation, node: Node) -> TensorView:
    return t.ops.permute(t.tensor(node.args[0]), t.literal_axes(node.args[1]) or [])


def _transpose(t: Translation, node: Node) -> TensorView:
    a, b = node.args[1:3]
    assert isinstance(a, int), "its schema says so"
    assert isinstance(b, int), "its schema says so"
    return t.ops.transpose(t.tensor(node.args[0]), a, b)


def _t(t: Translation, node: Node) -> TensorView:
    x = t.tensor(node.args[0])
    return t.ops.transpose(x, 0, 1) if x.ndim == 2 else x


def _unsqueeze(t: Translation, node: Node) -> TensorView:
    axis = node.args[1]
    assert isinstance(axis, int), "its schema says so"
    return t.ops.unsqueeze(t.tensor(node.args[0]), axis)


def _squeeze(t: Translation, node: Node) -> TensorView:
    x = t.tensor(node.args[0])
    asked = range(x.ndim) if len(node.args) == 1 else [d % max(x.ndim, 1) for d in t.literal_axes(node.args[1]) or []]
    axes = [d for d in asked if d < x.ndim and x.shape[d] == 1]  # torch takes axis 0 of a tensor without dims, too
    return t.ops.squeeze(x, axes) if axes else x


_SLICE: tuple[tuple[str, int | None], ...] = (("dim", 0), ("start", None), ("end", None), ("step", 1))


def _slice(t: Translation, node: Node) -> TensorView:
    """Of a tensor of static sizes, between numbers."""
    x = t.tensor(node.args[0])
    dim, start, stop, step = (argument(node, k + 1, name, d) for k, (name, d) in enumerate(_SLICE))
    if not (isinstance(dim, int) and isinstance(step, int) and _is_number(start) and _is_number(stop)):
        raise UntranslatableError("a slice", (dim, start, stop, step), "one between numbers")
    if any(n < 0 for n in x.shape):
        raise UntranslatableError("a slice", "of a tensor of symbolic size", "one of static sizes")
    at = dim % x.ndim
    first, last, by = slice(cast("int | None", start), cast("int | None", stop), step).indices(x.shape[at])
    starts = [first if d == at else 0 for d in range(x.ndim)]
    stops = [last if d == at else n for d, n in enumerate(x.shape)]
    return t.ops.slice(x, starts, stops, [by if d == at else 1 for d in range(x.ndim)])


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, int)


def _select(t: Translation, node: Node) -> TensorView:
    x, dim, index = node.args
    if not isinstance(dim, int) or not isinstance(index, int):
        raise UntranslatableError("select", (dim, index), "numbers")
    return t.ops.select(t.tensor(x), index, dim)


def _as_strided(t: Translation, node: Node) -> TensorView:
    """The same elements of a contiguous tensor under another shape, as contiguous.

    An offset counts from the start of the storage, of which the tensor may be a later part.
    """
    source, meta = tensor_of(cast(Node, node.args[0])), tensor_of(node)
    x = t.tensor(node.args[0])
    sizes = [*source.shape, *meta.shape]
    if any(known(n) < 0 for n in sizes) or not (source.is_contiguous() and meta.is_contiguous()):
        raise UntranslatableError("as_strided", list(meta.stride()), "contiguous tensors of static sizes")
    if source.numel() != meta.numel() or argument(node, 3, "storage_offset") not in (None, source.storage_offset()):
        raise UntranslatableError("as_strided", list(meta.shape), "all elements of its input")
    return t.ops.reshape(x, list(meta.shape))


def _cat(t: Translation, node: Node) -> TensorView:
    dim = argument(node, 1, "dim", 0)
    assert isinstance(dim, int), "its schema says so"
    return t.ops.cat([t.tensor(v) for v in cast(Sequence[object], node.args[0])], dim)


def _pad(t: Translation, node: Node) -> TensorView:
    widths, value = t.sizes(node.args[1]), literal_number(argument(node, 2, "value", 0))
    x = t.tensor(node.args[0])
    if any(not isinstance(n, int) or n < 0 for n in widths):
        raise UntranslatableError("a pad", widths, "widths of 0 or more")
    return t.ops.pad(x, widths, _filling(value, x.dtype))


def _filling(value: Number, dtype: DataType) -> bool | int | float:
    """``value`` as torch converts it to ``dtype``: what is not 0 is true, and fractions are cut off."""
    if dtype is DataType.Bool:
        return bool(value)
    if not dtype.is_integral:
        return float(value.real)
    if not math.isfinite(value.real):
        raise UntranslatableError("a fill", value, f"a {dtype.name}")
    return int(value.real)


def _select_scatter(t: Translation, node: Node) -> TensorView:
    """What a selected element's gradient is of: numbers, and the element in its place.

    The selected axis and the next one are padded as one, of which the element is a part: it is then read where it
    belongs, and nowhere else.
    """
    x, (_, _, dim, index) = t.tensor(node.args[1]), node.args
    shape = [_literal(n) for n in tensor_of(node).shape]
    if not isinstance(dim, int) or not isinstance(index, int) or dim % len(shape) == len(shape) - 1:
        raise UntranslatableError("select_scatter", (dim, index), "numbers, and another axis behind")
    at = dim % len(shape)
    length = shape[at + 1]
    merged = [*shape[:at], shape[at] * length, *shape[at + 2 :]]
    return t.ops.reshape(_among(t, node, x, merged, at, index % shape[at] * length), shape)


def _slice_scatter(t: Translation, node: Node) -> TensorView:
    """What a slice's gradient is of."""
    x, shape = t.tensor(node.args[1]), [_literal(n) for n in tensor_of(node).shape]
    dim, start, step = argument(node, 2, "dim", 0), argument(node, 3, "start"), argument(node, 5, "step", 1)
    if not isinstance(dim, int) or not _is_number(start) or step != 1:
        raise UntranslatableError("slice_scatter", (dim, start, step), "numbers, and a step of 1")
    at = dim % len(shape)
    return _among(t, node, x, shape, at, slice(cast("int | None", start), None).indices(shape[at])[0])


def _among(t: Translation, node: Node, x: TensorView, shape: Sequence[int], at: int, start: int) -> TensorView:
    """``x`` from index ``start`` of axis ``at`` of ``shape`` on, among the one number of which the first argument is
    full."""
    base = cast(Node, node.args[0])
    if base.target is not aten.full.default:
        raise UntranslatableError(f"{node.target}", f"into {base.name}", "into a tensor full of one number")
    value = _filling(literal_number(base.args[1]), x.dtype)
    after = shape[at] - start - _literal(x.shape[at])
    widths = [n for d in reversed(range(len(shape))) for n in ((start, after) if d == at else (0, 0))]
    return t.ops.pad(x, widths, value)


def _literal(size: object) -> int:
    if not isinstance(size, int) or size < 0:
        raise UntranslatableError("an axis", "of symbolic size", "of a static one")
    return size


def _flip(t: Translation, node: Node) -> TensorView:
    return t.ops.flip(t.tensor(node.args[0]), t.literal_axes(node.args[1]) or [])


def _pick(t: Translation, node: Node) -> TensorView:
    """One element a row, as cross entropy takes the label's: the sum of a row in which the others are 0."""
    x, index = t.tensor(node.args[0]), t.tensor(node.args[2])
    source, wanted = tensor_of(cast(Node, node.args[0])), tensor_of(cast(Node, node.args[2]))
    dim = node.args[1]
    assert isinstance(dim, int), "its schema says so"
    at = dim % max(x.ndim, 1)
    rest = [d for d in range(x.ndim) if d != at]
    if x.ndim == 0 or known(wanted.shape[at]) != 1 or any(source.shape[d] != wanted.shape[d] for d in rest):
        raise UntranslatableError("gather", list(wanted.shape), "an index of one element a row")
    if x.shape[at] < 0:
        raise UntranslatableError("gather", "an axis of symbolic size", "a static one")
    places = t.ops.iota(x.shape[at], dtype=DataType.Int)
    places = t.ops.broadcast(places, [d != at for d in range(x.ndim)])
    kept = t.ops.where(t.ops.eq(places, index), x, 0 if x.dtype.is_integral else 0.0)
    return t.ops.sum(kept, [at], True, dtype=x.dtype)


# factories


def _made(t: Translation, node: Node, shape: object, value: object) -> TensorView:
    dtype = data_type(tensor_of(node).dtype)
    number = literal_number(value)
    if dtype.is_integral and isinstance(number, float):
        if not number.is_integer():
            raise UntranslatableError("a fill", number, f"a {dtype.name}")
        number = int(number)
    return t.ops.full(t.sizes(shape), bool(number) if dtype is DataType.Bool else number, dtype)


def _full(t: Translation, node: Node) -> TensorView:
    return _made(t, node, node.args[0], node.args[1])


def _scalar_tensor(t: Translation, node: Node) -> TensorView:
    return _made(t, node, [], node.args[0])


def _iota(t: Translation, node: Node) -> TensorView:
    check_arguments(node, 1, "start", "step", "dtype", "device", "requires_grad")
    start, step = (literal_number(node.kwargs[k]) for k in ("start", "step"))
    return t.ops.iota(t.size(node.args[0]), start, step, data_type(tensor_of(node).dtype))


def _arange(t: Translation, node: Node) -> TensorView:
    """Of whole numbers."""
    start, step = literal_number(node.args[0]), literal_number(argument(node, 2, "step", 1))
    meta = tensor_of(node)
    if known(meta.shape[0]) < 0 or not all(isinstance(v, int) for v in (start, step)):
        raise UntranslatableError("arange", node.args, "whole numbers")
    return t.ops.iota(known(meta.shape[0]), start, step, data_type(meta.dtype))
