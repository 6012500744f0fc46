"""Norms and activations whose results are quantised to float8 in the kernel that makes them.

    values, scales = quantized.rms_norm(x, (4096,), weight)             # a scale for each row
    y = torch._scaled_mm(values, weight8.t(), scales, weight_scales, out_dtype=torch.bfloat16)

``values * scales`` is the result that the function of torch's name gives: computed in float32 (float64 where a tensor
is), divided by its scale, cut off at the largest number of the dtype, and rounded once.

scales: ``"row"``, one for each row (the last axis of the result), [..., 1]; ``"block"``, one for each 128 consecutive
elements of a row, [..., columns / 128], of which those of all rows lie one after the other, as ``BlockWise1x128`` of
torch's scaled matmuls reads them; or a float32 tensor of one element, by which all is divided and which is given back.
A scale of a row or block is its largest magnitude over the largest number of the dtype, float32, never below
1e-12 over that, so that zeros stay zeros.  NaN and infinities make their row or block NaN, or zeros and NaN; so does
what float32 does not hold, as a scale is float32.  With a scale that is given, infinities are cut off too.
dtype: torch.float8_e4m3fn or torch.float8_e5m2.

``AddRMSNorm`` is ``add_rms_norm`` as a module, on ranks of a mesh too.

Nothing here has a gradient: a call with a tensor that requires one is refused while gradients are recorded.  Under
torch.compile and torch's transforms, and for DTensors and other tensors that are not plain, torch's own ops do the
same.  Each raises ModuleInputError for a tensor that does not fit, and ModuleArgumentError for an option that is out of
range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..errors import ModuleArgumentError
from ..executor.uncompiled import uncompiled
from . import quantizing_torch_ops as by_torch
from .checks import Function
from .functional_norms import rms_eps
from .gelu import Approximation, gelu_activation
from .quantized_norm import AddRMSNorm
from .quantized_result import Quantized
from .quantizing_fusions import BLOCK, Quantization, ScaleKind, Work, quantizing_fusion
from .refused_calls import refusing_beside_dtensors
from .tensor_kinds import are_torchs

Scales = Literal["row", "block"] | Tensor
__all__ = [
    "AddRMSNorm",
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


@refusing_beside_dtensors
def quantize(input: Tensor, *, scales: Scales = "row", dtype: torch.dtype = torch.float8_e4m3fn) -> Quantized:
    """input: [..., columns]."""
    return _made("quantize", "none", {"input": input}, {}, scales, dtype)[0]


@refusing_beside_dtensors
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Quantized:
    """Of torch.nn.functional.rms_norm's result; one axis is normed."""
    eps = rms_eps("rms_norm", eps, input)
    return _normed("rms_norm", {"input": input}, normalized_shape, weight, None, eps, scales, dtype)[0]


@refusing_beside_dtensors
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
    return _normed("layer_norm", {"input": input}, normalized_shape, weight, bias, eps, scales, dtype)[0]


@refusing_beside_dtensors
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Quantized, Tensor]:
    """Of the RMSNorm of residual + input; and that sum, in residual's dtype.  eps: as of ``rms_norm``."""
    eps = rms_eps("add_rms_norm", eps, input)
    made = _normed(
        "add_rms_norm", {"input": input, "residual": residual}, normalized_shape, weight, None, eps, scales, dtype
    )
    return made[0], made[1]


@refusing_beside_dtensors
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
    made = _normed(
        "add_layer_norm", {"input": input, "residual": residual}, normalized_shape, weight, bias, eps, scales, dtype
    )
    return made[0], made[1]


@refusing_beside_dtensors
def gelu(
    input: Tensor,
    approximate: Approximation = "none",
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Quantized:
    """Of torch.nn.functional.gelu's result."""
    return _made("gelu", gelu_activation("gelu", approximate), {"input": input}, {}, scales, dtype)[0]


@refusing_beside_dtensors
def swiglu(
    gate: Tensor, up: Tensor | None = None, *, scales: Scales = "row", dtype: torch.dtype = torch.float8_e4m3fn
) -> Quantized:
    """Of silu(gate) * up; without ``up`` the two are the halves of ``gate``."""
    return _made("swiglu", "silu", _halves("swiglu", gate, up), {}, scales, dtype)[0]


@refusing_beside_dtensors
def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    approximate: Approximation = "none",
    *,
    scales: Scales = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Quantized:
    """Of gelu(gate) * up; without ``up`` the two are the halves of ``gate``."""
    return _made("geglu", gelu_activation("geglu", approximate), _halves("geglu", gate, up), {}, scales, dtype)[0]


def _halves(name: str, gate: Tensor, up: Tensor | None) -> dict[str, Tensor]:
    if up is not None:
        return {"gate": gate, "up": up}
    Function(name).shape_of("gate", gate)
    if gate.ndim == 0 or gate.shape[-1] % 2:
        found = "no axis" if gate.ndim == 0 else f"{gate.shape[-1]} features"
        raise Function(name).refuse("gate", found, "an even number", "it holds gate and up; or pass up too")
    first, second = gate.chunk(2, -1)
    return {"gate": first, "up": second}


def _normed(
    name: str,
    tensors: dict[str, Tensor],
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scales: Scales,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    function = Function(name)
    shape = function.sizes("normalized_shape", normalized_shape)
    found = tuple(function.shape_of("input", tensors["input"]))
    if len(shape) != 1 or found[-1:] != shape:
        raise function.refuse("input", f"shape {found}", f"one axis that is normed, the last one, of {shape}")
    if not eps >= 0:
        raise ModuleArgumentError(name, "eps", eps, "0 or more")
    vectors = {"weight": weight, "bias": bias}
    function.shaped(vectors, shape)
    work: Work = "layer_norm" if name.endswith("layer_norm") else "rms_norm"
    return _made(name, work, tensors, vectors, scales, dtype, eps)


def _made(
    name: str,
    work: Work,
    tensors: dict[str, Tensor],
    vectors: dict[str, Tensor | None],
    scales: Scales,
    dtype: torch.dtype,
    eps: float = 0.0,
) -> tuple[Any, ...]:
    """(Quantized[, sum]) of tensors of one shape."""
    _check(Function(name), tensors, vectors, scales, dtype)
    given = scales if isinstance(scales, Tensor) else None
    mode: ScaleKind = "given" if given is not None else cast(Literal["row", "block"], scales)
    first, columns = [*tensors.values()], [*vectors.values()]
    if torch.compiler.is_compiling() or not _is_plain([*first, *columns, given]):
        made = by_torch.made(work, first, columns, mode, given, dtype, eps)
    else:
        types = [None if t is None else t.dtype for t in (*first, *columns)]
        spec = Quantization(work, first[0].shape[-1], tuple(types), len(first), eps, mode, dtype)
        arguments = [_dense(t.reshape(-1, t.shape[-1])) for t in first]
        arguments += [_dense(t) for t in columns if t is not None]
        made = quantizing_fusion(spec).execute([*arguments, *([] if given is None else [given.reshape(1)])])
    shape = first[0].shape
    if given is not None:
        found, rest = given, made[1:]
    else:
        found, rest = made[1], made[2:]
        if len(shape) != 2:
            found = found[0] if len(shape) == 1 else found.view(*shape[:-1], found.shape[-1])
    return Quantized(made[0].view(shape), found), *(t.view(shape) for t in rest)


def _dense(t: Tensor) -> Tensor:
    """Rows whose elements lie one after the other; rows may lie apart."""
    return t if t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


@uncompiled
def _is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Do all hold values of their own that a kernel can read?"""
    there = [t for t in tensors if t is not None]
    return are_torchs(there) and {t.device.type for t in there} <= {"cpu", "cuda"}


def _check(
    function: Function,
    tensors: dict[str, Tensor],
    vectors: dict[str, Tensor | None],
    scales: object,
    dtype: torch.dtype,
) -> None:
    name, (argument, first) = function.name, next(iter(tensors.items()))
    for other, tensor in tensors.items():
        function.shape_of(other, tensor)
    shape = tuple(first.shape)
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ModuleArgumentError(name, "dtype", dtype, "torch.float8_e4m3fn or torch.float8_e5m2")
    function.check_plain(**tensors, **vectors)
    if not shape or shape[-1] == 0:
        raise function.refuse(argument, f"shape {shape}", "rows of one element at least")
    for other, tensor in tensors.items():
        if tensor.shape != first.shape:
            raise function.refuse(other, f"shape {tuple(tensor.shape)}", f"{shape}")
    if isinstance(scales, Tensor):
        if scales.numel() != 1 or scales.dtype is not torch.float32:
            raise function.refuse("scales", f"shape {tuple(scales.shape)} of {scales.dtype}", "one float32 number")
    elif not isinstance(scales, str) or scales not in ("row", "block"):
        raise ModuleArgumentError(name, "scales", scales, '"row", "block" or a float32 tensor of one element')
    elif scales == "block" and shape[-1] % BLOCK:
        raise function.refuse(
            argument, f"rows of {shape[-1]}", f"a multiple of {BLOCK}", 'pad them, or pass scales="row"'
        )
    everything = {**tensors, **vectors, "scales": scales if isinstance(scales, Tensor) else None}
    for other, tensor in everything.items():
        if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad:
            advice = "call this under torch.no_grad(), or detach() it"
            raise function.refuse(other, "a tensor that requires a gradient", "one that does not", advice)
