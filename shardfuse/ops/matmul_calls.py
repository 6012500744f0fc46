"""Torch calls on matrices: matmul, linear, grouped and scaled products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from ..ir.call import Call, WithRoles
from .call_extents import Fit, Place, Rule, fits_at_end
from .call_signature import Arguments, AxisNames, Result, Shapes, Signature, TorchCall, axis_names, tensors_of, told


def roles_of(call: Call) -> tuple[str, ...]:
    """The parameter that each input stands for, where an op has optional ones."""
    return told(call, WithRoles).roles


def _dtype_of(call: Call) -> torch.dtype:
    """The result's dtype."""
    dtype = told(call, WithRoles).dtype
    assert dtype is not None, f"{call.name} has its dtype as a parameter"
    return dtype.torch


def _matmul(shapes: Shapes, _: Call) -> Signature:
    a, b = (len(s) for s in shapes)
    batch = tuple(f"b{k}" for k in range(max(a, b) - 2, 0, -1))
    left = (*batch[len(batch) - max(a - 2, 0) :], "m", "k") if a > 1 else ("k",)
    right = (*batch[len(batch) - max(b - 2, 0) :], "k", "n") if b > 1 else ("k",)
    out = (*batch, *(("m",) if a > 1 else ()), *(("n",) if b > 1 else ()))
    return Signature((left, right), (out,), alike=("k",))


def _linear(shapes: Shapes, _: Call) -> Signature:
    rows = axis_names(len(shapes[0]) - 1, "b")
    is_matrix = len(shapes[1]) == 2
    weight = ("n", "k") if is_matrix else ("k",)
    bias: list[AxisNames] = [("n",) if len(s) else () for s in shapes[2:]]
    out = (*rows, "n") if is_matrix else rows
    fits = [Fit((2, 0), (1, 0)) for names in bias if names]
    return Signature(((*rows, "k"), weight, *bias), (out,), alike=("k",), fits=fits)


_GROUPED = ("g", "g*", "k*")
"""Axes of groups, of which each has a matrix and an offset, and axes that are added up."""
_ADDED = ("alpha", "bias", "beta")
"""Roles of what a scaled product is multiplied by, and of what is added to it."""


def _grouped_axes(a: int, b: int) -> tuple[AxisNames, AxisNames, AxisNames, AxisNames]:
    """Axes of mat1, mat2, offsets and the result: the groups lie along m, k or n, or are an axis of their own."""
    if a == 2 and b == 2:
        return ("m", "k*"), ("k*", "n"), ("g*",), ("g*", "m", "n")
    if a == 2:
        return ("m*", "k*"), ("g*", "k*", "n"), ("g*",), ("m*", "n")
    if b == 2:
        return ("g*", "m", "k*"), ("k*", "n*"), ("g*",), ("m", "n*")
    return ("g", "m", "k*"), ("g", "k*", "n"), ("g",), ("g", "m", "n")


def _grouped_mm(shapes: Shapes, call: Call) -> Signature:
    left, right, groups, out = _grouped_axes(len(shapes[0]), len(shapes[1]))
    inputs: list[AxisNames] = [left, right, groups]
    if len(shapes) == 3:
        return Signature(tuple(inputs), (out,), alike=_GROUPED)
    inputs += [axis_names(len(s), role) for role, s in zip(roles_of(call)[3:], shapes[3:], strict=True)]
    # Scales are per group and row: nothing is sharded.
    fits = tuple(_grouped_fits(shapes, call))
    return Signature(tuple(map(_starred, inputs)), (_starred(out),), alike=_GROUPED, fits=fits)


def _grouped_fits(shapes: Shapes, call: Call) -> Iterator[Fit]:
    """What scales and what is added are beside the matrices; of a matrix of all groups no scale is repeated."""
    a, b = len(shapes[0]), len(shapes[1])
    groups, rows, columns = (2, 0), (0, a - 2), (1, b - 1)
    for k, role in enumerate(roles_of(call)):
        if role in ("scale1", "scale2"):
            own = (rows, None) if role == "scale1" else (None, columns)
            beside: tuple[Place | None, ...] = own if len(shapes[k]) == 2 else (groups, *own)
            for at, other in enumerate(beside):
                is_cut = a != b and (at == 0 or len(beside) == 2)
                yield Fit((k, at), other, Rule.EQUAL if is_cut else Rule.REPEATED)
        elif role in _ADDED:
            yield from fits_at_end(k, shapes, (rows, columns) if a != b else (groups, rows, columns), Rule.REPEATED)


def _starred(names: AxisNames) -> AxisNames:
    return tuple(n if n.endswith("*") else f"{n}*" for n in names)


def _run_grouped_mm(values: Arguments, call: Call) -> torch.Tensor:
    given = dict(zip(roles_of(call), tensors_of(values), strict=True))
    a, b, offsets = given["mat1"], given["mat2"], given["offsets"]
    dtype = _dtype_of(call)
    scales = (given["scale1"], given["scale2"]) if "scale1" in given else None
    if a.is_cuda and scales is None and a.dtype == torch.bfloat16:
        return cast(Any, torch)._grouped_mm(a, b, offsets)
    if a.is_cuda and scales is not None and a.dtype == torch.float8_e4m3fn and len(given) == 5:
        return _scaled_by_torch(a, b, offsets, *scales, dtype)
    result = _grouped(a, b, [int(n) for n in offsets], scales)
    return _finished(result, given, dtype)


def _finished(result: torch.Tensor, given: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """``result * alpha + bias * beta``, of which each may be left out."""
    if "alpha" in given:
        result = result * given["alpha"]
    if "bias" in given:
        bias = given["bias"]
        result = result + (bias * given["beta"] if "beta" in given else bias)
    return result.to(dtype)


def _scale_of(scale: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """One scale for each block of the contracted axis, repeated to the matrix's shape."""
    scale = scale.float()
    for k, (n, m) in enumerate(zip(scale.shape, matrix.shape[matrix.ndim - scale.ndim :], strict=True)):
        if n not in (1, m):
            scale = scale.repeat_interleave(m // n, k)
    return scale


Scales = tuple[torch.Tensor, torch.Tensor]


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: Sequence[int], scales: Scales | None) -> torch.Tensor:
    """Group g is rows (or columns, or contracted elements) from ``ends[g - 1]`` to ``ends[g]``.

    Scales are of the rows of ``a`` and the columns of ``b``: [rows, 1] and [1, columns], with the groups in front where
    they are an axis, or where both matrices are 2-D.
    """
    starts = [0, *ends[:-1]]
    spans = list(zip(starts, ends, strict=True))
    dtype = torch.float32 if scales is not None or a.dtype.itemsize < 4 else a.dtype
    left, right = a.to(dtype), b.to(dtype)
    if a.ndim == 3 and b.ndim == 3:
        return _scaled(left @ right, scales)
    if a.ndim == 2 and b.ndim == 2:
        return _scaled(torch.stack([left[:, i:j] @ right[i:j] for i, j in spans]), scales)
    rows, columns = (a.shape[0], b.shape[-1]) if a.ndim == 2 else (a.shape[1], b.shape[-1])
    out = left.new_zeros((rows, columns))
    for g, (i, j) in enumerate(spans):
        if a.ndim == 2:
            own = None if scales is None else (scales[0][i:j], scales[1][g])
            out[i:j] = _scaled(left[i:j] @ right[g], own)
        else:
            own = None if scales is None else (scales[0][g], scales[1][:, i:j])
            out[:, i:j] = _scaled(left[g] @ right[:, i:j], own)
    return out


def _scaled(product: torch.Tensor, scales: Scales | None) -> torch.Tensor:
    return product if scales is None else product * scales[0].float() * scales[1].float()


def _scaled_by_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    scale1: torch.Tensor,
    scale2: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """torch wants the second matrix column-major, and scales without the axis of 1 (flat where both are 2-D)."""
    columns = b.transpose(-1, -2).contiguous().transpose(-1, -2)
    flat = a.ndim == 2 and b.ndim == 2
    rows = scale1.reshape(-1) if flat else scale1.squeeze(-1)
    cols = scale2.reshape(-1) if flat else scale2.squeeze(-2)
    return cast(Any, torch)._scaled_grouped_mm(a, columns, rows, cols, offsets, None, None, dtype)


def _scaled_mm(shapes: Shapes, call: Call) -> Signature:
    inputs: list[AxisNames] = [("m*", "k*"), ("k*", "n*")]
    inputs += [
        tuple(f"{n}*" for n in axis_names(len(s), role)) for role, s in zip(roles_of(call)[2:], shapes[2:], strict=True)
    ]
    fits: list[Fit] = []
    for k, role in enumerate(roles_of(call)):
        if role in ("scale1", "scale2"):
            j = 0 if role == "scale1" else 1
            fits += fits_at_end(k, shapes, ((j, 0), (j, 1)), Rule.BLOCKS)
        elif role in _ADDED:
            fits += fits_at_end(k, shapes, ((0, 0), (1, 1)), Rule.REPEATED)
    return Signature(tuple(inputs), (("m*", "n*"),), alike=("k*",), fits=fits)


def _run_scaled_mm(values: Arguments, call: Call) -> Result:
    given = dict(zip(roles_of(call), tensors_of(values), strict=True))
    a, b = given["mat1"], given["mat2"]
    dtype = _dtype_of(call)
    result = (a.float() * _scale_of(given["scale1"], a)) @ (b.float() * _scale_of(given["scale2"], b))
    return _finished(result, given, dtype)


def _run_matmul(values: Arguments, _: Call) -> torch.Tensor:
    a, b = tensors_of(values)
    return torch.matmul(a, b)


def _matmul_into(values: Arguments, _: Call, out: torch.Tensor) -> torch.Tensor:
    a, b = tensors_of(values)
    return torch.matmul(a, b, out=out) if a.ndim == b.ndim == 2 else out.copy_(torch.matmul(a, b))


def _linear_into(values: Arguments, call: Call, out: torch.Tensor) -> torch.Tensor:
    x, weight, *bias = tensors_of(values)
    if weight.ndim != 2 or x.ndim < 2 or not (x.ndim == 2 or (x.is_contiguous() and out.is_contiguous())):
        return out.copy_(_run_linear(values, call))
    rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias:
        torch.addmm(bias[0], rows, weight.t(), out=flat)
    else:
        torch.mm(rows, weight.t(), out=flat)
    return out


def _run_linear(values: Arguments, _: Call) -> torch.Tensor:
    x, weight, *bias = tensors_of(values)
    if weight.ndim == 1 and bias:  # torch takes a bias of matrices alone
        return torch.matmul(x, weight) + bias[0]
    return torch.nn.functional.linear(x, weight, bias[0] if bias else None)


MATMUL_CALLS: dict[str, TorchCall] = {
    "matmul": TorchCall(_matmul, _run_matmul, "torch.matmul", evaluate_into=_matmul_into),
    "linear": TorchCall(_linear, _run_linear, "x @ weight.T + bias", evaluate_into=_linear_into),
    "grouped_mm": TorchCall(_grouped_mm, _run_grouped_mm, "a matrix product for each group of rows"),
    "scaled_grouped_mm": TorchCall(_grouped_mm, _run_grouped_mm, "the same, of scaled rows and columns"),
    "block_scaled_mm": TorchCall(_scaled_mm, _run_scaled_mm, "a matrix product of scaled blocks"),
}
