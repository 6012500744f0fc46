"""The modules of shardfuse.nn as functions, with torch's names and arguments.

They take tensors of one rank; on a mesh the modules are the way in, which hold placements.  Each is one fusion forward
and one backward.  Tensors are float64, float32, bfloat16 or float16, computed in float32 or float64 and rounded once;
a parameter may have another of these dtypes.  Each raises ModuleInputError for a tensor that does not fit, and
ModuleArgumentError for an option that is out of range.

``invariant`` and ``accumulate`` promise what ``FusionDefinition.promise`` says of a function's result and of gradients
of its tensors but parameters: "batch", "ranks" or both, and "float32".  DefinitionError for another value; PromiseError
where it cannot be kept.  Products of matrices promise nothing, nor do functions that have them.  Under torch.compile a
call that promises is one op of the graph, as torch's own ops, of which it would be made, promise nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch

from ..errors import ModuleArgumentError, ModuleInputError
from ..frontend.promise_arguments import Invariant
from ..ir.promises import Promises
from . import moved_statistics, traced
from .activation import SwiGLU
from .activation_functions import Activation
from .checks import Function
from .embedding import embedding
from .functional_losses import cross_entropy, linear_cross_entropy, log_prob, log_prob_and_entropy
from .functional_norms import batch_normed, group_normed, norm_of_rows, rms_eps
from .functional_promises import Accumulate, kept_module, said
from .gated import GeGLU
from .gelu import GELU, Approximation, gelu_activation
from .linear import linear
from .refused_calls import refusing
from .rotary import RotaryEmbedding
from .softmax import LogSoftmax, Softmax

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "cross_entropy",
    "dropout_add_norm",
    "embedding",
    "geglu",
    "gelu",
    "group_norm",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_prob",
    "log_prob_and_entropy",
    "log_softmax",
    "rms_norm",
    "rotary_embedding",
    "softmax",
    "swiglu",
]

_gelu, _geglu, _swiglu = kept_module(GELU), kept_module(GeGLU), kept_module(SwiGLU)
_softmax, _log_softmax, _rotary = kept_module(Softmax), kept_module(LogSoftmax), kept_module(RotaryEmbedding)


@refusing
def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """torch.nn.functional.rms_norm."""
    promises = said("rms_norm", invariant, accumulate)
    eps = rms_eps("rms_norm", eps, input)
    return norm_of_rows("rms_norm", input, normalized_shape, eps, centered=False, weight=weight, promises=promises)[0]


@refusing
def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """torch.nn.functional.layer_norm."""
    promises = said("layer_norm", invariant, accumulate)
    return norm_of_rows(
        "layer_norm", input, normalized_shape, eps, centered=True, weight=weight, bias=bias, promises=promises
    )[0]


@refusing
def dropout_add_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    p: float = 0.0,
    training: bool = True,
    norm: Literal["layer", "rms"] = "layer",
    input_bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual + dropout(input + input_bias), and that sum.  Drawn as by ``DropoutAddNorm``."""
    if not 0 <= p <= 1:
        raise ModuleArgumentError("dropout_add_norm", "p", p, "a probability from 0 to 1")
    if norm not in ("layer", "rms"):
        raise ModuleArgumentError("dropout_add_norm", "norm", norm, '"layer" or "rms"')
    normed, total = norm_of_rows(
        "dropout_add_norm", input, normalized_shape, eps, centered=norm == "layer",
        weight=weight, bias=bias, input_bias=input_bias, residual=residual, dropout=p if training and p else None,
        promises=said("dropout_add_norm", invariant, accumulate),
    )  # fmt: skip
    return normed, total


@refusing
def add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The LayerNorm of residual + input, and that sum."""
    normed, total = norm_of_rows(
        "add_layer_norm", input, normalized_shape, eps, centered=True,
        weight=weight, bias=bias, residual=residual, promises=said("add_layer_norm", invariant, accumulate),
    )  # fmt: skip
    return normed, total


@refusing
def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of residual + input, and that sum.  eps: as of ``rms_norm``, for the dtype of ``input``."""
    promises = said("add_rms_norm", invariant, accumulate)
    normed, total = norm_of_rows(
        "add_rms_norm", input, normalized_shape, rms_eps("add_rms_norm", eps, input), centered=False,
        weight=weight, residual=residual, promises=promises,
    )  # fmt: skip
    return normed, total


@refusing
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: Literal["silu"] | None = None,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """torch.nn.functional.group_norm, and the activation of its result.  Channels-last images stay so."""
    if activation not in (None, "silu"):
        raise ModuleArgumentError("group_norm", "activation", activation, 'None or "silu"')
    promises = said("group_norm", invariant, accumulate)
    return group_normed(input, num_groups, {"weight": weight, "bias": bias}, eps, activation, promises)


@refusing
def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """torch.nn.functional.batch_norm: in training the running statistics, if any, move towards the batch's."""
    kept = () if running_mean is None or running_var is None else (running_mean, running_var)
    for name, running in (("running_mean", running_mean), ("running_var", running_var)):
        if running is None and not training:
            raise ModuleArgumentError("batch_norm", name, running, "a tensor, where training=False")
        if running is None and (running_mean is not None or running_var is not None):
            raise ModuleArgumentError("batch_norm", name, running, "a tensor, as the other running statistic is")
    promises = said("batch_norm", invariant, accumulate)
    affine = {"weight": weight, "bias": bias}
    try:
        result, *statistics = batch_normed(input, affine, kept, eps, not training, promises)
    except Exception as error:
        if kept and training and input.numel() and moved_statistics.is_end_of_recomputation(error):
            with torch.no_grad():  # torch has moved its statistics by then
                _, *statistics = batch_normed(input, affine, kept, eps, by_kept=False, promises=promises)
            moved_statistics.move_towards(kept, tuple(statistics), momentum)
        raise
    if kept and statistics and input.numel():
        moved_statistics.move_towards(kept, tuple(statistics), momentum)
    return result


@refusing
def softmax(
    input: torch.Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """torch.nn.functional.softmax of ``scale * input``, masked as ``Softmax`` does.

    dtype: what the input is converted to before.
    """
    promises = said("softmax", invariant, accumulate)
    x = input if dtype is None else input.to(dtype)
    return _softmaxed("softmax", _softmax, promises, x, dim, scale, mask, is_log=False)


@refusing
def log_softmax(
    input: torch.Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """torch.nn.functional.log_softmax of ``scale * input``, masked as ``LogSoftmax`` does.

    dtype: what the input is converted to before.
    """
    promises = said("log_softmax", invariant, accumulate)
    x = input if dtype is None else input.to(dtype)
    return _softmaxed("log_softmax", _log_softmax, promises, x, dim, scale, mask, is_log=True)


def _softmaxed(
    name: str,
    module: Callable[..., Softmax | LogSoftmax],
    promises: Promises | None,
    x: torch.Tensor,
    dim: int,
    scale: float,
    mask: torch.Tensor | None,
    *,
    is_log: bool,
) -> torch.Tensor:
    if promises is None and torch.compiler.is_compiling():
        function = Function(name)
        function.check_plain(input=x)
        function.check_numbers(int, dim=dim)
        function.check_numbers(float, scale=scale)
        if -x.ndim <= dim < x.ndim:
            return traced.softmax(x, mask, dim, scale, is_log=is_log)
    return module(promises, dim, scale)(x, mask)


@refusing
def gelu(
    input: torch.Tensor,
    approximate: Approximation = "none",
    *,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """torch.nn.functional.gelu."""
    promises = said("gelu", invariant, accumulate)
    if promises is None and torch.compiler.is_compiling():
        Function("gelu").check_plain(input=input)
        return traced.activation(gelu_activation("gelu", approximate), input)
    return _gelu(promises, approximate)(input)


@refusing
def geglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    approximate: Approximation = "none",
    *,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """gelu(gate) * up; without ``up`` the two are the halves of ``gate``."""
    promises = said("geglu", invariant, accumulate)
    if promises is None and torch.compiler.is_compiling():
        return _gated("geglu", gelu_activation("geglu", approximate), gate, up)
    return _geglu(promises, approximate)(gate, up)


@refusing
def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> torch.Tensor:
    """silu(gate) * up; without ``up`` the two are the halves of ``gate``."""
    promises = said("swiglu", invariant, accumulate)
    if promises is None and torch.compiler.is_compiling():
        return _gated("swiglu", "silu", gate, up)
    return _swiglu(promises)(gate, up)


def _gated(name: str, activation: Activation, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """By torch's own ops."""
    function = Function(name)
    function.check_plain(gate=gate, up=up)
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise function.refuse("up", f"shape {tuple(up.shape)} of {up.dtype}", f"{tuple(gate.shape)} of {gate.dtype}")
    if up is None and gate.shape[-1] % 2:
        raise function.refuse(
            "gate", f"{gate.shape[-1]} features", "an even number", "it holds gate and up; or pass up too"
        )
    halves = gate.chunk(2, -1) if up is None else (gate, up)
    return traced.gated(activation, halves[0], halves[1])


@refusing
def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 1,
    invariant: Invariant = None,
    accumulate: Accumulate = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by the angles of which cos and sin are given, as by ``RotaryEmbedding``.

    ``cos`` has one number for each pair of features, so as many features turn as it has twice; it may have each of them
    twice where that is all of a head's features.
    """
    for name, tensor in (("query", query), ("cos", cos)):
        if tensor.ndim == 0:
            raise ModuleInputError("rotary_embedding", name, "no dims", "[..., features]", "see RotaryEmbedding")
    features, angles = query.shape[-1], cos.shape[-1]
    turned = features if angles == features else 2 * angles
    if turned > features or turned % 2:
        expected = f"half as many as query has features, {features}, as many, or fewer than half"
        raise Function("rotary_embedding").refuse("cos", f"{angles} numbers in its last dim", expected)
    promises = said("rotary_embedding", invariant, accumulate)
    module = _rotary(promises, features, rotary_dim=turned, interleaved=interleaved, heads_dim=heads_dim)
    return cast("tuple[torch.Tensor, torch.Tensor]", module(query, key, cos, sin))
