"""Torch calls that look along one axis: scans, sorting, the place of an extremum."""

from __future__ import annotations

import torch

from .call_signature import Arguments, Attributes, Shapes, Signature, TorchCall, axis_names, integer, tensor_of
from .shape_calls import renamed

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What sums and products along an axis are accumulated in."""


def _same(shapes: Shapes, attributes: Attributes) -> Signature:
    names = renamed(axis_names(len(shapes[0])), integer(attributes, "dim"), "d*") if len(shapes[0]) else ()
    return Signature((names,), (names,))


def _topk(shapes: Shapes, attributes: Attributes) -> Signature:
    (names,) = _same(shapes, attributes).inputs
    if not names:
        return Signature((names,), (names, names))
    k = attributes["k"]
    target = renamed(names, integer(attributes, "dim"), "k*")
    return Signature((names,), (target, target), {"k*": k if isinstance(k, int) else -1})


def _gone(shapes: Shapes, attributes: Attributes) -> Signature:
    if attributes["dim"] is None:
        return Signature((tuple(f"{n}*" for n in axis_names(len(shapes[0]))),), ((),))
    (names,) = _same(shapes, attributes).inputs
    return Signature((names,), (tuple(n for n in names if n != "d*"),))


def _run_cumsum(values: Arguments, attributes: Attributes) -> torch.Tensor:
    x = tensor_of(values, 0)
    return x.cumsum(integer(attributes, "dim"), dtype=_WIDE.get(x.dtype)).to(_kept(x.dtype))


def _run_cumprod(values: Arguments, attributes: Attributes) -> torch.Tensor:
    x = tensor_of(values, 0)
    return x.cumprod(integer(attributes, "dim"), dtype=_WIDE.get(x.dtype)).to(_kept(x.dtype))


def _kept(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _run_argsort(values: Arguments, attributes: Attributes) -> torch.Tensor:
    x = tensor_of(values, 0)
    dim, descending, stable = (attributes[k] for k in ("dim", "descending", "stable"))
    assert isinstance(dim, int)
    return torch.argsort(x, dim=dim, descending=bool(descending), stable=bool(stable))


def _run_topk(values: Arguments, attributes: Attributes) -> tuple[torch.Tensor, ...]:
    x = tensor_of(values, 0)
    found = torch.topk(
        x, integer(attributes, "k"), integer(attributes, "dim"), bool(attributes["largest"]), bool(attributes["sorted"])
    )
    return found.values, found.indices


def _run_arg(values: Arguments, attributes: Attributes, *, largest: bool) -> torch.Tensor:
    dim = attributes["dim"]
    at = dim if isinstance(dim, int) else None
    return torch.argmax(tensor_of(values, 0), at) if largest else torch.argmin(tensor_of(values, 0), at)


SCAN_CALLS: dict[str, TorchCall] = {
    "cumsum": TorchCall(_same, _run_cumsum, "sums up to each index of an axis"),
    "cumprod": TorchCall(_same, _run_cumprod, "products up to each index of an axis"),
    "cummax": TorchCall(
        _same, lambda x, a: tensor_of(x, 0).cummax(integer(a, "dim")).values, "maxima up to each index"
    ),
    "cummin": TorchCall(
        _same, lambda x, a: tensor_of(x, 0).cummin(integer(a, "dim")).values, "minima up to each index"
    ),
    "argsort": TorchCall(_same, _run_argsort, "indices that sort an axis"),
    "topk": TorchCall(_topk, _run_topk, "the k largest or smallest of an axis, and their indices"),
    "argmax": TorchCall(_gone, lambda x, a: _run_arg(x, a, largest=True), "the index of the largest"),
    "argmin": TorchCall(_gone, lambda x, a: _run_arg(x, a, largest=False), "the index of the smallest"),
}
