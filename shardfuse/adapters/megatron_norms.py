"""The norms that a spec provider of Megatron Core builds its layers from.

``BackendSpecProvider.layer_norm(...)`` names what makes a norm: a callable of ``config``, ``hidden_size`` and ``eps``.
``patch`` has a provider's class name one that makes ``shardfuse.nn``'s::

    from megatron.core.models.backends import LocalSpecProvider
    from shardfuse.adapters import megatron_norms

    undo = megatron_norms.patch(LocalSpecProvider)  # before layer specs are made

Parameters carry ``sequence_parallel``, by which Megatron reduces their gradients over the ranks of a sequence.
What shardfuse has no norm for is made by the provider's own: an L2 norm, a LayerNorm whose weight begins at 0, one that
keeps its output in place of its input, and norms that take a residual.
Source: ``megatron/core/models/backends.py`` and ``transformer/torch_norm.py`` of Megatron Core.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from .. import nn

_log = logging.getLogger("shardfuse.adapters")


def patch(provider: type) -> Callable[[], None]:
    """Have ``provider.layer_norm`` name shardfuse's norms.  Gives what puts the provider's own back."""
    patched: Any = provider
    own = patched.layer_norm

    def layer_norm(self: Any, *arguments: Any, **options: Any) -> Callable[..., torch.nn.Module]:
        theirs = own(self, *arguments, **options)
        if options.get("has_residual"):
            _log.info("%s: a norm with a residual is left to %s", provider.__name__, theirs)
            return theirs
        return _builder(provider.__name__, theirs)

    patched.layer_norm = layer_norm
    _log.info("%s.layer_norm makes norms of shardfuse.nn", provider.__name__)

    def undo() -> None:
        patched.layer_norm = own

    return undo


def _builder(provider: str, theirs: Any) -> Callable[..., torch.nn.Module]:
    def norm(config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> torch.nn.Module:
        why = _why_theirs(config)
        if why is not None:
            _log.info("%s: a norm of %s is left to %s: %s", provider, hidden_size, theirs, why)
            return theirs(config=config, hidden_size=hidden_size, eps=eps, **options)
        made = _made(config, hidden_size, eps)
        for parameter in made.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        _log.info("%s: %s in place of %s", provider, made, theirs)
        return made

    return norm


def _why_theirs(config: Any) -> str | None:
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        return f"it is a {config.normalization}"
    if config.memory_efficient_layer_norm:
        return "it keeps its output in place of its input"
    if config.normalization == "LayerNorm" and config.layernorm_zero_centered_gamma:
        return "its weight begins at 0"
    return None


def _made(config: Any, hidden_size: int, eps: float) -> torch.nn.Module:
    device = "cpu" if config.use_cpu_initialization or not torch.cuda.is_available() else "cuda"
    where: Any = {"device": device, "dtype": config.params_dtype}
    if config.normalization == "LayerNorm":
        return nn.LayerNorm(hidden_size, eps, **where)
    return nn.RMSNorm(hidden_size, eps, zero_centered=config.layernorm_zero_centered_gamma, **where)
