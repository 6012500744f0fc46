"""The modules of shardfuse.nn as functions, with torch's names and arguments.

They take tensors of one rank; on a mesh the modules are the way in, which hold placements.  Each is one fusion forward
and one backward.  Tensors are float64, float32, bfloat16 or float16, computed in float32 or float64 and rounded once;
a parameter may have another of these dtypes.  Each raises ModuleInputError for a tensor that does not fit, and
ModuleArgumentError for an option that is out of range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, ParamSpec, TypeVar, cast

import torch

from ..errors import ModuleArgumentError
from ..executor.uncompiled import uncompiled
from . import traced
from .activation import SwiGLU
from .activation_functions import Activation
from .default_eps import rms_norm_eps
from .functional_norms import Function, batch_normed, group_normed, norm_of_rows
from .gated import GeGLU
from .gelu import GELU, Approximation, gelu_activation
from .linear import linear as linear
from .linear_loss import LinearCrossEntropyLoss
from .log_prob import LogProb
from .loss import CrossEntropyLoss, Reduction
from .rotary import RotaryEmbedding
from .softmax import LogSoftmax, Softmax

P = ParamSpec("P")
M = TypeVar("M", bound=torch.nn.Module)


def _kept(make: Callable[P, M]) -> Callable[P, M]:
    """Modules without parameters are functions already: one is made for each set of options."""

    def module(*arguments: P.args, **options: P.kwargs) -> M:
        made = make(*arguments, **options)
        for part in made.modules():
            vars(part)["_made_at"] = ()  # errors name the line of the call alone: the first call made the module
        return made

    cached = lru_cache(maxsize=256)(module)

    def kept(*arguments: P.args, **options: P.kwargs) -> M:
        return cached(*arguments, **options)

    return uncompiled(kept)


_gelu, _geglu, _swiglu = _kept(GELU), _kept(GeGLU), _kept(SwiGLU)
_softmax, _log_softmax, _rotary = _kept(Softmax), _kept(LogSoftmax), _kept(RotaryEmbedding)
_cross_entropy, _log_prob, _linear_cross_entropy = (
    _kept(CrossEntropyLoss),
    _kept(LogProb),
    _kept(LinearCrossEntropyLoss),
)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """torch.nn.functional.rms_norm."""
    if eps is None:
        Function("rms_norm").check_plain(x=input)
        eps = rms_norm_eps(input.dtype)
    parameters = {"weight": weight, "bias": None, "input_bias": None}
    return norm_of_rows("rms_norm", input, normalized_shape, parameters, eps, centered=False)[0]


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """torch.nn.functional.layer_norm."""
    parameters = {"weight": weight, "bias": bias, "input_bias": None}
    return norm_of_rows("layer_norm", input, normalized_shape, parameters, eps, centered=True)[0]


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual + dropout(input + input_bias), and that sum.  Drawn as by ``DropoutAddNorm``."""
    if not 0 <= p <= 1 or math.isnan(p):
        raise ModuleArgumentError("dropout_add_norm", "p", p, "a probability from 0 to 1")
    if norm not in ("layer", "rms"):
        raise ModuleArgumentError("dropout_add_norm", "norm", norm, '"layer" or "rms"')
    parameters = {"weight": weight, "bias": bias, "input_bias": input_bias}
    normed, total = norm_of_rows(
        "dropout_add_norm", input, normalized_shape, parameters, eps,
        centered=norm == "layer", residual=residual, dropout=p if training and p else None,
    )  # fmt: skip
    return normed, total


def add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The LayerNorm of residual + input, and that sum."""
    return dropout_add_norm(input, residual, normalized_shape, weight, bias, eps=eps)


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of residual + input, and that sum."""
    return dropout_add_norm(input, residual, normalized_shape, weight, norm="rms", eps=eps)


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: Literal["silu"] | None = None,
) -> torch.Tensor:
    """torch.nn.functional.group_norm, and the activation of its result.  Channels-last images stay so."""
    if activation not in (None, "silu"):
        raise ModuleArgumentError("group_norm", "activation", activation, 'None or "silu"')
    return group_normed(input, num_groups, {"weight": weight, "bias": bias}, eps, activation)


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """torch.nn.functional.batch_norm: in training the running statistics, if any, move towards the batch's."""
    kept = () if running_mean is None or running_var is None else (running_mean, running_var)
    if not training and not kept:
        raise ModuleArgumentError("batch_norm", "running_mean", running_mean, "a tensor, where training=False")
    result, *statistics = batch_normed(input, {"weight": weight, "bias": bias}, kept, eps, not training)
    with torch.no_grad():
        for running, batch in zip(kept, statistics, strict=False):
            running.lerp_(batch.to(running.dtype), momentum)
    return result


def softmax(
    input: torch.Tensor, dim: int = -1, *, scale: float = 1.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """torch.nn.functional.softmax of ``scale * input``, masked as ``Softmax`` does."""
    return _softmaxed("softmax", _softmax, input, dim, scale, mask, is_log=False)


def log_softmax(
    input: torch.Tensor, dim: int = -1, *, scale: float = 1.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """torch.nn.functional.log_softmax of ``scale * input``, masked as ``LogSoftmax`` does."""
    return _softmaxed("log_softmax", _log_softmax, input, dim, scale, mask, is_log=True)


def _softmaxed(
    name: str,
    module: Callable[..., Softmax | LogSoftmax],
    x: torch.Tensor,
    dim: int,
    scale: float,
    mask: torch.Tensor | None,
    *,
    is_log: bool,
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        Function(name).check_plain(input=x)
        return traced.softmax(x, mask, dim, scale, is_log=is_log)
    return module(dim, scale)(x, mask)


def gelu(input: torch.Tensor, approximate: Approximation = "none") -> torch.Tensor:
    """torch.nn.functional.gelu."""
    if torch.compiler.is_compiling():
        Function("gelu").check_plain(input=input)
        return traced.activation(gelu_activation("gelu", approximate), input)
    return _gelu(approximate)(input)


def geglu(gate: torch.Tensor, up: torch.Tensor | None = None, approximate: Approximation = "none") -> torch.Tensor:
    """gelu(gate) * up; without ``up`` the two are the halves of ``gate``."""
    if torch.compiler.is_compiling():
        return _gated("geglu", gelu_activation("geglu", approximate), gate, up)
    return _geglu(approximate)(gate, up)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up; without ``up`` the two are the halves of ``gate``."""
    if torch.compiler.is_compiling():
        return _gated("swiglu", "silu", gate, up)
    return _swiglu()(gate, up)


def _gated(name: str, activation: Activation, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """By torch's own ops."""
    function = Function(name)
    function.check_plain(gate=gate, up=up)
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise function.refuse("up", f"shape {tuple(up.shape)} of {up.dtype}", f"{tuple(gate.shape)} of {gate.dtype}")
    if up is None and gate.shape[-1] % 2:
        raise function.refuse("gate", f"{gate.shape[-1]} features", "an even number: gate and up")
    halves = gate.chunk(2, -1) if up is None else (gate, up)
    return traced.gated(activation, halves[0], halves[1])


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by the angles of which cos and sin are given, as by ``RotaryEmbedding``.

    ``cos`` has one number for each pair of features, so as many features turn as it has twice; it may have each of them
    twice where that is all of a head's features.
    """
    features = query.shape[-1]
    turned = features if cos.shape[-1] == features else 2 * cos.shape[-1]
    module = _rotary(features, rotary_dim=turned, interleaved=interleaved, heads_dim=heads_dim)
    return cast("tuple[torch.Tensor, torch.Tensor]", module(query, key, cos, sin))


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy of classes along the last axis: input [..., classes], target [...]."""
    if torch.compiler.is_compiling():
        _check_target("cross_entropy", input, target)
        options = (ignore_index, label_smoothing, z_loss, temperature)
        return traced.cross_entropy(input, target, reduction, *options)
    module = _cross_entropy(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        z_loss=z_loss, temperature=temperature,
    )  # fmt: skip
    return module(input, target)


def log_prob(
    input: torch.Tensor, target: torch.Tensor, *, temperature: float = 1.0, ignore_index: int = -100
) -> torch.Tensor:
    """The log-probability of each row's target, [...], of input [..., classes]."""
    if torch.compiler.is_compiling():
        _check_target("log_prob", input, target)
        return traced.log_prob(input, target, ignore_index, temperature, entropy=False)[0]
    return _log_prob(temperature=temperature, ignore_index=ignore_index)(input, target)


def log_prob_and_entropy(
    input: torch.Tensor, target: torch.Tensor, *, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``log_prob``, and the entropy of each row's distribution."""
    if torch.compiler.is_compiling():
        _check_target("log_prob_and_entropy", input, target)
        made = traced.log_prob(input, target, ignore_index, temperature, entropy=True)
        return made[0], made[1]
    return _log_prob(temperature=temperature, ignore_index=ignore_index, entropy=True)(input, target)


def _check_target(name: str, logits: torch.Tensor, target: torch.Tensor) -> None:
    function = Function(name)
    function.check_plain(input=logits)
    if target.dtype != torch.int64 or target.shape != logits.shape[:-1]:
        found = f"shape {tuple(target.shape)} of {target.dtype}"
        raise function.refuse("target", found, f"{tuple(logits.shape[:-1])} of torch.int64")


def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    chunk_rows: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """``cross_entropy(input @ weight.T + bias, target)``, a chunk of rows at a time, as ``LinearCrossEntropyLoss``."""
    module = _linear_cross_entropy(
        chunk_rows=chunk_rows, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        z_loss=z_loss, temperature=temperature,
    )  # fmt: skip
    return module(input, weight, target, bias)
