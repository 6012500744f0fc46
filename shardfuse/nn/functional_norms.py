"""Norms as functions of whole tensors and of parameters that are handed over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from ..errors import ArgumentError, ModuleInputError, PromiseError
from ..executor.uncompiled import uncompiled
from ..ir import DataType
from ..ir.promises import Promises
from . import traced
from .activation_functions import Activation
from .batch_norm_fusions import BatchNormSpec, batch_norm_op
from .channel_norm import channels_last, channels_second, is_channels_last
from .default_eps import rms_norm_eps
from .group_norm_fusions import GroupNormSpec, group_norm_op
from .placement import TensorPlacement
from .promising import kept_by
from .row_norm_fusions import RowNormSpec, row_norm_op

_WHOLE = TensorPlacement()
Parameters = dict[str, torch.Tensor | None]
_NORM = ("weight", "bias", "input_bias")


R = TypeVar("R")


@uncompiled
def _not_traced(function: Callable[..., R], *arguments: Any, **options: Any) -> R:
    """By its fusions: what torch.compile makes of torch's own ops promises nothing."""
    return function(*arguments, **options)


class Function:
    """The checks of modules, under the name of a function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def check_plain(self, **tensors: torch.Tensor | None) -> None:
        """Raise ModuleInputError for a dtype that is not computed in."""
        for argument, tensor in tensors.items():
            self.dtype(argument, tensor)

    def refuse(self, argument: str, found: str, expected: str) -> ModuleInputError:
        return ModuleInputError(self.name, argument, found, expected, "pass one that fits")

    def dtype(self, argument: str, tensor: torch.Tensor | None) -> DataType | None:
        return None if tensor is None else self.dtype_of(argument, tensor)

    def refuse_type(self, argument: str, found: object) -> ModuleInputError:
        return ModuleInputError.of_type(self.name, argument, found, "a torch.Tensor")

    def dtype_of(self, argument: str, tensor: torch.Tensor) -> DataType:
        try:
            dtype = tensor.dtype
        except AttributeError:
            raise self.refuse_type(argument, tensor) from None
        if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            if not isinstance(cast("object", tensor), torch.Tensor):  # NumPy's arrays have a dtype too
                raise self.refuse_type(argument, tensor)
            raise self.refuse(argument, f"dtype {dtype}", "float64, float32, bfloat16 or float16")
        return DataType.from_torch(dtype)

    def shaped(self, parameters: Parameters, shape: Sequence[int]) -> None:
        """Raise ModuleInputError for a parameter of another shape."""
        for name, tensor in parameters.items():
            try:
                if tensor is not None and tuple(tensor.shape) != tuple(shape):
                    raise self.refuse(name, f"shape {tuple(tensor.shape)}", f"{tuple(shape)}")
            except AttributeError:
                raise self.refuse_type(name, tensor) from None

    def sizes(self, argument: str, given: Sequence[int]) -> tuple[int, ...]:
        """A shape that a caller has said."""
        try:
            return tuple(given)
        except TypeError:
            raise ArgumentError(self.name, argument, given, "a list of sizes") from None


def rms_eps(name: str, eps: float | None, input: torch.Tensor) -> float:
    """What is added to the mean square: torch's own number for the input's dtype where eps is None."""
    if eps is not None:
        return eps
    Function(name).dtype_of("input", input)
    return rms_norm_eps(input.dtype)


def norm_of_rows(
    name: str,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    parameters: Parameters,
    eps: float,
    *,
    centered: bool,
    residual: torch.Tensor | None = None,
    dropout: float | None = None,
    promises: Promises | None = None,
) -> tuple[torch.Tensor, ...]:
    """(normed[, new residual]).  parameters: "weight", "bias" and "input_bias", each a tensor or None."""
    if promises is not None and torch.compiler.is_compiling():
        options = {"centered": centered, "residual": residual, "dropout": dropout, "promises": promises}
        return _not_traced(norm_of_rows, name, x, normalized_shape, parameters, eps, **options)
    function = Function(name)
    shape, dtype = function.sizes("normalized_shape", normalized_shape), function.dtype_of("input", x)
    dims = len(shape)
    if not dims or tuple(x.shape[-dims:]) != shape:
        raise function.refuse("input", f"shape {tuple(x.shape)}", f"{shape} as its last dims")
    function.shaped(parameters, shape)
    function.shaped({"residual": residual}, x.shape)
    if torch.compiler.is_compiling() or x.is_meta:
        function.check_plain(input=x, residual=residual, **parameters)
        flat, others, *vectors = (
            None if t is None else t.flatten(-dims) for t in (x, residual, *(parameters[k] for k in _NORM))
        )
        assert flat is not None, "there is an x"
        weight, bias, input_bias = vectors
        made = traced.norm(flat, (weight, bias, input_bias), eps, others, centered=centered, dropout=dropout)
        return tuple(t.view(x.shape) for t in made)
    rows = x.reshape(1 if x.ndim == dims else x.shape[0], *x.shape[1:-dims], math.prod(shape))
    spec = RowNormSpec(
        ndim=rows.ndim,
        hidden_size=math.prod(shape),
        eps=eps,
        centered=centered,
        dropout=dropout,
        weight_offset=0.0,
        mesh=None,
        mesh_id=id(None),
        x=_WHOLE,
        at=_WHOLE,
        output=_WHOLE,
        output_grad=_WHOLE,
        dtype=dtype,
        weight_dtype=function.dtype("weight", parameters["weight"]),
        bias_dtype=function.dtype("bias", parameters["bias"]),
        input_bias_dtype=function.dtype("input_bias", parameters["input_bias"]),
        residual_dtype=function.dtype("residual", residual),
    )
    given = [t.flatten() for k in _NORM if (t := parameters[k]) is not None]
    given += [] if residual is None else [residual.reshape(rows.shape)]
    op = kept_by(row_norm_op(spec), promises)
    return tuple(t.view(x.shape) for t in op.apply(None, None, rows, *given))


def group_normed(
    x: torch.Tensor,
    groups: int,
    parameters: Parameters,
    eps: float,
    activation: Activation | None,
    promises: Promises | None = None,
) -> torch.Tensor:
    """x: [batch, channels, ...] -> the same shape, dtype and memory format."""
    if promises is not None and torch.compiler.is_compiling():
        return _not_traced(group_normed, x, groups, parameters, eps, activation, promises)
    function = Function("group_norm")
    dtype = function.dtype_of("input", x)
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise function.refuse("input", f"shape {tuple(x.shape)}", f"[batch, channels, ...] with {groups} whole groups")
    function.shaped(parameters, x.shape[1:2])
    affine = _both(function, parameters)
    if torch.compiler.is_compiling() or x.is_meta:
        function.check_plain(input=x, **parameters)
        return traced.group_norm(x, groups, parameters["weight"], parameters["bias"], eps, activation)
    is_last = is_channels_last(x)
    spec = GroupNormSpec(
        ndim=x.ndim,
        channel_dim=x.ndim - 1 if is_last else 1,
        groups=groups,
        channels=x.shape[1],
        eps=eps,
        activation=activation,
        mesh=None,
        mesh_id=id(None),
        placement=_WHOLE,
        dtype=dtype,
        affine_dtype=function.dtype_of("weight", affine[0]) if affine else None,
    )
    result = kept_by(group_norm_op(spec), promises).apply(None, None, channels_last(x) if is_last else x, *affine)[0]
    return channels_second(result) if is_last else result


def batch_normed(
    x: torch.Tensor,
    parameters: Parameters,
    kept: tuple[torch.Tensor, ...],
    eps: float,
    by_kept: bool,
    promises: Promises | None = None,
) -> tuple[torch.Tensor, ...]:
    """(normed), or (normed, mean, unbiased variance) of the batch."""
    if promises is not None and torch.compiler.is_compiling():
        return _not_traced(batch_normed, x, parameters, kept, eps, by_kept, promises)
    function = Function("batch_norm")
    if promises is not None and promises.batch and not by_kept:
        found = "batch_norm norms each row by the mean and variance of the whole batch in training"
        raise PromiseError(str(promises), found, "pass training=False, or take group_norm")
    dtype = function.dtype_of("input", x)
    if x.ndim < 2:
        raise function.refuse("input", f"{x.ndim} dims", "[batch, channels, ...]")
    if not by_kept and x.numel() == x.shape[1]:
        raise function.refuse("input", f"shape {tuple(x.shape)}, one value per channel", "more in training")
    names = ("running_mean", "running_var")
    function.shaped({**parameters, **dict(zip(names, kept, strict=False))}, x.shape[1:2])
    affine = _both(function, parameters)
    if torch.compiler.is_compiling() or x.is_meta:
        function.check_plain(input=x, **parameters)
        return traced.batch_norm(x, parameters["weight"], parameters["bias"], eps, kept if by_kept else ())
    is_last = is_channels_last(x)
    spec = BatchNormSpec(
        ndim=x.ndim,
        channel_dim=x.ndim - 1 if is_last else 1,
        channels=x.shape[1],
        eps=eps,
        mesh=None,
        mesh_id=id(None),
        placement=_WHOLE,
        dtype=dtype,
        affine_dtype=function.dtype_of("weight", affine[0]) if affine else None,
        kept_dtype=function.dtype_of("running_mean", kept[0]) if by_kept else None,
    )
    given = channels_last(x) if is_last else x
    op = kept_by(batch_norm_op(spec), promises)
    result, *statistics = op.apply(None, None, given, *affine, *(kept if by_kept else ()))
    return (channels_second(result) if is_last else result, *statistics)


def _both(function: Function, parameters: Parameters) -> tuple[torch.Tensor, ...]:
    """Weight and bias, or none; where one of them is given, the other is made."""
    weight, bias = parameters["weight"], parameters["bias"]
    if weight is None and bias is None:
        return ()
    if weight is None or bias is None:
        function.check_plain(**parameters)
    if weight is None:
        assert bias is not None
        weight = torch.ones_like(bias, requires_grad=False)
    bias = torch.zeros_like(weight, requires_grad=False) if bias is None else bias
    if bias.dtype != weight.dtype:
        raise function.refuse("bias", f"dtype {bias.dtype}", f"{weight.dtype}, that of the weight")
    return weight, bias
