"""Torch calls that rearrange elements: slice, pad, cat, flip, select."""

from __future__ import annotations

import torch

from ..ir.call import Call, Cat, Flip, Pad, Select, Slice
from ..ir.scalar import Size
from .call_signature import (
    Arguments,
    AxisNames,
    Indexed,
    Shapes,
    Signature,
    TorchCall,
    axis_names,
    known,
    tensor_of,
    tensors_of,
    told,
)
from .host import rounded_number
from .moved_bits import moved

UNKNOWN = -1


def renamed(names: AxisNames, at: int, name: str) -> AxisNames:
    return (*names[:at], name, *names[at + 1 :])


def slice_bounds(extent: int, start: int, stop: int) -> tuple[int, int]:
    """As Python has it: negative counts from the end, and both are clamped to the axis."""
    first, last, _ = slice(start, stop).indices(extent)
    return first, max(first, last)


def _slice(shapes: Shapes, call: Call) -> Signature:
    (shape,), cut = shapes, told(call, Slice)
    starts, stops, steps = known(cut.starts), known(cut.stops), cut.steps
    is_known = not _has_symbols(cut.starts + cut.stops)
    source = target = axis_names(len(shape))
    extents: dict[str, int] = {}
    for k, n in enumerate(shape):
        if n < 0 or not is_known:
            size = UNKNOWN
        else:
            first, last = slice_bounds(n, starts[k], stops[k])
            size = -(-(last - first) // steps[k])
        if size == n and n >= 0 and steps[k] == 1:
            continue
        source, target = renamed(source, k, f"a{k}*"), renamed(target, k, f"s{k}*")
        extents[f"s{k}*"] = size
    return Signature((source,), (target,), extents)


def _has_symbols(sizes: tuple[Size, ...]) -> bool:
    return any(not isinstance(n, int) for n in sizes)


def _run_slice(values: Arguments, call: Call) -> torch.Tensor:
    x, cut = tensor_of(values, 0), told(call, Slice)
    starts, stops, steps = known(cut.starts), known(cut.stops), cut.steps
    return x[
        tuple(
            slice(a, max(b, 0) if a >= 0 and b < 0 and b < -n else b, s)
            for a, b, s, n in zip(starts, stops, steps, x.shape, strict=True)
        )
    ]


def _pad(shapes: Shapes, call: Call) -> Signature:
    shape, given = shapes[0], told(call, Pad).widths
    widths, is_known = known(given), not _has_symbols(given)
    source = target = axis_names(len(shape))
    extents: dict[str, int] = {}
    for k, n in enumerate(shape):
        before, after = widths[2 * k], widths[2 * k + 1]
        if is_known and before == after == 0:
            continue
        source, target = renamed(source, k, f"a{k}*"), renamed(target, k, f"p{k}*")
        extents[f"p{k}*"] = n + before + after if is_known and n >= 0 else UNKNOWN
    return Signature((source,), (target,), extents)


def _run_pad(values: Arguments, call: Call) -> torch.Tensor:
    x, value = tensor_of(values, 0), values[1]
    assert not isinstance(value, torch.Tensor), "a tensor where a number stands"
    widths = known(told(call, Pad).widths)
    shape = [n + widths[2 * k] + widths[2 * k + 1] for k, n in enumerate(x.shape)]
    out = torch.full(shape, 0, dtype=x.dtype, device=x.device)
    out.fill_(rounded_number(value, x.dtype))
    source = tuple(slice(max(-widths[2 * k], 0), n - max(-widths[2 * k + 1], 0)) for k, n in enumerate(x.shape))
    target = tuple(slice(max(widths[2 * k], 0), n - max(widths[2 * k + 1], 0)) for k, n in enumerate(shape))
    out[target] = x[source]
    return out


def _cat(shapes: Shapes, call: Call) -> Signature:
    dim = told(call, Cat).dim
    names = axis_names(len(shapes[0]))
    sizes = [s[dim] for s in shapes]
    total = sum(sizes) if min(sizes) >= 0 else UNKNOWN
    inputs = tuple(renamed(names, dim, f"c{k}*") for k in range(len(shapes)))
    return Signature(inputs, (renamed(names, dim, "c*"),), {"c*": total}, alike=names)


def _run_cat(values: Arguments, call: Call) -> torch.Tensor:
    return torch.cat(tensors_of(values), told(call, Cat).dim)


def _flip(shapes: Shapes, call: Call) -> Signature:
    names = axis_names(len(shapes[0]))
    for k in told(call, Flip).dims:
        names = renamed(names, k, f"a{k}*")
    return Signature((names,), (names,))


def _run_flip(values: Arguments, call: Call) -> torch.Tensor:
    return moved(lambda x: torch.flip(x, told(call, Flip).dims), tensor_of(values, 0))


def _select(shapes: Shapes, call: Call) -> Signature:
    dim = told(call, Select).dim
    names = renamed(axis_names(len(shapes[0])), dim, "s*")
    return Signature((names,), ((*names[:dim], *names[dim + 1 :]),))


SHAPE_CALLS: dict[str, TorchCall] = {
    "slice": TorchCall(_slice, _run_slice, "elements from starts to stops by steps, a view", is_view=True),
    "pad": TorchCall(_pad, _run_pad, "elements of a value before and after each axis"),
    "cat": TorchCall(_cat, _run_cat, "tensors one after another along an axis"),
    "flip": TorchCall(_flip, _run_flip, "axes in reverse"),
    "select": TorchCall(
        _select,
        lambda x, a: tensor_of(x, 0).select(told(a, Select).dim, int(x[1].real)),
        "one index of an axis",
        indexed=lambda call: Indexed(0, 1, told(call, Select).dim, wraps=True),
    ),
}
