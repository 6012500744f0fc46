"""Norms and activations whose results are quantised to float8 in the kernel that makes them.

    values, scales = quantized.rms_norm(x, (4096,), weight)             # a scale for each row
    y = torch._scaled_mm(values, weight8.t(), scales, weight_scales, out_dtype=torch.bfloat16)

``values * scales`` is the result that the function of torch's name gives: computed in float32 (float64 where a tensor
is), divided by its scale, cut off at the largest number of the dtype, and rounded once.

scales: ``"row"``, one for each row (the last axis of the result), [..., 1]; ``"block"``, one for each 128 consecutive
elements of a row, [..., columns / 128], of which those of all rows lie one after the other, as ``BlockWise1x128`` of
torch's scaled matmuls reads them; or a float32 tensor of one element, by which all is divided and which is given back.
A scale of a row or block is its largest magnitude over the largest number of the dtype, float32, never below
1e-12 over that, so that zeros stay zeros.  NaN and infinities make their row or block NaN.
dtype: torch.float8_e4m3fn or torch.float8_e5m2.

Nothing here has a gradient: a call with a tensor that requires one is refused while gradients are recorded.  Under
torch.compile, and for tensors that are not plain, torch's own ops do the same.  Each raises ModuleInputError for a
tensor that does not fit, and ModuleArgumentError for an option that is out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import ModuleArgumentError
from . import quantizing_torch_ops as by_torch
from .functional_norms import Function
from .fused import PLAIN
from .quantizing_fusions import BLOCK, Quantization, Work, quantizing_fusion

Scales = Literal["row", "block"] | Tensor
__all__ = [
    "Quantized",
    "add_layer_norm",
    "add_rms_norm",
    "geglu",
    "gelu",
    "layer_norm",
    "quantize",
    "rms_norm",
    "swiglu",
]


class Quantized(NamedTuple):
    """values: float8.  scales: float32, by which they are multiplied."""

    values: Tensor
    scales: Tensor


def quantize(input: Tensor, *, scales: Scales = "row", dtype: torch.dtype = torch.float8_e4m3fn) -> Quantized:
    """input: [..., columns]."""
    return _made("quantize", "none", [input], [], scales, dtype)[0]


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Quantized:
    """Of torch.nn.functional.rms_norm's result; one axis is normed.  eps is that of input's dtype if left out."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _normed("rms_norm", [input], normalized_shape, weight, None, eps, scales, dtype)[0]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Quantized:
    """Of torch.nn.functional.layer_norm's result; one axis is normed."""
    return _normed("layer_norm", [input], normalized_shape, weight, bias, eps, scales, dtype)[0]


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Quantized, Tensor]:
    """Of the RMSNorm of residual + input; and that sum, in residual's dtype."""
    made = _normed("add_rms_norm", [input, residual], normalized_shape, weight, None, eps, scales, dtype)
    return made[0], made[1]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Quantized, Tensor]:
    """Of the LayerNorm of residual + input; and that sum, in residual's dtype."""
    made = _normed("add_layer_norm", [input, residual], normalized_shape, weight, bias, eps, scales, dtype)
    return made[0], made[1]


def gelu(
    input: Tensor,
    approximate: Literal["none", "tanh"] = "none",
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Quantized:
    """Of torch.nn.functional.gelu's result."""
    return _made("gelu", _gelu("gelu", approximate), [input], [], scales, dtype)[0]


def swiglu(
    gate: Tensor, up: Tensor | None = None, *, scales: Scales = "row", dtype: torch.dtype = torch.float8_e4m3fn
) -> Quantized:
    """Of silu(gate) * up; without ``up`` the two are the halves of ``gate``."""
    return _made("swiglu", "silu", _halves("swiglu", gate, up), [], scales, dtype)[0]


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    approximate: Literal["none", "tanh"] = "none",
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Quantized:
    """Of gelu(gate) * up; without ``up`` the two are the halves of ``gate``."""
    return _made("geglu", _gelu("geglu", approximate), _halves("geglu", gate, up), [], scales, dtype)[0]


def _gelu(name: str, approximate: str) -> Work:
    if approximate not in ("none", "tanh"):
        raise ModuleArgumentError(name, "approximate", approximate, '"none" or "tanh"')
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _halves(name: str, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    if up is not None:
        return [gate, up]
    if gate.ndim == 0 or gate.shape[-1] % 2:
        found = "no axis" if gate.ndim == 0 else f"{gate.shape[-1]} features"
        raise Function(name).refuse("gate", found, "an even number: gate and up")
    return list(gate.chunk(2, -1))


def _normed(
    name: str,
    tensors: list[Tensor],
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scales: Scales,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    shape, function = tuple(normalized_shape), Function(name)
    if len(shape) != 1 or tuple(tensors[0].shape[-1:]) != shape:
        raise function.refuse("input", f"shape {tuple(tensors[0].shape)}", f"{shape} as its last dim, and one dim")
    function.shaped({"weight": weight, "bias": bias}, shape)
    work: Work = "layer_norm" if name.endswith("layer_norm") else "rms_norm"
    return _made(name, work, tensors, [weight, bias], scales, dtype, eps)


def _made(
    name: str,
    work: Work,
    tensors: list[Tensor],
    vectors: list[Tensor | None],
    scales: Scales,
    dtype: torch.dtype,
    eps: float = 0.0,
) -> tuple[Any, ...]:
    """(Quantized[, sum]) of tensors of one shape."""
    function = Function(name)
    _check(function, tensors, vectors, scales, dtype)
    given = scales if isinstance(scales, Tensor) else None
    mode = "given" if given is not None else cast(Literal["row", "block"], scales)
    everything = [t for t in (*tensors, *vectors, given) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in everything):
        expected = "none that does: call it under torch.no_grad(), or detach()"
        raise function.refuse("input", "a tensor that requires a gradient", expected)
    if torch.compiler.is_compiling() or any(type(t) not in PLAIN for t in everything):
        made = by_torch.made(work, tensors, vectors, mode, given, dtype, eps)
    else:
        types = [None if t is None else t.dtype for t in (*tensors, *vectors)]
        spec = Quantization(work, tensors[0].shape[-1], tuple(types), len(tensors), eps, mode, dtype)
        rows = [t.reshape(-1, t.shape[-1]) for t in tensors]
        made = quantizing_fusion(spec).execute([*rows, *everything[len(tensors) :]])
    values, found, *rest = made
    shape = tensors[0].shape
    if mode == "given":
        found = cast(Tensor, given)
    elif tensors[0].ndim != 2:
        found = found[0] if len(shape) == 1 else found.view(*shape[:-1], found.shape[-1])
    return Quantized(values.view(shape), found), *(t.view(shape) for t in rest)


def _check(
    function: Function, tensors: list[Tensor], vectors: list[Tensor | None], scales: object, dtype: torch.dtype
) -> None:
    name, first = function.name, tensors[0]
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ModuleArgumentError(name, "dtype", dtype, "torch.float8_e4m3fn or torch.float8_e5m2")
    function.check_plain(**{f"input {k}": t for k, t in enumerate(tensors)}, weight=None)
    function.check_plain(**{f"vector {k}": t for k, t in enumerate(vectors)})
    if first.ndim == 0 or 0 in first.shape[-1:]:
        raise function.refuse("input", f"shape {tuple(first.shape)}", "rows of an element at least")
    for other in tensors[1:]:
        if other.shape != first.shape:
            raise function.refuse("the second tensor", f"shape {tuple(other.shape)}", f"{tuple(first.shape)}")
    if isinstance(scales, Tensor):
        if scales.numel() != 1 or scales.dtype is not torch.float32:
            raise function.refuse("scales", f"shape {tuple(scales.shape)} of {scales.dtype}", "one float32 number")
    elif scales not in ("row", "block"):
        raise ModuleArgumentError(name, "scales", scales, '"row", "block" or a float32 tensor of one element')
    elif scales == "block" and first.shape[-1] % BLOCK:
        raise function.refuse("input", f"rows of {first.shape[-1]}", f"a multiple of {BLOCK}, for scales of blocks")
