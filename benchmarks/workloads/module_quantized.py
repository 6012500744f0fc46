"""The functions of ``shardfuse.nn.quantized`` beside the same in torch: values in float8, and their scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as theirs

from shardfuse.nn import quantized

from ..called import Called, Function, Make, called, function, module
from ..workload import EPS, Case, Tensors
from .module_norms import rows_and_vectors

CASES = ("2048x1024", "16384x8192")
TINY = ("5x128", "3x256:float32")
FLOAT8 = torch.float8_e4m3fn
BLOCK = 128
"""Elements that share a scale."""


def _scaled(case: Case, x: Tensor, scales: str) -> Tensors:
    """Values and scales; the values of float64, which is the reference, are not rounded."""
    rows = x.unflatten(-1, (-1, BLOCK)) if scales == "block" else x
    largest = torch.finfo(FLOAT8).max
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    values = (rows / scale).clamp(-largest, largest).view(x.shape)
    scale = scale.squeeze(-1) if scales == "block" else scale
    return values if case.dtype is torch.float64 else values.to(FLOAT8), scale


def _quantized(name: str, rows: int, vectors: int, own: Function, other: Callable[..., Tensor]) -> list[Called]:
    """other: of the inputs, or of the sum of the first two where the result is a norm of that."""
    made: list[Called] = []
    adds = name.startswith("add_")
    for scales in ("row", "block"):

        def call(case: Case, *given: Tensor, scales: Any = scales) -> object:
            return own(*given, scales=scales)

        def forward(case: Case, *given: Tensor, scales: str = scales) -> Tensors:
            wide = [
                t.to(torch.promote_types(t.dtype, torch.float32)) for t in given
            ]  # as what is quantised is computed
            if not adds:
                return _scaled(case, other(*wide), scales)
            total = wide[0] + wide[1]
            return *_scaled(case, other(total, *wide[2:]), scales), total.to(given[1].dtype)

        made += called(
            name=f"quantized.{name}, {scales}s",
            title=f"{name} in float8, with a scale for each {scales}",
            cases=CASES,
            tiny=TINY,
            arguments=rows_and_vectors(rows, vectors),
            makes={f"quantized.{name}": function(call), **_as_module(name, scales)},
            forward=forward,
            has_backward=False,
            any_format=scales == "block",  # matmuls take scales of blocks column by column
        )
    return made


def _as_module(name: str, scales: Any) -> dict[str, Make]:
    """The module that computes the same, where there is one."""
    if name != "add_rms_norm":
        return {}
    return {
        "quantized.AddRMSNorm": module(lambda case: quantized.AddRMSNorm(case.columns, EPS, scales=scales), "weight")
    }


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return theirs.rms_norm(x, w.shape, w, EPS)


def _layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return theirs.layer_norm(x, w.shape, w, b, EPS)


WORKLOADS = (
    *_quantized("quantize", 1, 0, quantized.quantize, lambda x: x),
    *_quantized("rms_norm", 1, 1, lambda x, w, **o: quantized.rms_norm(x, w.shape, w, EPS, **o), _rms),
    *_quantized("layer_norm", 1, 2, lambda x, w, b, **o: quantized.layer_norm(x, w.shape, w, b, EPS, **o), _layer),
    *_quantized("add_rms_norm", 2, 1, lambda x, r, w, **o: quantized.add_rms_norm(x, r, w.shape, w, EPS, **o), _rms),
    *_quantized(
        "add_layer_norm", 2, 2, lambda x, r, w, b, **o: quantized.add_layer_norm(x, r, w.shape, w, b, EPS, **o), _layer
    ),
    *_quantized("gelu", 1, 0, quantized.gelu, theirs.gelu),
    *_quantized("swiglu", 2, 0, quantized.swiglu, lambda g, u: theirs.silu(g) * u),
    *_quantized("geglu", 2, 0, quantized.geglu, lambda g, u: theirs.gelu(g) * u),
)
