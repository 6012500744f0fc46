"""Torch calls that look along one axis: scans, sorting, the place of an extremum."""

from __future__ import annotations

import torch

from ..ir.base_op import numbers
from ..ir.call import AlongAxis, Argsort, Call, TopK
from .call_signature import Arguments, AxisNames, Shapes, Signature, TorchCall, axis_names, dim_of, tensor_of, told
from .moved_bits import comparable, compared
from .shape_calls import renamed

_WIDE = dict.fromkeys(
    (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu), torch.float32
)
"""What sums and products along an axis are accumulated in."""


def _same(shapes: Shapes, call: Call) -> Signature:
    names = _along(shapes, dim_of(call))
    return Signature((names,), (names,))


def _argsort(shapes: Shapes, call: Call) -> Signature:
    names = _along(shapes, told(call, Argsort).dim)
    return Signature((names,), (names,))


def _along(shapes: Shapes, dim: int) -> AxisNames:
    return renamed(axis_names(len(shapes[0])), dim, "d*") if len(shapes[0]) else ()


def _topk(shapes: Shapes, call: Call) -> Signature:
    chosen = told(call, TopK)
    names, k = _along(shapes, chosen.dim), chosen.k
    if not names:
        return Signature((names,), (names, names))
    target = renamed(names, chosen.dim, "k*")
    return Signature((names,), (target, target), {"k*": k if isinstance(k, int) else -1})


def _gone(shapes: Shapes, call: Call) -> Signature:
    dim = told(call, AlongAxis).dim
    if dim is None:
        return Signature((tuple(f"{n}*" for n in axis_names(len(shapes[0]))),), ((),))
    names = _along(shapes, dim)
    return Signature((names,), (tuple(n for n in names if n != "d*"),))


def _run_cumsum(values: Arguments, call: Call) -> torch.Tensor:
    x = tensor_of(values, 0)
    return x.cumsum(dim_of(call), dtype=_WIDE.get(x.dtype)).to(_kept(x.dtype))


def _run_cumprod(values: Arguments, call: Call) -> torch.Tensor:
    x = tensor_of(values, 0)
    return x.cumprod(dim_of(call), dtype=_WIDE.get(x.dtype)).to(_kept(x.dtype))


def _kept(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _run_argsort(values: Arguments, call: Call) -> torch.Tensor:
    order = told(call, Argsort)
    return torch.argsort(
        comparable(tensor_of(values, 0)), dim=order.dim, descending=order.descending, stable=order.stable
    )


def _run_topk(values: Arguments, call: Call) -> tuple[torch.Tensor, ...]:
    chosen = told(call, TopK)
    (k,) = numbers([chosen.k])
    x = tensor_of(values, 0)
    found = torch.topk(comparable(x), k, chosen.dim, chosen.largest, chosen.sorted)
    return compared(found.values, x.dtype), found.indices


def _run_arg(values: Arguments, call: Call, *, largest: bool) -> torch.Tensor:
    at, x = told(call, AlongAxis).dim, comparable(tensor_of(values, 0))
    return torch.argmax(x, at) if largest else torch.argmin(x, at)


def _run_extremes(values: Arguments, call: Call, *, largest: bool) -> torch.Tensor:
    x = tensor_of(values, 0)
    ordered, at = comparable(x), dim_of(call)
    return compared((ordered.cummax(at) if largest else ordered.cummin(at)).values, x.dtype)


SCAN_CALLS: dict[str, TorchCall] = {
    "cumsum": TorchCall(_same, _run_cumsum, "sums up to each index of an axis"),
    "cumprod": TorchCall(_same, _run_cumprod, "products up to each index of an axis"),
    "cummax": TorchCall(_same, lambda x, a: _run_extremes(x, a, largest=True), "maxima up to each index"),
    "cummin": TorchCall(_same, lambda x, a: _run_extremes(x, a, largest=False), "minima up to each index"),
    "argsort": TorchCall(_argsort, _run_argsort, "indices that sort an axis"),
    "topk": TorchCall(_topk, _run_topk, "the k largest or smallest of an axis, and their indices"),
    "argmax": TorchCall(_gone, lambda x, a: _run_arg(x, a, largest=True), "the index of the largest"),
    "argmin": TorchCall(_gone, lambda x, a: _run_arg(x, a, largest=False), "the index of the smallest"),
}
