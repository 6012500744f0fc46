"""Torch calls that read or write at indices: index_select, gather, take_along_axis, scatter, embedding and the like."""

from __future__ import annotations

import torch

from ..ir.call import Call, Embedding
from .call_extents import Fit, Rule, fits_at_end
from .call_signature import (
    Arguments,
    AxisNames,
    Indexed,
    Shapes,
    Signature,
    TorchCall,
    axis_names,
    dim_of,
    tensor_of,
    tensors_of,
    told,
)
from .host import rounded_number
from .moved_bits import moved, moved_into
from .shape_calls import renamed


def _index_select(shapes: Shapes, call: Call) -> Signature:
    dim = dim_of(call)
    names = axis_names(len(shapes[0]))
    index = ("k",) if len(shapes[1]) else ()
    target = renamed(names, dim, "k") if index else (*names[:dim], "k", *names[dim + 1 :])
    return Signature((renamed(names, dim, "s*"), index), (target,), {} if index else {"k": 1})


def _run_index_select(values: Arguments, call: Call) -> torch.Tensor:
    x, index = tensors_of(values)
    return moved(lambda x: torch.index_select(x, dim_of(call), index), x)


def _gather(shapes: Shapes, call: Call) -> Signature:
    """Axes of the index are the result's; an axis of the source is one of them where the two are equally long."""
    dim = dim_of(call)
    x, index = shapes
    target = renamed(axis_names(len(index), "k"), dim, "k*")
    source: AxisNames = tuple(target[k] if k != dim and n == index[k] and n >= 0 else f"a{k}*" for k, n in enumerate(x))
    target = tuple(name if k == dim or source[k] == name else f"k{k}*" for k, name in enumerate(target))
    return Signature((source, target), (target,), fits=_index_within(shapes, 0, dim))


def _index_within(shapes: Shapes, k: int, dim: int | None = None) -> list[Fit]:
    """An index, which is tensor 1, is no longer than tensor ``k`` but along ``dim``; without elements it fits all."""
    at = [] if 0 in shapes[1] else [at for at in range(len(shapes[1])) if at != dim]
    return [Fit((1, axis), (k, axis), Rule.WITHIN) for axis in at]


def _run_gather(values: Arguments, call: Call) -> torch.Tensor:
    x, index = tensors_of(values)
    return moved(lambda x: torch.gather(x, dim_of(call), index.to(torch.int64)), x)


def _take_along_axis(shapes: Shapes, call: Call) -> Signature:
    dim = dim_of(call)
    names = axis_names(len(shapes[0]))
    target = renamed(names, dim, "k")
    return Signature((renamed(names, dim, "s*"), target), (target,))


def _run_take_along_axis(values: Arguments, call: Call) -> torch.Tensor:
    x, index = tensors_of(values)
    return moved(lambda x: torch.take_along_dim(x, index.to(torch.int64), dim_of(call)), x)


def _scatter(shapes: Shapes, call: Call) -> Signature:
    """An axis of the index is the source's where all are equally long: then each rank writes its own."""
    dim = dim_of(call)
    x, *others = shapes
    names = renamed(axis_names(len(x)), dim, "a*")
    for k, n in enumerate(x):
        if k != dim and (n < 0 or any(s[k] != n for s in others)):
            names = renamed(names, k, f"a{k}*")
    inputs = [names]
    for j, shape in enumerate(others):
        inputs.append(
            tuple(names[k] if n == x[k] and n >= 0 and k != dim else f"i{j}_{k}*" for k, n in enumerate(shape))
        )
    fits = [fit for k in range(len(shapes)) if k != 1 for fit in _index_within(shapes, k, None if k else dim)]
    return Signature(tuple(inputs), (names,), fits=fits)


def _run_scatter(values: Arguments, call: Call) -> torch.Tensor:
    x, index, src = tensor_of(values, 0), tensor_of(values, 1).to(torch.int64), values[2]
    dim = dim_of(call)
    if isinstance(src, torch.Tensor):
        return moved_into(lambda x, src: torch.scatter(x, dim, index, src), x, src)
    number = torch.full((), rounded_number(src, x.dtype), dtype=x.dtype, device="cpu")  # type: ignore[arg-type]
    return moved_into(lambda x, number: torch.scatter(x, dim, index, number.item()), x, number)


def _index_put(shapes: Shapes, call: Call) -> Signature:
    rest = axis_names(len(shapes[0]) - 1)
    beside = [(1, 0), *((0, at) for at in range(1, len(shapes[0])))]
    fits = tuple(fits_at_end(2, shapes, beside, Rule.REPEATED))
    return Signature((("v*", *rest), ("k*",), ("k*", *rest)), (("v*", *rest),), fits=fits)


def _run_index_put(values: Arguments, call: Call) -> torch.Tensor:
    x, index, src = tensors_of(values)
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:  # added in float32, and rounded once
        return torch.index_put(x.float(), (index,), src.float(), accumulate=True).to(x.dtype)
    return moved_into(
        lambda x, src: torch.index_put(x, (index,), src, accumulate=True), x, src
    )  # unsigned numbers wrap


def _embedding(shapes: Shapes, call: Call) -> Signature:
    index = axis_names(len(shapes[0]), "b")
    columns = "d" if told(call, Embedding).max_norm is None else "d*"  # a norm is over whole rows
    return Signature((index, ("v*", columns)), ((*index, columns),))


def _run_embedding(values: Arguments, call: Call) -> torch.Tensor:
    index, weight = tensors_of(values)
    rows = told(call, Embedding)
    padding, max_norm, norm = rows.padding_idx, rows.max_norm, rows.norm_type
    if max_norm is not None:  # torch renormalises the rows that it reads in place
        weight = weight.clone()
    return torch.nn.functional.embedding(
        index,
        weight,
        padding_idx=padding if isinstance(padding, int) else None,
        max_norm=float(max_norm) if isinstance(max_norm, int | float) else None,
        norm_type=float(norm) if isinstance(norm, int | float) else 2.0,
    )


def _along_dim(call: Call) -> Indexed:
    return Indexed(0, 1, dim_of(call))


INDEX_CALLS: dict[str, TorchCall] = {
    "index_select": TorchCall(
        _index_select, _run_index_select, "slices of an axis at the indices of a vector", indexed=_along_dim
    ),
    "gather": TorchCall(_gather, _run_gather, "elements at indices along an axis, as torch.gather", indexed=_along_dim),
    "take_along_axis": TorchCall(
        _take_along_axis, _run_take_along_axis, "as gather, the other axes broadcast",
        indexed=lambda call: Indexed(0, 1, dim_of(call), wraps=True),
    ),
    "scatter": TorchCall(
        _scatter, _run_scatter, "a copy with elements at indices along an axis replaced", indexed=_along_dim
    ),
    "index_put_accumulate": TorchCall(
        _index_put, _run_index_put, "a copy with values added to rows at indices",
        indexed=lambda call: Indexed(0, 1, 0, wraps=True),
    ),
    "embedding": TorchCall(
        _embedding, _run_embedding, "rows of a weight at indices", indexed=lambda call: Indexed(1, 0, 0)
    ),
}  # fmt: skip
