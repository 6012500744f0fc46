"""Norms as functions of whole tensors and of parameters that are handed over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ..errors import ModuleArgumentError, PromiseError
from ..ir.promises import Promises
from . import traced
from .batch_norm import BatchNorm
from .checks import Function, Parameters
from .default_eps import rms_norm_eps
from .functional_promises import kept_module
from .group_norm import GroupNorm
from .layer_norm import AddLayerNorm, DropoutAddNorm, LayerNorm
from .norm import AddRMSNorm, RMSNorm
from .row_norm import RowNorm

_group_norm, _batch_norm = kept_module(GroupNorm), kept_module(BatchNorm)


def rms_eps(name: str, eps: float | None, input: torch.Tensor) -> float:
    """What is added to the mean square: torch's own number for the input's dtype where eps is None."""
    if eps is not None:
        return eps
    function = Function(name)
    function.shape_of("input", input)
    function.check_plain(input=input)
    return rms_norm_eps(input.dtype)


def norm_of_rows(
    name: str,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    *,
    centered: bool,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    input_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dropout: float | None = None,
    promises: Promises | None = None,
) -> tuple[torch.Tensor, ...]:
    """(normed[, new residual])."""
    function = Function(name)
    parameters: Parameters = {"weight": weight, "bias": bias, "input_bias": input_bias}
    shape = function.sizes("normalized_shape", normalized_shape)
    dims = len(shape)
    if not dims or tuple(function.shape_of("input", x)[-dims:]) != shape:
        raise function.refuse("input", f"shape {tuple(x.shape)}", f"{shape} as its last dims")
    function.shaped(parameters, shape)
    function.shaped({"residual": residual}, x.shape)
    function.check_plain(input=x, residual=residual, **parameters)
    given = {**parameters, "residual": residual}
    if is_decomposed(x, promises) or 0 in shape:
        function.check_eps(eps)
        flat: dict[str, Any] = {name: None if t is None else t.flatten(-dims) for name, t in given.items()}
        made = traced.norm(x.flatten(-dims), eps, **flat, centered=centered, dropout=dropout)
        return tuple(t.view(x.shape) for t in made)
    rows = x.reshape(1 if x.ndim == dims else x.shape[0], *x.shape[1:-dims], math.prod(shape))
    there = {name: t for name, t in given.items() if t is not None}
    tensors = [t.reshape(rows.shape) if name == "residual" else t.flatten() for name, t in there.items()]
    module = _row_norm(promises, math.prod(shape), eps, centered, dropout, " ".join(there))
    results = module.run((rows, *tensors), None)[: 1 if residual is None else 2]
    return tuple(t.view(x.shape) for t in results)


def _norm_given(hidden_size: int, eps: float, centered: bool, dropout: float | None, given: str) -> RowNorm:
    """A norm that is given its parameters with each call.  given: names of those and "residual", joined by spaces."""
    names = given.split()
    has_residual = "residual" in names
    settings = {"eps": eps, "given": " ".join(name for name in names if name != "residual")}
    if dropout is not None:
        options = {"p": dropout, "norm": "layer" if centered else "rms", "training": True}
        return DropoutAddNorm.made_again({**settings, **options, "normalized_shape": hidden_size})
    if centered:
        return (AddLayerNorm if has_residual else LayerNorm).made_again({**settings, "normalized_shape": hidden_size})
    return (AddRMSNorm if has_residual else RMSNorm).made_again({**settings, "hidden_size": hidden_size})


_row_norm = kept_module(_norm_given)


def group_normed(
    x: torch.Tensor,
    groups: int,
    parameters: Parameters,
    eps: float,
    activation: Literal["silu"] | None,
    promises: Promises | None = None,
) -> torch.Tensor:
    """x: [batch, channels, ...] -> the same shape, dtype and memory format."""
    function = Function("group_norm")
    function.shape_of("input", x)
    if groups < 1:
        raise ModuleArgumentError("group_norm", "num_groups", groups, "1 or more")
    if x.ndim < 2 or x.shape[1] % groups:
        raise function.refuse("input", f"shape {tuple(x.shape)}", f"[batch, channels, ...] with {groups} whole groups")
    if math.prod(x.shape) == groups:
        raise function.refuse("input", f"shape {tuple(x.shape)}, one value per group", "more")
    function.shaped(parameters, x.shape[1:2])
    function.check_plain(input=x, **parameters)
    affine = _affine(parameters)
    if is_decomposed(x, promises) or x.shape[1] == 0:
        function.check_eps(eps)
        return traced.group_norm(x, groups, parameters["weight"], parameters["bias"], eps, activation)
    module = _group_norm(
        promises, groups, x.shape[1], eps, len(affine) > 0, bias=len(affine) > 1, activation=activation,
        parameters="local", device="meta",
    )  # fmt: skip
    return module.run_images((x, *affine), None)[0]


def batch_normed(
    x: torch.Tensor,
    parameters: Parameters,
    kept: tuple[torch.Tensor, ...],
    eps: float,
    by_kept: bool,
    promises: Promises | None = None,
) -> tuple[torch.Tensor, ...]:
    """(normed), or (normed, mean, unbiased variance) of the batch."""
    function = Function("batch_norm")
    if promises is not None and promises.batch and not by_kept:
        found = "batch_norm norms each row by the mean and variance of the whole batch in training"
        raise PromiseError(str(promises), found, "pass training=False, or take group_norm")
    function.shape_of("input", x)
    if x.ndim < 2:
        raise function.refuse("input", f"{x.ndim} dims", "[batch, channels, ...]")
    if not by_kept and math.prod(x.shape) == x.shape[1]:
        raise function.refuse("input", f"shape {tuple(x.shape)}, one value per channel", "more in training")
    names = ("running_mean", "running_var")
    function.shaped({**parameters, **dict(zip(names, kept, strict=False))}, x.shape[1:2])
    function.check_plain(input=x, **parameters, **dict(zip(names, kept, strict=False)))
    if kept and kept[0].dtype != kept[1].dtype:
        raise function.refuse("running_var", f"dtype {kept[1].dtype}", f"{kept[0].dtype}, that of running_mean")
    affine = _affine(parameters)
    if is_decomposed(x, promises) or x.shape[1] == 0:
        function.check_eps(eps)
        return traced.batch_norm(x, parameters["weight"], parameters["bias"], eps, kept if by_kept else ())
    module = _batch_norm(
        promises, x.shape[1], eps, affine=len(affine) > 0, bias=len(affine) > 1, track_running_stats=False,
        parameters="local", device="meta",
    )  # fmt: skip
    return tuple(module.run_images((x, *affine, *(kept if by_kept else ())), None)[: 1 if by_kept else 3])


def is_decomposed(x: torch.Tensor, promises: Promises | None) -> bool:
    """Is a call made of torch's own ops?  What torch.compile makes of those promises nothing."""
    return x.is_meta or (promises is None and torch.compiler.is_compiling())


def _affine(parameters: Parameters) -> tuple[torch.Tensor, ...]:
    """Weight and bias, the weight alone, or none; beside a bias alone a weight is made."""
    weight, bias = parameters["weight"], parameters["bias"]
    if bias is None:
        return () if weight is None else (weight,)
    return (torch.ones_like(bias, requires_grad=False) if weight is None else weight), bias
